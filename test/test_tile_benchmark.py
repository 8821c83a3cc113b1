"""The benchmark of models with tiles keeps what it has simulated and takes it from there, and says what it cannot measure."""
import argparse
import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import small_checkpoint
from tiled_model import TILED, decided, tiled_model

from worldmodel_ros.model import checkpoint

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'


@pytest.fixture
def tile_model(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module('tile_model')


def test_what_was_simulated_is_read_again_as_it_was(tile_model, tmp_path, monkeypatch):
    options = argparse.Namespace(episodes=tmp_path / 'seen.npz', compared='', first_seed=6_000_000, rooms=1, frames=6, sights=4,
                                 hidden=(1.5,), workers=1)
    episodes, sights = tile_model.simulated(options, 64, True)
    monkeypatch.setattr('worldmodel_ros.sim.rollout.collect', None)  # not called again
    again, sights_again = tile_model.simulated(options, 64, True)
    for name in ('frames', 'actions'):
        np.testing.assert_array_equal(again[name], episodes[name])
    assert len(sights[64]) == len(sights_again[64]) >= 1
    for one, other in zip(sights[64], sights_again[64]):
        for field in dataclasses.fields(one):
            before, after = getattr(one, field.name), getattr(other, field.name)
            assert np.array_equal(before, after) and isinstance(after, type(before)), field.name


@pytest.mark.parametrize('parts, complaint', [
    ('prediction,size', '--parts: size is unknown; choose from chunk_time, prediction, '),
    ('weights', 'give its folder as --full'),
    ('memory,precision', "is of preset 'small-test', without tiles, and precision are of models over tiles")])
def test_parts_that_cannot_be_measured_are_refused(tile_model, tmp_path, monkeypatch, capsys, parts, complaint):
    arguments = ['--model', str(small_checkpoint(tmp_path)), '--folder', str(tmp_path), '--parts', parts]
    monkeypatch.setattr('sys.argv', ['tile_model.py', *arguments])
    try:
        assert tile_model.main() == 1
    except SystemExit as error:
        assert error.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.usefixtures('one_thread')
def test_decisions_are_judged_over_pages_of_every_precision(tile_model, tmp_path):
    preset = dataclasses.replace(TILED, image_size=(64, 64), depth=2, window_frames=16, heading_pairs=4)
    checkpoint.save(decided(tiled_model(preset)), tmp_path, {}, dtype=torch.float32)
    ages = [tile_model.engine_of(tmp_path, *pages).memory._tiers.ages for pages in tile_model.PAGES.values()]
    assert ages[2:] == [(1, 4), (1, 2)] and tile_model.TierPolicy.by_window(16).ages == (4,)  # as it was before
    seeds, found = range(6_000_003, 6_000_004), []
    for rows in map(tile_model.decided, [(tmp_path, seed, 1, 0.5) for seed in seeds]):
        assert [name for name, *_ in rows] == list(tile_model.PAGES)
        found.append([[record['psnr_db'] for record in records] for _, records, _ in rows])
        assert all(episode['seconds'] == 0.5 and not episode['reached'] for *_, episode in rows)
    scores = [np.array([list(each.values()) for room in found for each in room[row]]) for row in range(len(ages))]
    errors = [np.abs(each - scores[0]).mean() for each in scores]
    # Each has pages of its own. Which is nearest to the truth is chance here: the weights are.
    assert len(scores[0]) and errors[0] == 0.0 < min(errors[1:]) and len(set(errors)) == len(errors), errors

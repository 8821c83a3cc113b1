"""The benchmark of models with tiles keeps what it has simulated, and takes it from there."""
import argparse
import dataclasses
import importlib
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'


def test_what_was_simulated_is_read_again_as_it_was(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tile_model = importlib.import_module('tile_model')
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

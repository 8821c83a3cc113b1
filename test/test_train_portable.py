"""Weights that are small enough to carry to another machine, and training that goes on from them there."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from episodes import moving_squares
from small_model import small_model

from worldmodel_ros.model import checkpoint
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run import portable
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.loop import REWARM_STEPS, Optimiser, averaged_copy, optimise
from worldmodel_ros.train.run.options import TeacherOptions
from worldmodel_ros.train.run.progress import Randomness
from worldmodel_ros.train.run.ranks import Ranks
from worldmodel_ros.train.run.reading import ConfigError

pytestmark = pytest.mark.usefixtures('one_thread')

ALONE = Ranks(torch.device('cpu'))
OPTIONS = TeacherOptions(batch=2, clip_frames=12, chunks=2)
FIRST, SECOND = 80, 120  # steps of the schedules


@pytest.fixture(scope='module')
def episodes():
    squares = moving_squares()
    squares.encode(small_model().vae)
    return squares


def train(episodes, out, steps):
    """Errors of the steps, and what the loop returns."""
    model = small_model().requires_grad_(True)
    found = optimise(model, lambda averaged: TeacherObjective(model, episodes, OPTIONS), Schedule(steps, 3e-3, average=0.9),
                     stage='teacher', ranks=ALONE, out=out, log_every=0.0, carried=out / 'portable')
    rows = [json.loads(line) for line in (out / 'teacher.jsonl').read_text().splitlines()]
    return rows, found, model


def test_training_goes_on_from_carried_weights_in_an_empty_folder(episodes, tmp_path):
    before, found, model = train(episodes, tmp_path / 'here', FIRST)
    carried = tmp_path / 'here' / 'portable'
    assert found['steps'] == FIRST and portable.begun(carried, 'teacher')[0] == FIRST
    assert portable.begun(carried, 'student') is None and portable.begun(tmp_path, 'teacher') is None
    for name, tensor in checkpoint.load(carried).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=2 ** -8, atol=1e-30)
    (tmp_path / 'there').mkdir()
    carried.rename(tmp_path / 'there' / 'portable')
    after, found, _ = train(episodes, tmp_path / 'there', SECOND)
    assert [row['step'] for row in after] == list(range(FIRST, SECOND)) and found['steps'] == SECOND
    assert found['seconds'] >= portable.begun(tmp_path / 'there' / 'portable', 'teacher')[1] > 0.0

    def loss(rows):
        return np.mean([row['loss'] for row in rows])
    gained = loss(before[:10]) - loss(before[-20:])
    assert loss(after[:10]) < loss(before[-20:]) + 0.25 * gained, 'it begins again'
    assert all(row['host_ms'] > 0.0 for row in after)


def test_the_rate_rises_where_moments_begin_also_after_an_interruption(episodes):
    model = small_model().requires_grad_(True)
    schedule = Schedule(1000, 1e-3, warm_up=0.0)

    def new():
        return Optimiser(model, averaged_copy(model), TeacherObjective(model, episodes, OPTIONS).parameters(), schedule, ALONE)
    optimiser = new()

    def rate():
        optimiser.learn(objective, rng, torch.Generator().manual_seed(0), 500, 0.5)
        return optimiser.optimisers['adam'].param_groups[0]['lr']
    objective, rng = TeacherObjective(model, episodes, OPTIONS), np.random.default_rng(0)
    full = rate()
    optimiser.begin_with({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert rate() == pytest.approx(full / REWARM_STEPS) and rate() == pytest.approx(2 * full / REWARM_STEPS)
    interrupted, optimiser = optimiser.state(), new()
    optimiser.restore(interrupted)
    assert rate() == pytest.approx(3 * full / REWARM_STEPS)  # as without the interruption
    del interrupted['rewarmed']  # as of a run from its beginning
    optimiser.restore(interrupted)
    assert rate() == full


def test_clips_are_not_those_of_the_beginning(episodes):
    begun, later = Randomness(0, 'teacher', ALONE), Randomness(0, 'teacher', ALONE)
    later.begin_at(FIRST)
    assert begun.numpy.integers(1 << 60) != later.numpy.integers(1 << 60)
    assert begun.generator.initial_seed() != later.generator.initial_seed()


@pytest.mark.parametrize('renamed', [0, 1])
def test_a_process_that_ends_between_two_renames_leaves_the_weights_that_were_written(tmp_path, monkeypatch, renamed):
    carried, rename, left = tmp_path / 'portable', Path.rename, iter([True] * renamed)
    portable.write(carried, small_model(), 'teacher', 3, 1.0)

    def killed(path, target):
        if next(left, False):
            return rename(path, target)
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Path, 'rename', killed)
        with pytest.raises(KeyboardInterrupt):
            portable.write(carried, small_model(), 'teacher', 4, 1.5)
    assert portable.begun(carried, 'teacher') == ((4, 1.5) if renamed else (3, 1.0))
    assert portable.load(carried, 'teacher', small_model()).step == 3 + renamed
    portable.write(carried, small_model(), 'teacher', 5, 2.0)
    assert portable.begun(carried, 'teacher') == (5, 2.0) and [each.name for each in tmp_path.iterdir()] == ['portable']


def test_weights_of_a_later_stage_are_not_replaced_by_an_earlier_one_that_begins(tmp_path):
    portable.write(tmp_path / 'portable', small_model(), 'student', 3, 1.0)
    with pytest.raises(ConfigError, match='weights of the stage student, and teacher, which comes before it, is not complete'):
        portable.load(tmp_path / 'portable', 'teacher', small_model())
    assert portable.load(tmp_path / 'portable', 'self_forcing', small_model()) is None  # it comes after it


def test_weights_of_another_shape_are_refused(tmp_path):
    portable.write(tmp_path / 'portable', small_model(), 'teacher', 3, 1.0)
    portable.write(tmp_path / 'portable', small_model(), 'teacher', 4, 1.5)  # replaces it
    assert portable.begun(tmp_path / 'portable', 'teacher') == (4, 1.5) and [p.name for p in tmp_path.iterdir()] == ['portable']
    file = tmp_path / 'portable' / 'model.json'
    content = json.loads(file.read_text())
    content['preset']['name'] = 'other'
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match='another preset'):
        portable.load(tmp_path / 'portable', 'teacher', small_model())

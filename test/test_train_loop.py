"""The loop: losses fall, schedules end by steps or by the clock, and what is interrupted goes on bit for bit."""
import json
import math
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from episodes import moving_squares
from small_model import small_model

from worldmodel_ros.train.objectives.objective import Objective
from worldmodel_ros.train.objectives.self_forcing import SelfForcingObjective
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.objectives.vae import VaeObjective, normalise
from worldmodel_ros.train.run import progress
from worldmodel_ros.train.run.config import Schedule, VaeOptions
from worldmodel_ros.train.run.log import Log
from worldmodel_ros.train.run.loop import UNTIMED_STEPS, Interrupted, Optimiser, averaged_copy, optimise
from worldmodel_ros.train.run.options import SelfForcingOptions, TeacherOptions
from worldmodel_ros.train.run.ranks import Ranks
from worldmodel_ros.train.run.reading import ConfigError

pytestmark = pytest.mark.usefixtures('one_thread')

ALONE = Ranks(torch.device('cpu'))
TEACHER = TeacherOptions(batch=2, clip_frames=12, chunks=2, pose_weight=0.1)
SELF_FORCING = SelfForcingOptions(batch=2, clip_frames=14, chunks=2, crop_frames=10, reuse=3)


@pytest.fixture(scope='module')
def episodes():
    squares = moving_squares()
    squares.encode(small_model().vae)
    return squares


def trainable():
    return small_model().requires_grad_(True)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_vae_learns(episodes, tmp_path):
    vae = trainable().vae
    optimise(vae, lambda averaged: VaeObjective(vae, episodes, VaeOptions(8)), Schedule(40, 1.5e-3), stage='vae',
             ranks=ALONE, out=tmp_path, log_every=0.0)
    error = [line['mse'] for line in lines(tmp_path / 'vae.jsonl')]
    assert np.mean(error[-5:]) < 0.5 * np.mean(error[:5])
    normalise(vae, episodes, torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = vae.encode_clips(episodes.images(torch.arange(6)[:, None], torch.arange(20)[None]))
    spread = latents.std((0, 1, 2, 3))
    assert ((spread > 0.3) & (spread < 3.0)).all(), 'latents are not normalised'


def test_clips_are_encoded_as_the_live_session_does(episodes):
    vae, previous = small_model().vae, None
    for t in range(5):
        latent, previous = vae.encode(episodes.images(torch.arange(6), torch.full((6,), t)), previous)
        torch.testing.assert_close(episodes.latents[:, t].float(), latent, rtol=0.01, atol=0.01)  # kept in bfloat16


@pytest.mark.parametrize('stage, matrix_rate', [('teacher', None), ('teacher', 1e-2), ('self_forcing', None)])
def test_what_was_interrupted_and_resumed_is_bit_for_bit_what_was_not(episodes, tmp_path, stage, matrix_rate):
    frozen = small_model(seed=1)

    def train(out, interrupt_at=None):
        model = trainable()

        def make(averaged):
            if stage == 'teacher':
                objective = TeacherObjective(model, episodes, TEACHER)
            else:
                objective = SelfForcingObjective(model, averaged, frozen, episodes, SELF_FORCING)
            draw, drawn = objective.draw, []

            def draw_and_interrupt(rng, generator):
                drawn.append(None)
                if len(drawn) == interrupt_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                return draw(rng, generator)

            objective.draw = draw_and_interrupt
            return objective

        torch.manual_seed(5)  # an auxiliary head begins as in the first attempt, whatever was drawn before
        schedule = Schedule(6, 1e-2, matrix_rate=matrix_rate)
        result = optimise(model, make, schedule, stage=stage, ranks=ALONE, out=out, seed=7, log_every=0.0)
        return model, result

    through, result = train(tmp_path / 'through')
    assert result['steps'] == 6
    with pytest.raises(Interrupted, match='saved at step 2 of 6 in .*; the same command goes on'):
        train(tmp_path / 'parts', interrupt_at=2)
    with pytest.raises(Interrupted, match='saved at step 5 of 6'):
        train(tmp_path / 'parts', interrupt_at=3)
    resumed, result = train(tmp_path / 'parts')
    assert result['steps'] == 6
    for name, value in through.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not torch.equal(through.dit.embed.weight, small_model().dit.embed.weight)
    assert [line['step'] for line in lines(tmp_path / 'parts' / f'{stage}.jsonl')] == list(range(6))


def test_roll_outs_of_episodes_that_came_in_another_order_are_not_gone_on_with(episodes):
    model, rng, generator = trainable(), np.random.default_rng(0), torch.Generator().manual_seed(0)

    def objective(of):
        return SelfForcingObjective(model, small_model(), small_model(seed=1), of, SELF_FORCING)
    begun = objective(episodes)
    begun.draw(rng, generator)
    other = replace(episodes, latents=episodes.latents.flip(0))
    for of, left in ((episodes, begun.left), (other, 0)):
        again = objective(of)
        again.restore(begun.state())
        assert again.left == left
    assert begun.left > 0


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest():
    model = trainable()
    parameters = list(model.dit.parameters())
    optimiser = Optimiser(model, averaged_copy(model), parameters, Schedule(6, 1e-3, matrix_rate=5e-3), ALONE)
    names = {id(parameter): name for name, parameter in model.dit.named_parameters()}
    by_muon = {names[id(p)] for group in optimiser.optimisers['muon'].param_groups for p in group['params']}
    assert by_muon == {name for name, p in model.dit.named_parameters() if name.startswith('blocks.') and p.ndim == 2}
    by_adam = {names[id(p)] for group in optimiser.optimisers['adam'].param_groups for p in group['params']}
    assert not by_adam & by_muon and len(by_adam | by_muon) == len(parameters)
    optimiser.set_rate(0.5)
    rates = [optimiser.optimisers[name].param_groups[0]['lr'] for name in ('adam', 'muon')]
    assert rates[1] == pytest.approx(5.0 * rates[0])
    with pytest.raises(ValueError, match='matrix_rate'):
        Schedule(6, 1e-3, matrix_rate=0.0)


def test_another_seed_gives_another_model_and_the_same_one_the_same(episodes, tmp_path):
    def train(name, seed):
        model = trainable()
        optimise(model, lambda averaged: TeacherObjective(model, episodes, TeacherOptions(2, 12, 2)), Schedule(2, 1e-2),
                 stage='teacher', ranks=ALONE, out=tmp_path / name, seed=seed)
        return model.dit.embed.weight

    first = train('a', 1)
    assert torch.equal(first, train('b', 1)) and not torch.equal(first, train('c', 2))


class Sleeper(Objective):
    """An objective that takes time and learns nothing much."""

    def __init__(self, weight, seconds=0.0):
        self.weight, self.seconds = weight, seconds

    def parameters(self):
        return [self.weight]

    def draw(self, rng, generator):
        time.sleep(self.seconds)
        return torch.randn(3, generator=generator)

    def loss(self, batch):
        loss = (self.weight * batch).square().mean()
        return loss, {'error': loss}


def test_max_minutes_end_a_stage_early_with_the_schedule_that_follows_the_clock(tmp_path):
    module, rates = torch.nn.Linear(3, 1), []

    class Watched(Sleeper):
        def after_update(self, step):
            rates.append(step)

    began = time.monotonic()
    result = optimise(module, lambda averaged: Watched(module.weight, 0.02), Schedule(100_000, 1.0, max_minutes=0.5 / 60),
                      stage='teacher', ranks=ALONE, out=tmp_path)
    assert 0.5 < time.monotonic() - began < 60.0  # of the half hour that all steps take
    assert UNTIMED_STEPS < result['steps'] == len(rates) <= 30
    assert not (tmp_path / 'teacher' / 'progress').exists()  # it came to its end: nothing to go on from


def test_progress_is_saved_at_intervals_and_only_for_as_many_processes(tmp_path):
    module = torch.nn.Linear(3, 1)
    optimise(module, lambda averaged: Sleeper(module.weight), Schedule(4, 1.0), stage='teacher', ranks=ALONE,
             out=tmp_path, checkpoint_minutes=0.0)
    folder = tmp_path / 'teacher' / 'progress'
    assert [path.name for path in folder.iterdir()] == ['step-00000004']
    assert {path.suffix for path in (folder / 'step-00000004').iterdir()} == {'.safetensors', '.json'}
    with pytest.raises(ValueError, match='is of 1 processes, and these are 2: go on with --gpus 1'):
        progress.load(folder, Ranks(torch.device('cpu'), 0, 2))


def test_a_loss_that_is_not_finite_ends_the_stage_and_its_weights_are_not_saved(tmp_path):
    module = torch.nn.Linear(3, 1)

    class Diverging(Sleeper):
        def loss(self, batch):
            loss, values = super().loss(batch)
            self.seconds += 1.0
            return loss * (math.nan if self.seconds > 3.0 else 1.0), values

        def draw(self, rng, generator):
            return torch.randn(3, generator=generator)

    def train(minutes):
        with pytest.raises(ConfigError, match=r'teacher: at step \d the loss is not finite'):
            optimise(module, lambda averaged: Diverging(module.weight), Schedule(6, 1.0), stage='teacher', ranks=ALONE,
                     out=tmp_path, checkpoint_minutes=minutes)

    train(10.0)
    assert not (tmp_path / 'teacher' / 'progress').exists()
    module = torch.nn.Linear(3, 1)
    train(0.0)
    assert [path.name for path in (tmp_path / 'teacher' / 'progress').iterdir()] == ['step-00000003']


def test_what_is_saved_at_a_step_stays_until_there_is_a_later_one(tmp_path, monkeypatch):
    def saved(step, value):
        progress.save(tmp_path, progress.Progress(step, 1.0, {'weight': torch.tensor(value)}, {}), ALONE)
        return progress.load(tmp_path, ALONE).shared['weight'].item()

    assert saved(2, 1.0) == 1.0
    removed = []
    monkeypatch.setattr(progress.shutil, 'rmtree', lambda folder, **_: removed.append(folder.name))
    saved(2, 1.0)  # as by an attempt that is ended at once
    assert 'step-00000002' not in removed
    monkeypatch.undo()
    assert saved(3, 2.0) == 2.0 and len(list(tmp_path.iterdir())) == 1


def test_a_log_that_is_gone_on_with_keeps_its_lines_whenever_the_attempt_ends(tmp_path):
    path = tmp_path / 'teacher.jsonl'
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    Log(tmp_path, 'teacher', first=2)
    assert [row['step'] for row in lines(path)] == [0, 1]
    Log(tmp_path, 'teacher')
    assert lines(path) == []


def test_a_log_that_is_gone_on_with_forgets_what_came_after_and_tensorboard_gets_the_values(tmp_path):
    log = Log(tmp_path, 'teacher', every=0.0)
    for step in range(4):
        log.add(step, {'flow': torch.tensor(float(step))})
    log.close(4)
    log = Log(tmp_path, 'teacher', first=2, seconds=60.0, every=0.0)
    log.add(2, {'flow': torch.tensor(8.0)})
    log.close(3)
    rows = lines(tmp_path / 'teacher.jsonl')
    assert [(row['step'], row['flow']) for row in rows] == [(0, 0.0), (1, 1.0), (2, 8.0)]
    assert rows[2]['seconds'] >= 60.0
    reading = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator', reason='no TensorBoard here')
    events = reading.EventAccumulator(str(tmp_path / 'tensorboard' / 'teacher')).Reload()
    assert events.Tags()['tensors'] == ['teacher/flow']

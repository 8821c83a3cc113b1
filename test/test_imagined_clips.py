"""Training on clips that go on with what the model itself imagines."""
import numpy as np
import pytest
import torch
from test_tile_training import TILED, decided_model, tiled_episodes

from worldmodel_ros.model.sampling import HALF
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks, mix
from worldmodel_ros.train.objectives import imagined
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.options import TeacherOptions

pytestmark = pytest.mark.usefixtures('one_thread')
FRAMES = 24


@pytest.fixture(scope='module')
def model():
    return decided_model()


def objective_of(model, done=0.6, **options):
    objective = TeacherObjective(model, tiled_episodes(), TeacherOptions(**{
        'batch': 2, 'clip_frames': FRAMES, 'chunks': 4, 'context_noise': 0.0, 'served_share': 0.8, 'imagined_share': 1.0,
        'imagined_depth': 3, **options}))
    objective.done = done
    return objective


def randomness(seed=0):
    return np.random.default_rng(seed), torch.Generator().manual_seed(seed)


def test_what_follows_a_frame_is_imagined_and_the_truth_stays_the_target(model, monkeypatch):
    objective, random = objective_of(model), randomness()
    monkeypatch.setattr(objective, 'forward', lambda batch, z, tau, step: (torch.full_like(z, 7.0), None, None))
    lasted = []
    for _ in range(12):
        batch = objective.draw(*random)
        own = ((batch.context - 7.0).abs() < 1e-4).flatten(2).all(-1)
        first = int(own[0].float().argmax())
        assert (own == own[:1]).all() and 8 <= first <= 16 and own[0, first:FRAMES - 3].all() and not own[0, :first].any()
        assert torch.equal(batch.context[~own], batch.clean[~own])
        assert torch.equal(batch.clean, objective.episodes.latents[batch.episode, batch.frame])
        assert torch.equal(batch.target, batch.clean[:, batch.noisy_index])
        assert batch.observed[:, 2:first].all() and not batch.observed[:, first:].any()
        assert batch.starts.min() > first and batch.starts.max() <= FRAMES - 4
        assert batch.apart > 20.0
        lasted.append(batch.frame)
    changes = [n for n in range(1, 12) if lasted[n] is not lasted[n - 1]]
    assert changes[0] <= 3 and np.diff(changes).tolist() == [3] * (len(changes) - 1)


def test_imagined_often_enough_clips_are_what_a_session_would_imagine(model, monkeypatch):
    monkeypatch.setattr(imagined, 'ONE_STEP_EVERY', 1000)
    objective, (rng, generator) = objective_of(model, imagined_depth=50), randomness(1)
    objective.draw(rng, generator)
    held, k = objective.imagined, TILED.chunk_frames
    held._left, first = 20, held._first
    monkeypatch.setattr(held, '_move_on', lambda: None)
    for _ in range(6):
        batch = objective.draw(rng, generator.manual_seed(5))  # the same noise
    starts = range(first, FRAMES - k + 1, k)
    noise = torch.randn(2, 4 * k, *batch.context.shape[2:], generator=generator.manual_seed(5))
    context = batch.clean.clone()
    for number, start in enumerate(starts):
        z = noise[:, number * k:][:, :k]
        chunk = Chunks(context, batch.actions, np.array([start]), z, batch.actions[:, start:start + k], times=batch.times,
                       until=batch.until, headings=batch.headings)
        with torch.no_grad():
            context[:, start:start + k] = ChunkSampler(model, chunk).euler(z, torch.zeros(z.shape[:2]), 1.0, HALF, 2)
    torch.testing.assert_close(batch.context, context, rtol=1e-4, atol=1e-4)
    assert batch.apart > 0.1


def test_clips_move_on_with_what_they_imagined(model, monkeypatch):
    objective, (rng, generator) = objective_of(model, imagined_depth=30), randomness(0)
    objective.episodes.latents = torch.arange(40.0)[None, :, None, None, None].expand(objective.episodes.latents.shape).clone()
    episodes, count = objective.episodes, [1000.0]

    def forward(batch, z, tau, step):  # each pass gives another number
        count[0] += 1.0
        return torch.full_like(z, count[0]), None, None
    monkeypatch.setattr(objective, 'forward', forward)
    before = objective.draw(rng, generator)
    objective.imagined._left, moved = 25, 0
    for _ in range(20):
        batch = objective.draw(rng, generator)
        on = int(batch.frame[0, -1] - before.frame[0, -1])
        moved += on > 0
        assert on in (0, 4) and (batch.frame[:, 2:] == before.frame[:, 2:] + on).all() and batch.frame.max() < 40
        for each, earlier in ((batch.frame, before.frame), (batch.headings, before.headings)):
            assert torch.equal(each[:, :2], earlier[:, :2])
        assert (batch.times[2:] == before.times[2:] + on).all() and (batch.times[:2] == before.times[:2]).all()
        assert (batch.until[2:] == before.until[2:] + on).all() and (batch.until[:2] == before.until[:2]).all()
        assert torch.equal(batch.clean, episodes.latents[batch.episode, batch.frame])
        assert torch.equal(batch.actions, episodes.actions[batch.episode, batch.frame])
        true = clips.headings(TILED, episodes.actions)[batch.episode[:, 0]].gather(1, batch.frame)
        torch.testing.assert_close(batch.headings[:, 2:], true[:, 2:])
        first, seen = objective.imagined._first, batch.observed[0]
        assert first >= 8 and not seen[first:].any() and torch.equal(batch.context[:, seen], batch.clean[:, seen])
        kept = slice(2 + on, first + on)  # what the pass did not replace
        assert torch.equal(batch.context[:, 2:first], before.context[:, kept][:, :first - 2])
        own = batch.context[0, 2:FRAMES - 3, 0, 0, 0] > 500.0
        assert own[first - 2:].all() and (own == ~seen[2:FRAMES - 3]).all()
        before = batch
    assert moved >= 2 and (batch.context[0, 2:FRAMES - 3] > 500.0).float().mean() > 0.7


def test_losses_tell_imagined_contexts_from_observed_ones(model):
    objective, random = objective_of(model, imagined_share=0.5), randomness()
    names = []
    for _ in range(4):
        loss, values = objective.loss(objective.draw(*random))
        assert torch.isfinite(loss)
        names.append('imagined_half' in values)
        assert ('imagined_apart' in values) == names[-1] and ('half' in values) != names[-1]
    assert names == [True, False, True, False]


def test_the_truth_weighs_less_after_what_has_gone_far_from_it(model):
    objective, random = objective_of(model, imagined_distance=0.5, served_share=0.0, heads_weight=0.0), randomness(6)
    batch = objective.draw(*random)
    apart = (batch.context - batch.clean).square().mean((2, 3, 4))
    expected = torch.stack([1.0 / (1.0 + (apart[:, start - 4:start].mean(1) / 0.5) ** 2) for start in batch.starts.tolist()], 1)
    torch.testing.assert_close(batch.trust, (expected / expected.mean()).repeat_interleave(4, 1))
    assert batch.trust.std() > 0.01
    loss, _ = objective.loss(batch)
    with torch.no_grad():
        x = objective.forward(batch, mix(batch.noise, batch.target, batch.tau), batch.tau, batch.step, batch.blind)[0]
        error = (x - batch.target).square().mean((2, 3, 4))
    weighted = objective.flow_weight(batch.tau) * error * batch.trust
    torch.testing.assert_close(loss.detach(), weighted.mean(), rtol=1e-4, atol=1e-5)
    assert (objective_of(model).draw(*randomness(6)).trust == 1.0).all()


def test_without_a_share_and_in_the_first_half_clips_are_what_they_were(model):
    plain = objective_of(model, imagined_share=0.0)
    for other in (objective_of(model, done=0.4), objective_of(model, imagined_share=0.5)):
        theirs = randomness()
        if other.done > 0.5:
            other.imagined.due()  # the step before was an imagined one
        a, b = plain.draw(*randomness()), other.draw(*theirs)
        assert a.apart is None and b.apart is None and (a.starts == b.starts).all()
        for name in ('context', 'noise', 'tau', 'step', 'target'):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_a_resumed_training_goes_on_with_the_clips_that_it_held(model):
    objective, random = objective_of(model, imagined_depth=20), randomness(2)
    objective.draw(*random)
    objective.imagined._left = 5
    state = {name: tensor.clone() for name, tensor in objective.state().items()}
    again, others = objective_of(model, imagined_depth=20), objective_of(model, imagined_depth=20)
    again.restore(state)
    a, b = (each.draw(*randomness(3)) for each in (objective, again))
    for name in ('context', 'frame', 'noise', 'tau', 'observed'):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert (a.times == b.times).all() and again.imagined._left == 4
    others.episodes.latents = others.episodes.latents + 1.0  # simulated again, in another order
    others.restore(state)
    assert torch.equal(others.draw(*randomness(3)).clean.min(), others.imagined._clips['clean'].min())
    assert others.imagined._left != 4 and torch.isfinite(others.loss(others.draw(*randomness(4)))[0])


def test_clips_without_room_for_what_is_imagined_are_refused(model):
    with pytest.raises(ValueError, match=r'two chunks or more after 3 frames of a clip: give chunks \(4\) and clip_frames'):
        objective_of(model, clip_frames=10)
    with pytest.raises(ValueError, match='imagined_share is 1.5: it must be from 0 to 1'):
        TeacherOptions(imagined_share=1.5)

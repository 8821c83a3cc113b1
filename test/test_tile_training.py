"""Training over tiles: masks over whole sequences against a session on pages, and against FlexAttention."""
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tiled_model
from small_model import small_model
from torch.nn.attention.flex_attention import create_mask

from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.presets import SMALL, SMALL_TILES
from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.sim.rollout import array_shapes, collect
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import FAR, Chunks, after_sinks, mix
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.data.live import LiveEpisodes, Simulation
from worldmodel_ros.train.data.recall import recall_moments
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.loop import Optimiser, averaged_copy
from worldmodel_ros.train.run.options import TeacherOptions
from worldmodel_ros.train.run.ranks import Ranks

pytestmark = pytest.mark.usefixtures('one_thread')
CHUNKS = 20
# 2 x 2 tiles a slab of two frames; chunks of two slabs; a window of four; all of a column, and half of a plane around.
TILED = replace(tiled_model.TILED, image_size=(64, 64), patterns=((0, 1, 1), (3, 1, 2)), heading_pairs=4)


def decided_model():
    return tiled_model.decided(tiled_model.tiled_model(TILED))


@pytest.fixture(scope='module')
def model():
    return decided_model()


def episode(count, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *TILED.image_size, 3), dtype=np.uint8)
    return images, (rng.uniform(-0.3, 0.3, (count, 2)) * (1.0, 5.0)).astype(np.float32)


def driven(model, images, actions, precision):
    """A session that imagines a chunk after every few frames: the latents of its images, features and chunks."""
    engine = Engine(TorchBackend(model, precision=precision), Path('tiled'), 1)
    session, chunk = engine.open_session(), TILED.chunk_frames
    latents, features, chunks, starts, state = [], [], [], [], None
    for t, (image, action) in enumerate(zip(images, actions)):
        (latent, state), = engine.backend.run('encode', [(image, state)])
        latents.append(engine.backend.host(latent))
        session.observe(image, action)
        features.append(engine.backend.host(session._features))
        if t % 3 == 0 and len(chunks) < CHUNKS and t + chunk < len(images):
            chunks.append(session.imagine(actions[t + 1:t + 1 + chunk]).latents)
            starts.append(t + 1)
    return np.stack(latents), np.stack(features), np.stack(chunks), np.array(starts)


@pytest.mark.parametrize('precision, most', [(Precision.FP32, 1e-4), (Precision.BF16, 0.012)])
def test_a_pass_of_training_gives_what_a_session_on_pages_gives_over_twenty_chunks(precision, most):
    images, actions = episode(3 * CHUNKS + 5)
    latents, features, chunks, starts = driven(decided_model(), images, actions, precision)
    assert len(chunks) == CHUNKS and starts[-1] > 6 * TILED.window_frames
    model, k = decided_model(), TILED.chunk_frames
    draw = Noise(0, (k, *TILED.latent_size, TILED.latent_channels)).draw
    noise = torch.from_numpy(np.concatenate([draw(start) for start in starts.tolist()]))[None]
    latents, actions = (torch.from_numpy(part)[None] for part in (latents, actions))
    index = (starts[:, None] + np.arange(k)).ravel()
    with torch.inference_mode():
        sampler = ChunkSampler(model, Chunks(latents, actions, starts, noise, actions[:, index]))
        found = sampler.euler(noise, torch.zeros(noise.shape[:2]), 1.0, HALF, 2)[0].unflatten(0, (-1, k)).numpy()
        ones, times = torch.ones(1, len(images)), np.arange(len(images))
        phases = clips.rotary(TILED, times, clips.headings(TILED, actions))
        of_frames = model.dit(latents, ones, ones.long() * FLOW, actions, phases,
                              clips.committed_mask(TILED, times, ones.device))[1][0].numpy()
    for ours, pages in ((found, chunks), (of_frames, features)):
        error = np.sqrt(np.mean((ours - pages) ** 2, tuple(range(1, ours.ndim))) / np.mean(pages ** 2))
        assert error.max() < most


def test_what_a_chunk_sees_depends_on_how_far_the_robot_has_turned_since_and_not_on_how_it_began(model):
    k, rng = TILED.chunk_frames, torch.Generator().manual_seed(2)
    shape = *TILED.latent_size, TILED.latent_channels
    latents, noise = (torch.randn(1, count, *shape, generator=rng) for count in (9, k))
    actions, chunk = torch.zeros(1, 9, 2), torch.zeros(1, k, 2)

    def predicted(headings):
        batch = Chunks(latents, actions, np.array([9]), noise, chunk, headings=headings)
        tau = torch.zeros(1, k)
        with torch.inference_mode():
            return ChunkSampler(model, batch).predict(noise, tau, torch.full_like(tau, HALF, dtype=torch.long))

    straight, away = torch.zeros(1, 9), torch.linspace(0.0, 2.0, 9)[None]
    torch.testing.assert_close(predicted(straight + 1.3), predicted(straight), rtol=0, atol=1e-4)
    torch.testing.assert_close(predicted(straight), predicted(None), rtol=0, atol=0)
    assert (predicted(away) - predicted(straight)).abs().max() > 1e-3


def test_moments_at_which_a_robot_turns_back_to_what_left_its_view():
    turns = np.concatenate([np.zeros(10), np.full(20, 0.1), np.zeros(25), np.full(20, -0.1), np.zeros(5)])
    found = np.flatnonzero(recall_moments(turns.cumsum(), 4))
    assert found.min() >= 52 and found.max() <= 75 and len(found) > 12  # back from frame 55 on; chunks of four look ahead
    assert not recall_moments(np.zeros(80), 4).any()
    assert not recall_moments(np.full(80, 0.05).cumsum(), 4).any()  # all it turns to is new
    short = np.concatenate([np.zeros(10), np.full(6, 0.1), np.full(6, -0.1), np.zeros(40)])
    assert not recall_moments(short.cumsum(), 4).any()  # what comes back was seen a moment ago


def looking_away(frames=140):
    """Episodes that turn away and back, each a frame later than the one before."""
    actions = torch.zeros(4, frames, 2)
    for number, each in enumerate(actions):
        each[34 + number:46 + number, 1], each[74 + number:86 + number, 1] = 1.4, -1.4
    return replace(tiled_episodes(frames), actions=actions)


def test_clips_of_a_batch_turn_back_at_the_same_frame_and_chunks_begin_there(model):
    episodes = looking_away()
    recalls = episodes.recalls(TILED)
    options = TeacherOptions(batch=3, clip_frames=64, chunks=10, recall_share=0.6, context_noise=0.0)
    objective = TeacherObjective(model, episodes, options)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    displaced = 0
    for _ in range(60):
        batch = objective.draw(rng, generator)
        assert batch.clean.shape[:2] == (3, 64) and len(set(batch.episode[:, 0].tolist())) == 3
        assert (batch.frame == batch.frame[:1]).all() and batch.frame.max() < 140
        assert (batch.frame[0, :2] == torch.arange(2)).all() and (batch.frame[0, 2:].diff() == 1).all()
        moments = batch.frame[0, torch.from_numpy(batch.starts[:6])].numpy()
        near = [recalls[int(e), max(0, m - 10):m + 3].any() for e in batch.episode[:, 0] for m in moments]
        assert all(near) and batch.starts.min() >= 3 and batch.starts.max() <= 60
        true = clips.headings(TILED, episodes.actions)[batch.episode[:, 0]].gather(1, batch.frame)
        torch.testing.assert_close(batch.headings[:, 2:], true[:, 2:])
        same = torch.allclose(batch.headings[:, :2], true[:, :2])
        assert same == (batch.times[2] == batch.frame[0, 2].item())  # minutes later nothing tells how it began
        displaced += not same
    assert 5 < displaced < 55


def test_clips_that_turn_back_end_with_their_episodes(model):
    episodes = replace(looking_away(), lengths=torch.tensor([140, 90, 140, 140]))
    episodes.actions[1, 90:] = 0.0
    objective = TeacherObjective(model, episodes, TeacherOptions(batch=3, clip_frames=64, chunks=10, recall_share=0.6))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for _ in range(20):
        batch = objective.draw(rng, generator)
        assert len(set(batch.episode[:, 0].tolist())) == 3  # so they turn back
        assert (batch.frame < episodes.lengths[batch.episode]).all()


def test_without_enough_episodes_that_turn_back_clips_are_drawn_as_ever(model):
    options = {'clip_frames': 36, 'chunks': 4}
    (_, with_share), (_, without) = (drawn(model, recall_share=share, **options) for share in (0.5, 0.0))
    assert (with_share.starts == without.starts).all() and torch.equal(with_share.clean, without.clean)


@pytest.mark.parametrize('preset, frames', [(tiled_model.SMALL, 40), (TILED, 28)])
def test_recalls_that_cannot_be_are_refused(preset, frames):
    with pytest.raises(ValueError, match='recall_share is for presets with tiles, and clips of'):
        TeacherObjective(small_model(preset=preset), tiled_episodes(), TeacherOptions(clip_frames=frames, recall_share=0.5))


def test_second_half_steps_are_learned_from_where_the_models_own_first_ones_end():
    model = decided_model().requires_grad_(True)
    objective, _ = drawn(model, batch=8, clip_frames=24, chunks=4, served_share=1.0, own_halfway=1.0)
    objective.done = 0.4
    assert not objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0)).own_halfway
    objective.done = 0.6
    batch = objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))
    assert batch.own_halfway
    with torch.autocast('cpu', torch.bfloat16):
        loss, values = objective.loss(batch)
    gradients = torch.autograd.grad(loss, list(model.dit.parameters()), allow_unused=True)
    unused = [name for (name, _), gradient in zip(model.dit.named_parameters(), gradients) if gradient is None]
    assert not unused, unused
    second = (batch.tau == 0.5) & (batch.step == HALF)
    assert (batch.halfway == second).all() and second.any()
    with torch.no_grad():
        first = objective.forward(batch, batch.noise, torch.zeros_like(batch.tau), torch.full_like(batch.step, HALF))[0]
        z = torch.where(second[..., None, None, None], 0.5 * (batch.noise + first), mix(batch.noise, batch.target, batch.tau))
        error = (objective.forward(batch, z, batch.tau, batch.step)[0] - batch.target).square().mean((2, 3, 4))
    torch.testing.assert_close(values['half'].detach(), error[batch.step == HALF].mean(), rtol=0.02, atol=0.02)


def test_one_pass_over_frames_and_chunks_is_the_pass_over_chunks_after_the_frames(model):
    k, rng = TILED.chunk_frames, torch.Generator().manual_seed(1)
    starts, frames = np.array([1, 9, 22]), 26
    shape = *TILED.latent_size, TILED.latent_channels
    latents, noise = (torch.randn(2, count, *shape, generator=rng) for count in (frames, len(starts) * k))
    actions, tau = torch.rand(2, frames, 2, generator=rng) * 0.2, torch.full((2, len(starts) * k), 0.3)
    batch = Chunks(latents, actions, starts, noise, actions[:, (starts[:, None] + np.arange(k)).ravel()])
    ones, times = torch.ones(2, frames), batch.frame_times
    with torch.inference_mode():
        apart = ChunkSampler(model, batch).predict(noise, tau, torch.full_like(tau, FLOW, dtype=torch.long))
        together = model.dit(
            torch.cat([latents, noise], 1), torch.cat([ones, tau], 1), torch.full((2, frames + noise.shape[1]), FLOW),
            torch.cat([actions, batch.noisy_actions], 1),
            torch.cat(batch.rotary(TILED), -3),
            clips.sequence_mask(TILED, times, starts, ones.device))[0][:, frames:]
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-5)


# As ``small_tiles``, with a sixteenth of its tokens; its own sizes follow for a few frames alone.
FEW_TOKENS = replace(SMALL_TILES, name='few-tokens', image_size=(32, 32), tile=(4, 2, 2))


def masks():
    """Of both patterns of the preset for training and of one with a neighbourhood in the plane, over a gap in time."""
    times = np.concatenate([np.arange(4), 400 + np.arange(28)])
    for preset, frames, starts in ((FEW_TOKENS, times, [5, 21]), (TILED, np.arange(16), [5, 11]),
                                   (SMALL_TILES, np.arange(6), [3])):
        for which, found in (('sequence', clips.sequence_mask(preset, frames, np.array(starts), torch.device('cpu'))),
                             ('noisy', clips.noisy_mask(preset, frames, np.array(starts), torch.device('cpu')))):
            yield from ((preset, which, mask) for mask in dict.fromkeys(found))


@pytest.mark.parametrize('preset, which, mask', masks(), ids=lambda value: getattr(value, 'name', None))
def test_the_blocks_of_flex_attention_are_those_of_the_mask(preset, which, mask):
    blocks, units = mask.make_blocks().mask, mask.units
    full = create_mask(blocks.mask_mod, 1, 1, *blocks.seq_lengths, device='cpu')[0, 0]
    assert (full == units.repeat_interleave(mask.unit, 0).repeat_interleave(mask.unit, 1)).all()
    if mask.column:
        assert (torch.kron(mask.frames, mask.tiles).repeat_interleave(mask.run, 0).repeat_interleave(mask.run, 1)
                == mask.dense).all()
    else:
        assert (full == mask.dense).all()
    listed = torch.zeros(1, 1, -(-full.shape[0] // 128), -(-full.shape[1] // 128), dtype=torch.int)
    for counts, indices, value in ((blocks.kv_num_blocks, blocks.kv_indices, 1),
                                   (blocks.full_kv_num_blocks, blocks.full_kv_indices, 2)):
        for row in range(listed.shape[2]):
            listed[0, 0, row, indices[0, 0, row, :counts[0, 0, row]].long()] = value
    cells = torch.nn.functional.pad(full, (0, -full.shape[1] % 128, 0, -full.shape[0] % 128)).unflatten(1, (-1, 128)
                                                                                                      ).unflatten(0, (-1, 128))
    assert (listed[0, 0] == cells.any(3).any(1).int() + cells.all(3).all(1).int()).all()


@pytest.mark.parametrize('number', range(2))
def test_flex_attention_gives_what_a_dense_mask_gives(number):
    preset, rng = FEW_TOKENS, torch.Generator().manual_seed(number)
    mask = clips.sequence_mask(preset, np.arange(32), np.array([3, 22]), torch.device('cpu'))[number]
    q, k, v = (torch.randn(1, 2, 40 * preset.tokens, 16, generator=rng) for _ in range(3))
    expected = mask.attend(q, k, v)
    mask.blocks = mask.make_blocks()
    found = mask.attend(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_clips_begin_with_the_sinks_of_their_episode_and_go_on_later_in_it():
    rng = np.random.default_rng(0)
    drawn = [after_sinks(replace(SMALL_TILES, keyframe_slabs=0), 20, 100, rng) for _ in range(200)]
    for index, times in drawn:
        assert (index[:4] == np.arange(4)).all() and (times[:4] == np.arange(4)).all()
        assert (np.diff(index[4:]) == 1).all() and (np.diff(times[4:]) == 1).all() and index[-1] < 100
        assert times[4] % 4 == 0 and times[4] >= index[4]  # later in the session than in the episode, never before
        assert times[4] == index[4] or index[4] >= 4 + FAR
    ahead = np.array([index[4] for index, _ in drawn])
    assert 0.2 < (ahead == 4).mean() < 0.5 and ahead.max() == 84
    assert max(times[4] for _, times in drawn) > 4000


def tiled_episodes(frames=40):
    rng = torch.Generator().manual_seed(3)
    return Episodes(
        torch.zeros(4, frames, 1, 1, 3, dtype=torch.uint8), torch.rand(4, frames, TILED.actions, generator=rng) * 0.3,
        expert=torch.rand(4, frames, len(TILED.goals), TILED.actions, generator=rng) * 0.3,
        collided=torch.zeros(4, frames, dtype=torch.bool), goal_distance=torch.rand(4, frames, len(TILED.goals), generator=rng),
        latents=torch.randn(4, frames, *TILED.latent_size, TILED.latent_channels, generator=rng))


def drawn(model, **options):
    objective = TeacherObjective(model, tiled_episodes(), TeacherOptions(**{'batch': 2, 'context_noise': 0.0, **options}))
    return objective, objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))


def test_a_clip_of_pieces_is_several_sessions_that_do_not_see_each_other(model):
    objective, batch = drawn(model, clip_frames=24, chunks=4, pieces=2)
    k, piece = TILED.chunk_frames, np.arange(24) // 12
    assert (batch.starts % 12 >= 1).all() and (batch.starts // 12 == (batch.starts + k - 1) // 12).all()
    assert (np.bincount(batch.starts // 12) == 2).all()
    assert (batch.episode[:, :12] == batch.episode[:, :1]).all() and (batch.episode[:, 12:] == batch.episode[:, 12:13]).all()
    assert not batch.observed[:, piece == 0][:, -k:].any() and batch.observed[:, :12 - k].all()
    with torch.no_grad():
        before = objective.forward(batch, batch.noise, batch.tau, batch.step)
        batch.context[:, 1] += 1.0  # a frame of the first piece
        after = objective.forward(batch, batch.noise, batch.tau, batch.step)
    of_chunks = np.repeat(batch.starts // 12, k)
    for number, place in ((0, of_chunks), (1, of_chunks), (2, piece)):
        changed = (before[number] != after[number]).flatten(2).any(2).any(0).numpy()
        assert not changed[place == 1].any()
        assert changed[place == 0].any()


def test_pieces_last_for_their_share_of_the_schedule(model):
    objective, _ = drawn(model, clip_frames=24, chunks=4, pieces=2, pieces_until=0.5)
    for done, expected in ((0.4, 24), (0.6, 1)):
        objective.done = done
        batch = objective.draw(np.random.default_rng(0), torch.Generator().manual_seed(0))
        assert batch.episode.shape == (2, expected)


@pytest.mark.parametrize('preset, options, message', [
    (tiled_model.SMALL, {'clip_frames': 24, 'pieces': 2}, 'has no tiles, whose masks keep pieces apart'),
    (TILED, {'clip_frames': 8, 'pieces': 2}, 'each must be longer than a chunk')])
def test_pieces_that_cannot_be_are_refused(preset, options, message):
    with pytest.raises(ValueError, match=message):
        TeacherObjective(small_model(preset=preset), tiled_episodes(), TeacherOptions(chunks=4, **options))


def test_pieces_divide_a_clip_and_its_chunks():
    with pytest.raises(ValueError, match=r'pieces is 3: it must divide clip_frames \(28\) and chunks \(3\)'):
        TeacherOptions(clip_frames=28, chunks=3, pieces=3)


def test_served_steps_are_learned_towards_the_truth(model):
    objective, batch = drawn(model, batch=64, clip_frames=24, chunks=4, served_share=0.75)
    served = batch.step != FLOW
    assert 0.6 < served.float().mean() < 0.9
    assert set(zip(batch.step[served].tolist(), batch.tau[served].tolist())) == {(HALF, 0.0), (HALF, 0.5), (WHOLE, 0.0)}
    for rows in (batch.step, batch.tau):  # the frames of a chunk share them
        assert (rows.unflatten(1, (4, -1)) == rows.unflatten(1, (4, -1))[..., :1]).all()
    objective, batch = drawn(model, batch=8, clip_frames=24, chunks=4, served_share=0.75)
    _, values = objective.loss(batch)
    with torch.no_grad():
        z = mix(batch.noise, batch.target, batch.tau)
        error = (objective.forward(batch, z, batch.tau, batch.step)[0] - batch.target).square().mean((2, 3, 4))
    for name, row in (('half', HALF), ('whole', WHOLE)):
        torch.testing.assert_close(values[name].detach(), error[batch.step == row].mean(), rtol=1e-4, atol=1e-5)


def test_live_episodes_are_those_of_their_seeds_and_the_newest_take_the_place_of_the_oldest():
    simulation = Simulation(range(8, 14), range(7, 8), 4, 6, SMALL_TILES, None, torch.device('cpu'), 1)
    try:
        simulation.wait(4)
        while simulation.episodes.added < 6:
            time.sleep(0.05)
        # Its processes share the cores with the training, and PyTorch would take each of them a second and a half to import.
        assert not simulation._pool.apply(eval, ('"torch" in __import__("sys").modules',))
    finally:
        simulation.stop()
    held, live = simulation.held, simulation.episodes
    assert len(held) == 1 and len(live) == 4
    seeds = [7, 12, 13, 10, 11]  # of the six that are not held back, the last two replaced the first two
    alone = collect(seeds, 6, SMALL_TILES.image_size, 1)
    for name in ('frames', 'actions', 'expert', 'poses', 'visible'):
        found = torch.cat([getattr(held, name), getattr(live, name)]).numpy()
        np.testing.assert_array_equal(found, alone[name])


def simulated(count, frames=5):
    """Episodes as a simulation makes them, of noise."""
    rng = np.random.default_rng(0)
    made = [{name: np.zeros(shape[1:], kind) for name, (shape, kind) in array_shapes(1, frames, TILED.image_size).items()
             if len(shape) > 1} for _ in range(count)]
    for each in made:
        each['frames'][:] = rng.integers(0, 256, each['frames'].shape)
    return made


def test_episodes_held_back_are_those_of_their_seeds_whichever_are_done_first(monkeypatch):
    done, made = Event(), simulated(1, 6)[0]

    def drive_alone(job):
        if job[0] >= 10:
            assert done.wait(30.0)
        elif job[0] == 9:
            done.set()
        return made | {'actions': np.full_like(made['actions'], job[0])}
    monkeypatch.setattr('worldmodel_ros.sim.rollout.drive_alone', drive_alone)
    monkeypatch.setattr('multiprocessing.get_context', lambda _: SimpleNamespace(Pool=lambda count, _: ThreadPool(count)))
    simulation = Simulation(range(10), range(10, 12), 10, 6, TILED, None, torch.device('cpu'), 4)
    try:
        simulation.wait(10)
        held, live = (sorted(episodes.actions[:len(episodes), 0, 0].int().tolist())
                      for episodes in (simulation.held, simulation.episodes))
    finally:
        simulation.stop()
    assert held == [10, 11] and live == list(range(10))  # all of them, also those after the last whole chunk


def test_live_episodes_that_come_later_are_encoded_as_those_before():
    model = tiled_model.tiled_model(TILED)
    live, made = LiveEpisodes(3, 5, TILED, torch.device('cpu')), simulated(2)
    live.add(made[:1])
    live.encode(model.vae)
    live.add(made[1:])
    assert len(live) == 2
    for number, each in enumerate(made):
        images = torch.from_numpy(each['frames'])[None].float().div(127.5).sub(1.0).movedim(-1, -3)
        torch.testing.assert_close(live.latents[number].float(), model.vae.encode_clips(images)[0], rtol=0.02, atol=0.02)


def test_an_episode_that_arrives_is_seen_as_a_whole_and_replaces_none_that_is_being_read(monkeypatch):
    turns = np.concatenate([np.zeros(10), np.full(12, 1.4), np.zeros(28), np.full(12, -1.4), np.zeros(8)])
    made = simulated(4, len(turns))
    for number, each in enumerate(made):
        each['actions'][:, 1], each['actions'][:, 0] = turns if number % 2 else 0.0, number
    live = LiveEpisodes(2, len(turns), TILED, torch.device('cpu'))
    vae = tiled_model.tiled_model(TILED).vae
    live.encode(vae)
    encode = vae.encode_clips

    def seen():
        count = len(live)
        return (count, live.recalls(TILED).any(1).tolist(), live.actions[:count, 0, 0].tolist(),
                live.latents[:count].float().abs().sum((1, 2, 3, 4)).tolist(),
                live.frames[:count].float().sum((1, 2, 3, 4)).tolist())

    def encode_clips(images):
        assert seen() == before
        return encode(images)
    monkeypatch.setattr(vae, 'encode_clips', encode_clips)
    for number in (0, 1, 2):
        before = seen()
        with live.reading() if number < 2 else nullcontext():  # places that are free need not be waited for
            live.add(made[number:][:1])
    assert seen()[:3] == (2, [False, True], [2.0, 1.0])
    before = seen()
    with live.reading():
        adding = Thread(target=live.add, args=(made[3:],))
        adding.start()
        adding.join(0.2)
        assert adding.is_alive() and seen() == before
    adding.join()
    assert seen()[1:3] == ([False, True], [2.0, 3.0]) and seen()[3][1] != before[3][1]


def test_the_loop_reads_a_batch_and_its_labels_while_no_episode_is_replaced(model):
    objective, episodes = drawn(model, clip_frames=24, chunks=4)[0], tiled_episodes()
    lock = Lock()
    objective.episodes, episodes.reading = episodes, lambda: lock
    held = []
    objective.draw = lambda *_: held.append(lock.locked())
    objective.loss = lambda _: (held.append(lock.locked()), (torch.zeros((), requires_grad=True), {}))[1]
    schedule = Schedule(1, 1e-3)
    Optimiser(model, averaged_copy(model), [torch.nn.Parameter(torch.zeros(1))], schedule, Ranks(torch.device('cpu'))).learn(
        objective, np.random.default_rng(0), torch.Generator(), 0, 0.0)
    assert held == [True, True] and not lock.locked()


def test_a_simulation_that_ends_early_says_why():
    simulation = Simulation(range(1), range(0), 4, 6, SMALL_TILES, None, torch.device('cpu'), 1)
    try:
        with pytest.raises(RuntimeError, match='ended after 1 episodes: no seeds are left'):
            simulation.wait(2)
    finally:
        simulation.stop()


def test_an_autoencoder_serves_another_size_of_images():
    small = WorldModel(SMALL_TILES)
    checkpoint.take_autoencoder(small, model_folder('tiny'))
    tiny = checkpoint.load(model_folder('tiny'))
    for name, tensor in tiny.vae.state_dict().items():
        assert torch.equal(small.vae.state_dict()[name], tensor)
    with pytest.raises(ModelError, match="of preset 'tiny', is no start for a 'small'"):
        checkpoint.take_autoencoder(WorldModel(SMALL), model_folder('tiny'))

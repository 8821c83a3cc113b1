"""Slabs that stay behind the window because of where the robot was: which, in a session, in a branch, and in training."""
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiled_model
import torch
from test_tile_training import TILED, driven, episode

from worldmodel_ros.cache.keyframes import keyframes, least_needed
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.network_calls import run
from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.presets import SMALL_TILES
from worldmodel_ros.model.rotary import poses_along
from worldmodel_ros.model.sampling import HALF
from worldmodel_ros.model.tile_mask import FOR_GOOD
from worldmodel_ros.train.data.batches import Chunks, after_sinks
from worldmodel_ros.train.data.recall import keyframes_of, moments_of, stay_until
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.options import TeacherOptions

pytestmark = pytest.mark.usefixtures('one_thread')
KEPT = 3
KEYFRAMED = replace(TILED, keyframe_slabs=KEPT)
SIZE = KEYFRAMED.tile[0]


def model():
    return tiled_model.decided(tiled_model.tiled_model(KEYFRAMED))


def of_headings(*degrees):
    return np.array([[0.0, 0.0, np.deg2rad(each)] for each in degrees])


@pytest.mark.parametrize('poses, observed, expected', [
    (of_headings(0, 90, 180, 95), '1111', 1),        # seen twice: the older goes
    (of_headings(0, 90, 180, -177), '1111', 2),      # headings go around
    (of_headings(0, 90, 180, 95), '1110', 3),        # what was imagined goes before what was seen
    (of_headings(0, 90, 180, 95), '1011', 1),
    (of_headings(0, 90, 180, 95), '1010', 3),        # of two that were imagined the first stays what it was
    (of_headings(0, 5, 180, 90), '1110', 3),         # however alike the others are, and however new what was imagined is
    (of_headings(0, 5, 90, 180, 100), '11011', 2),   # the one that is imagined, where two were seen that are more alike
    (of_headings(0, 5, 90, 180, 100), '11000', 4),
    (np.array([[0, 0, 0], [0.2, 0, 0], [0, 0, 0.5]]), '111', 0),  # 0.2 m are less than half a radian
    (np.array([[0, 0, 0], [2.0, 0, 0], [0, 0, 0.5]]), '111', 0)])
def test_of_two_slabs_that_were_taken_alike_one_goes(poses, observed, expected):
    assert least_needed(poses, np.array([each == '1' for each in observed])) == expected


def test_a_turn_all_around_stays_while_the_robot_stands_for_long():
    poses = of_headings(*range(0, 360, 45), *[0] * 100)
    for kept in keyframes(poses, np.ones(len(poses), bool), 8)[8:]:
        assert sorted(np.rad2deg(poses[kept, 2]).round() % 360) == list(range(0, 360, 45))


def test_what_is_imagined_takes_no_place_of_what_was_seen():
    poses = of_headings(*range(0, 300, 50), *range(0, 3600, 20))
    observed = np.arange(len(poses)) < 6
    kept = keyframes(poses, observed, 7)
    assert all(set(range(6)) <= set(each) for each in kept[6:])
    free = kept[-1][-1]
    assert len(kept[-1]) == 7 and 290 < np.rad2deg(poses[free, 2]) % 360 < 330  # where nothing was seen
    observed[-1] = True
    assert keyframes(poses, observed, 7)[-1] == [*range(6), len(poses) - 1]  # what is seen at last takes its place


def held(session):
    """Slabs of a session behind its sinks and before its window."""
    slabs = session._cache.table.slabs[KEYFRAMED.sink_slabs:]
    return slabs[(slabs + 1) * SIZE <= session.frames_seen - KEYFRAMED.window_frames].tolist()


def test_a_session_keeps_what_its_poses_tell_and_never_more():
    images, actions = episode(70)
    expected = keyframes_of(KEYFRAMED, actions)
    session = Engine(TorchBackend(model()), Path('tiled'), 1).open_session()
    changed = set()
    for frame, (image, action) in enumerate(zip(images, actions)):
        session.observe(image, action)
        out = max(0, frame + 1 - KEYFRAMED.window_frames) // SIZE
        assert held(session) == expected[out]
        changed.add(tuple(held(session)))
        slabs = session._cache.table.slabs
        assert len(slabs) <= KEYFRAMED.sink_slabs + KEPT + KEYFRAMED.window_frames // SIZE + 1 and slabs[-1] == frame // SIZE
    assert len(held(session)) == KEPT and len(changed) > 10


@pytest.mark.parametrize('precision, most', [(Precision.FP32, 1e-4), (Precision.BF16, 0.012)])
def test_a_pass_of_training_gives_what_a_session_on_pages_gives_over_twenty_chunks(precision, most):
    images, actions = episode(65)
    latents, _, chunks, starts = driven(model(), images, actions, precision)
    k, executed = KEYFRAMED.chunk_frames, torch.from_numpy(actions)[None]
    draw = Noise(0, (k, *KEYFRAMED.latent_size, KEYFRAMED.latent_channels)).draw
    noise = torch.from_numpy(np.concatenate([draw(start) for start in starts.tolist()]))[None]
    index = (starts[:, None] + np.arange(k)).ravel()

    def passed(stay):
        batch = Chunks(torch.from_numpy(latents)[None], executed, starts, noise, executed[:, index], until=stay)
        with torch.inference_mode():
            found = ChunkSampler(model(), batch).euler(noise, torch.zeros(noise.shape[:2]), 1.0, HALF, 2)[0]
        return found.unflatten(0, (-1, k)).numpy()

    def error(found):
        return np.sqrt(((found - chunks) ** 2).mean((1, 2, 3, 4)) / (chunks ** 2).mean())
    assert len(chunks) == 20 and error(passed(stay_until(KEYFRAMED, actions))).max() < most
    assert error(passed(None))[4:].min() > 0.015  # keyframes are seen, from the first one on


def test_what_is_committed_slab_by_slab_is_committed_as_at_once():
    """Of a branch that imagines three chunks, each slab drops an old one on its way."""
    images, actions = episode(30)
    ahead = np.random.default_rng(1).uniform(-0.3, 0.3, (12, 2)).astype(np.float32) * np.float32([1.0, 5.0])
    session = Engine(TorchBackend(model()), Path('tiled'), 1).open_session()
    for image, action in zip(images, actions):
        session.observe(image, action)
    expected = run(session.branching(ahead), session._backend).latents
    cache, newest, found = session._cache.fork(), session._time, []
    for chunk in ahead.reshape(3, 4, 2):
        latents, _ = run(session._sampler.denoise(cache, newest, chunk, 2), session._backend)
        found.append(latents)
        for part in (slice(0, 2), slice(2, 4)):
            times = newest + 1 + np.arange(4)[part]
            run(session._commit(cache, latents[part], times, chunk[part], observed=False), session._backend)
        newest += 4
    assert cache.table.slabs[1] != KEYFRAMED.sink_slabs  # some keyframes have changed
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=2e-5)


def test_a_long_branch_keeps_what_its_session_saw():
    images, actions = episode(60)
    session = Engine(TorchBackend(model()), Path('tiled'), 1).open_session()
    for image, action in zip(images[:30], actions[:30]):
        session.observe(image, action)
    moment, window = None, KEYFRAMED.window_frames
    for chunk in actions[:48].reshape(6, 8, 2):
        _, moment = run(session.extending(chunk, moment=moment), session._backend)
        table, first = moment.cache.table, moment.time + 1 - window
        behind = ((table.slabs + 1) * SIZE <= first) & (table.slabs >= KEYFRAMED.sink_slabs)
        assert behind.sum() == KEPT and (table.observed == table.valid)[behind].all()
    assert (table.observed[~behind][KEYFRAMED.sink_slabs:] == 0).all()  # its window is imagined as a whole


def test_a_saved_session_goes_on_with_its_keyframes(tmp_path):
    images, actions = episode(60)
    engine = Engine(TorchBackend(model()), Path('tiled'), 2)
    session, other = engine.open_session(), engine.open_session()
    for image, action in zip(images[:40], actions[:40]):
        session.observe(image, action)
    session.save(tmp_path / 'session')
    other.load(tmp_path / 'session')
    assert len(held(other)) == KEPT
    for image, action in zip(images[40:], actions[40:]):
        session.observe(image, action)
        other.observe(image, action)
        assert held(other) == held(session)
    np.testing.assert_array_equal(other.imagine(actions[:4]).latents, session.imagine(actions[:4]).latents)


def test_poses_follow_the_actions():
    turn_left = np.tile(np.float32([0.5, 0.5 * np.pi]), (10, 1))  # a quarter of a circle in one second
    pose = poses_along(KEYFRAMED, turn_left)[-1]
    np.testing.assert_allclose(pose, [1 / np.pi, 1 / np.pi, 0.5 * np.pi], atol=2e-3)
    np.testing.assert_allclose(poses_along(KEYFRAMED, turn_left, pose)[-1], [0.0, 2 / np.pi, np.pi], atol=4e-3)


def test_clips_hold_the_keyframes_of_their_episode():
    rng = np.random.default_rng(0)
    for _ in range(100):
        index, times = after_sinks(SMALL_TILES, 96, 160, rng)
        assert (np.diff(index[36:]) == 1).all() and (np.diff(times[36:]) == 1).all() and index[-1] < 160
        slabs = times[4:36:4] // 4
        assert (np.diff(slabs) > 0).all() and slabs[0] >= 1 and slabs[-1] < times[36] // 4
        assert (times[4:36] == (slabs[:, None] * 4 + np.arange(4)).ravel()).all()


def test_what_is_seen_again_after_long_is_a_moment_only_where_keyframes_stay():
    actions = np.zeros((140, 2), np.float32)
    actions[20:40, 1], actions[110:130, 1] = 1.0, -1.0
    assert moments_of(KEYFRAMED, actions)[110:130].any() and not moments_of(TILED, actions).any()


def test_a_batch_of_training_sees_what_its_episodes_keep():
    from test_tile_training import looking_away
    episodes = looking_away()
    options = TeacherOptions(batch=3, clip_frames=40, chunks=10, recall_share=0.6, context_noise=0.0)
    objective = TeacherObjective(model(), episodes, options)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for _ in range(20):
        batch = objective.draw(rng, generator)
        first = int(batch.frame[0, 8])
        for number, frames in zip(batch.episode[:, 0].tolist(), batch.frame):
            kept = keyframes_of(KEYFRAMED, episodes.actions[number].numpy())[first // SIZE]
            assert (frames[2:8:2] // SIZE).tolist() == kept and (frames[8:].diff() == 1).all()
        assert (batch.until[2:8] == FOR_GOOD).all() and batch.starts.min() >= 9
        loss, _ = objective.loss(batch)
        assert torch.isfinite(loss)


def test_clips_that_are_too_short_for_keyframes_are_refused():
    from test_tile_training import looking_away
    with pytest.raises(ValueError, match='clip_frames is 10, .* 8 frames of sinks and keyframes'):
        TeacherObjective(model(), looking_away(), TeacherOptions(batch=3, clip_frames=10, chunks=4))

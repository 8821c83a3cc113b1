"""Observed moments from which what is far ahead is imagined again: ways between poses, which moments stay, and rollouts."""
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiled_model
from small_model import SMALL, small_model
from test_tile_training import TILED

from worldmodel_ros.engine.anchors import add_anchor, check_anchors, nearest, way_between
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.futures import Moment
from worldmodel_ros.engine.loading import load
from worldmodel_ros.engine.network_calls import run
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.model.rotary import poses_along
from worldmodel_ros.motion import along_arc, twists_between

pytestmark = pytest.mark.usefixtures('one_thread')
KEYFRAMED = replace(TILED, keyframe_slabs=3)
LEFT, STAND = (0.0, 1.0), (0.0, 0.0)


class Pages:
    """Stands for a moment's cache."""

    def __init__(self, lost=False):
        self.lost = lost


def at(x, y, degrees, lost=False):
    return Moment(Pages(lost), 0, None, (), None, pose=(x, y, np.deg2rad(degrees)))


def engine(anchors, preset=KEYFRAMED, sessions=1, precision=Precision.FP32):
    model = small_model(0, preset) if preset.tile is None else tiled_model.decided(tiled_model.tiled_model(preset))
    return Engine(TorchBackend(model, precision=precision), Path('.'), sessions, anchors=anchors)


def observed(made, actions, seed=0):
    session, rng = made.open_session(), np.random.default_rng(seed)
    for action in actions:
        session.observe(rng.integers(0, 255, (*made.spec.image_size, 3), np.uint8), np.array(action, np.float32))
    return session


def extended(session, actions, moment):
    return run(session.extending(np.array(actions, np.float32), 2, moment), session._backend)


def test_ways_lead_where_they_should_within_the_limits():
    rng, low, high = np.random.default_rng(3), np.array(TINY.action_low), np.array(TINY.action_high)
    for _ in range(200):
        start, goal = rng.uniform((-3, -3, -7), (3, 3, 7), (2, 3))
        way = way_between(TINY, start, goal)
        assert len(way) % TINY.chunk_frames == 0
        assert (way >= low - 1e-6).all() and (way <= high + 1e-6).all()
        end = poses_along(TINY, way, start)[-1]
        np.testing.assert_allclose(end[:2], goal[:2], atol=1e-5)
        assert abs(np.remainder(end[2] - goal[2] + np.pi, 2 * np.pi) - np.pi) < 1e-5


def test_a_short_way_back_is_driven_backwards_and_none_is_driven_where_the_robot_stands():
    assert (way_between(TINY, (0, 0, 0), (-0.12, 0, 0))[:, 0] <= 0.0).all()
    assert len(way_between(TINY, (1, 2, 0.5), (1, 2, 0.5 + 2 * np.pi))) == 0
    forwards = replace(TINY, name='forwards', action_low=(0.0, -1.5))
    assert len(way_between(forwards, (1, 2, 0.5), (1, 2, 0.5))) == 0
    way = way_between(forwards, (0, 0, 0), (-0.12, 0, 0))
    assert (way[:, 0] >= 0.0).all()
    np.testing.assert_allclose(poses_along(forwards, way)[-1, :2], (-0.12, 0), atol=1e-5)


def test_twists_between_poses_lead_from_each_to_the_next():
    twists = np.random.default_rng(0).uniform((-0.3, -1.5), (0.6, 1.5), (50, 2))
    poses = np.zeros((51, 3))
    for i, twist in enumerate(twists):
        poses[i + 1] = along_arc(poses[i:i + 1], twist[None].copy(), 0.1)[0]
    poses[:, 2] = np.remainder(poses[:, 2] + np.pi, 2 * np.pi) - np.pi
    np.testing.assert_allclose(twists_between(poses, 0.1), twists, atol=1e-9)


def test_of_two_anchors_that_are_close_together_the_older_goes():
    first, second, third, fourth = at(0, 0, 0), at(1, 0, 0), at(0.1, 0, 0), at(0, 0, 90)
    kept = add_anchor(add_anchor((first, second), third, 3, TINY), fourth, 3, TINY)
    assert kept == (second, third, fourth)
    assert add_anchor((at(0, 0, 0, lost=True), second), third, 3, TINY) == (second, third)  # its pages were needed


def test_the_nearest_anchor_is_the_one_with_the_shortest_way_if_it_is_short_enough():
    behind, turned, lost = at(2, 0, 0), at(0, 0, 60), at(0, 0, 0, lost=True)
    anchor, way = nearest((behind, turned, lost), (0.0, 0.0, 0.0), TINY, 9)
    assert anchor is turned and len(way) == 8
    assert nearest((behind, turned, lost), (0.0, 0.0, 0.0), TINY, 8) is None


def test_a_rollout_goes_on_from_the_nearest_anchor_once_it_has_imagined_more_than_the_way():
    made = engine(anchors=4)
    session = observed(made, [LEFT] * 12)
    start = session.moment()
    assert [round(each.pose[2], 3) for each in start.anchors] == [0.8, 1.0, 1.2] and start.pose == start.anchors[-1].pose
    future, end = extended(session, [STAND] * 4, start)
    plain, _ = extended(session, [STAND] * 4, replace(start, anchors=()))
    np.testing.assert_array_equal(future.latents, plain.latents)  # nothing is nearer than what was just observed
    assert end.imagined == 4 and end.pose == start.pose

    # By now the robot stands where it stood: the next chunk follows the observed frame again, and so does the one after it.
    again, end = extended(session, [STAND] * 8, end)
    np.testing.assert_array_equal(again.latents[:4], future.latents)
    np.testing.assert_array_equal(again.latents[4:], future.latents)
    assert end.imagined == 4 and end.time == start.time + 4


def test_the_way_from_an_anchor_is_imagined_before_what_follows():
    session = observed(engine(anchors=4), [LEFT] * 12)
    start = session.moment()
    _, end = extended(session, [(0.0, -0.3)] * 8, start)
    assert end.imagined == 8
    future, after = extended(session, [STAND] * 4, end)
    anchor, way = nearest(start.anchors, end.pose, KEYFRAMED, end.imagined)
    assert anchor is start.anchors[2] and len(way) == 4
    _, there = extended(session, way, replace(anchor, anchors=()))
    expected, _ = extended(session, [STAND] * 4, there)
    np.testing.assert_array_equal(future.latents, expected.latents)
    np.testing.assert_array_equal(future.frames, expected.frames)
    assert after.imagined == 8 and after.pose == end.pose


@pytest.mark.parametrize('preset', [KEYFRAMED, SMALL], ids=['tiles', 'frames'])
def test_however_long_a_rollout_is_it_is_never_far_from_what_was_observed_and_holds_no_more_pages(preset):
    made = engine(anchors=6, preset=preset)
    session = observed(made, [LEFT] * (preset.window_frames + 40))
    moment, pages = session.moment(), []
    session.close()  # of which the moments do not depend
    longest = 0
    for step in range(24):
        _, moment = extended(session, [(0.1, 1.0 if step % 8 < 6 else -1.0)] * 4, moment)
        longest = max(longest, moment.imagined)
        pages.append(sum(pool.allocator.usage().used for pool in made.memory.pools))
    assert longest < 96 * 0.6  # of 96 frames
    assert max(pages[12:]) <= max(pages[:12])


@pytest.mark.parametrize('precision', [Precision.FP8, Precision.FP4])
@pytest.mark.parametrize('frames', [1, 2], ids=['slabs of one frame', 'slabs of two'])
def test_each_pool_has_room_for_what_all_anchors_keep_in_it_and_a_long_branch(precision, frames):
    preset = replace(KEYFRAMED, tile=(frames, *KEYFRAMED.tile[1:]), window_frames=16)
    plain, made = (engine(anchors, preset, precision=precision) for anchors in (0, 8))
    session = observed(made, [(0.3, 1.0)] * (preset.window_frames + 10 * frames))
    anchors = session.moment().anchors
    for _ in session.what_if(np.array([(0.1, -1.0)] * 48, np.float32)):
        pass
    assert len(anchors) == 8 and not any(anchor.cache.lost for anchor in anchors)
    more = [pool.allocator.pages - without.allocator.pages for pool, without in zip(made.memory.pools, plain.memory.pools)]
    assert 0 < more[0] < more[-1]  # an anchor keeps less of the pool for the newest slabs than of the one for older ones


def test_one_call_imagines_what_several_do():
    session = observed(engine(anchors=4), [LEFT] * 16)
    actions = [(0.2, -1.0)] * 24
    whole, end = extended(session, actions, session.moment())
    parts, moment = [], session.moment()
    for first in range(0, 24, 4):
        part, moment = extended(session, actions[first:first + 4], moment)
        parts.append(part.latents)
    np.testing.assert_array_equal(whole.latents, np.concatenate(parts))
    assert moment.pose == end.pose and moment.imagined == end.imagined


def test_a_session_that_is_reset_or_read_from_a_file_has_no_anchors(tmp_path):
    made = engine(anchors=4, sessions=2)
    session = observed(made, [LEFT] * 12)
    session.save(tmp_path / 'session')
    assert session.moment().anchors
    session.load(tmp_path / 'session')
    assert session.moment().anchors == ()
    session = observed(made, [LEFT] * 12)
    session.reset()
    session.observe(np.zeros((*KEYFRAMED.image_size, 3), np.uint8), np.zeros(2, np.float32))
    assert session.moment().anchors == () and session.moment().pose == (0.0, 0.0, 0.0)


def test_what_cannot_keep_anchors_says_so():
    with pytest.raises(ValueError, match='anchors is 3, and only the actions linear.x and angular.z tell where the robot is'):
        check_anchors(replace(TINY, name='arm', action_names=('joint_1', 'joint_2')), 3)
    with pytest.raises(ModelError, match='anchors is -1: give how many'):
        load('tiny', anchors=-1)
    with pytest.raises(ModelError, match='a model on several GPUs keeps none'):
        load('small_tiles', 'torch-bf16', gpus=2, anchors=3)

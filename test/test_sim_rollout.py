"""Collected episodes: shapes, alignment of actions and frames, limits, and independence of the rest."""
import math

import numpy as np
import pytest

from worldmodel_ros.sim import rollout
from worldmodel_ros.sim.behaviour import DEFAULT_MIX, DRIVERS
from worldmodel_ros.sim.world import COLOURS, LIMITS, World

STEPS = 40


@pytest.fixture(scope='module')
def episodes() -> dict[str, np.ndarray]:
    return rollout.collect(range(8), STEPS, size=(32, 32), workers=1)


def one_episode(seed: int, name: str, steps: int = STEPS) -> dict[str, np.ndarray]:
    shapes = rollout.array_shapes(1, steps, (32, 32))
    episode = {key: np.empty(shape[1:], dtype) for key, (shape, dtype) in shapes.items() if len(shape) > 1}
    assert rollout.drive_episode(World(image_size=(32, 32)), seed, {name: 1.0}, episode) == name
    return episode


def test_every_array_has_its_shape_and_type(episodes):
    goals = len(COLOURS)
    assert {name: (array.shape, array.dtype.kind) for name, array in episodes.items()} == {
        'frames': ((8, STEPS, 32, 32, 3), 'u'), 'actions': ((8, STEPS, 2), 'f'),
        'expert': ((8, STEPS, goals, 2), 'f'), 'search': ((8, STEPS, 2), 'f'), 'collided': ((8, STEPS), 'b'),
        'goal_distance': ((8, STEPS, goals), 'f'), 'visible': ((8, STEPS, goals), 'b'),
        'poses': ((8, STEPS, 3), 'f'), 'behaviour': ((8,), 'U'), 'seeds': ((8,), 'i')}
    assert episodes['seeds'].tolist() == list(range(8))
    assert set(episodes['behaviour']) <= set(DEFAULT_MIX)
    assert np.isfinite(episodes['poses']).all() and np.isfinite(episodes['expert']).all()


@pytest.mark.parametrize('driver', rollout.DRIVERS)
def test_a_drive_tells_its_driver(driver):
    assert rollout.collect([5], 2, (32, 32), 1, {driver: 1.0})['behaviour'].tolist() == [driver]


def test_the_first_frame_is_that_of_the_reset_world_before_any_action(episodes):
    world = World(3, image_size=(32, 32))
    assert np.array_equal(episodes['frames'][3, 0], world.render())
    assert episodes['poses'][3, 0] == pytest.approx(world.pose)
    assert not episodes['actions'][:, 0].any()
    assert not episodes['collided'][:, 0].any()


def test_an_action_is_stored_with_the_frame_that_it_led_to():
    turned, commanded = [], {-1: [], 0: [], 1: []}
    for seed in range(4):
        episode = one_episode(seed, 'steps')
        turn = np.diff(episode['poses'][:, 2])[1:-1]  # into frames 2 to T - 2
        turned.extend((turn + math.pi) % math.tau - math.pi)
        for shift, actions in commanded.items():
            actions.extend(episode['actions'][2 + shift:STEPS - 1 + shift, 1])
    similarity = {shift: np.corrcoef(turned, actions)[0, 1] for shift, actions in commanded.items()}
    assert similarity[0] > 0.85
    assert similarity[0] > max(similarity[-1], similarity[1]) + 0.02


def test_executed_actions_and_expert_labels_respect_the_limits(episodes):
    step = np.array([LIMITS.a_max, LIMITS.alpha_max]) * rollout.PERIOD + 1e-5
    low, high = np.array([LIMITS.v_min, -LIMITS.w_max]) - 1e-6, np.array([LIMITS.v_max, LIMITS.w_max]) + 1e-6
    assert (np.abs(np.diff(episodes['actions'], axis=1)) <= step).all()
    assert (np.abs(episodes['expert'] - episodes['actions'][:, :, None]) <= step).all()
    assert (np.abs(episodes['search'] - episodes['actions']) <= step).all()
    for commands in (episodes['actions'], episodes['expert'], episodes['search']):
        assert (commands >= low).all() and (commands <= high).all()


def test_an_episode_does_not_depend_on_the_others_or_the_number_of_workers(episodes):
    again = rollout.collect([5, 2], STEPS, size=(32, 32), workers=2)
    for name, array in again.items():
        assert np.array_equal(array[0], episodes[name][5]), name
        assert np.array_equal(array[1], episodes[name][2]), name


@pytest.mark.parametrize('name', DRIVERS)
def test_each_driver_moves_the_robot_in_its_way(name):
    episode = one_episode(9, name, steps=120)
    v, w = episode['actions'].T
    assert np.ptp(v) > 0.2 and np.ptp(w) > 0.4
    if name == 'expert':
        assert episode['goal_distance'].min() < 0.6
    if name == 'ram':
        assert episode['collided'].any()


def test_a_searcher_drives_by_the_search_until_it_has_seen_its_goal_and_then_by_the_expert():
    episode = one_episode(7, 'searcher', steps=60)
    executed = episode['actions'][1:]
    searches = np.isclose(episode['search'][:-1], executed).all(-1)
    follows = np.isclose(episode['expert'][:-1], executed[:, None]).all(-1)
    found = int((follows.any(1) & ~searches).argmax())
    goal = int(follows[found].argmax())
    assert searches[:found].all() and not episode['visible'][:found, goal].any() and found > 20
    assert episode['visible'][found, goal] and follows[found:found + 10, goal].all()


def test_a_toucher_turns_and_backs_off_while_it_touches_something():
    def shares(name: str) -> tuple[float, float]:
        turns, backs = [], []
        for seed in range(20, 24):
            episode = one_episode(seed, name, steps=100)
            yaw_rate = np.diff(np.unwrap(episode['poses'][:, 2])) / rollout.PERIOD
            turns.append(episode['collided'][1:] & (np.abs(yaw_rate) > 0.3))
            backs.append(episode['collided'][:-5] & (episode['actions'][5:, 0] < -0.05))  # half a second later
        return np.mean(turns), np.mean(backs)
    turns, backs = shares('touch')
    assert turns > 0.05 > shares('ram')[0] and backs > 0.01


def test_the_data_holds_collisions_and_reverse_driving():
    names = ('steps', 'smooth', 'ram', 'ram')
    episodes = [one_episode(seed, name, steps=100) for seed, name in enumerate(names)]
    assert sum(e['collided'].sum() for e in episodes) > 10
    assert sum((e['actions'][:, 0] < -0.05).sum() for e in episodes) > 10


def test_an_unknown_driver_is_refused_with_the_choices():
    with pytest.raises(ValueError, match='tourist.*expert, searcher, smooth, steps, ram, touch'):
        rollout.collect([0], 5, mix={'tourist': 1.0})


def test_measured_actions_are_what_wheel_encoders_say_of_the_same_drive():
    shapes = rollout.array_shapes(1, STEPS, (32, 32))
    told = {key: np.empty(shape[1:], dtype) for key, (shape, dtype) in shapes.items() if len(shape) > 1}
    measured = {key: array.copy() for key, array in told.items()}
    world = World(image_size=(32, 32))
    for episode, share in ((told, 0.0), (measured, 1.0)):
        rollout.drive_episode(world, 5, {'steps': 1.0}, episode, measured=share)
    for name in told:
        assert np.array_equal(told[name], measured[name]) == (name != 'actions'), name
    assert not measured['actions'][0].any()
    turned = np.unwrap(told['poses'][:, 2])
    off = np.abs(turned[1:] - turned[0] - rollout.PERIOD * np.cumsum(measured['actions'][1:, 1]))
    assert 0.0 < off.max() < 0.25  # rad, of slip and noise

    shares = []
    for seed in range(40):
        episode = one_episode(seed, 'steps', 3)
        commanded = episode['actions'].copy()
        rollout.drive_episode(world, seed, {'steps': 1.0}, episode, measured=0.75)
        shares.append(not np.array_equal(episode['actions'], commanded))
    assert 0.5 < np.mean(shares) < 0.95

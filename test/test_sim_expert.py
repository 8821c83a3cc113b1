"""The expert: reaches goals in rooms that no training saw, and follows rules that a camera can learn."""
import math

import numpy as np
import pytest

from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.expert import expert_action, search_action
from worldmodel_ros.sim.rollout import TRAINING_SEEDS
from worldmodel_ros.sim.scene import GOAL_DISTANCE
from worldmodel_ros.sim.world import COLOURS, LIMITS, World

EVALUATION_SEEDS = range(2_000_000, 2_000_010)

HIDDEN = {5_000_002: 'red', 5_000_003: 'green', 5_000_015: 'blue'}  # goals that cannot be seen from where the robot starts


@pytest.fixture(scope='module')
def world() -> World:
    return World()


def test_it_reaches_the_goal_within_25_s_in_unseen_rooms_without_touching_anything(world):
    limiter = TwistLimiter(LIMITS)
    for seed in EVALUATION_SEEDS:
        assert seed not in TRAINING_SEEDS
        world.reset(seed)
        goal, twist, touched = COLOURS[seed % 4], (0.0, 0.0), False
        while world.goal_distance(goal) >= GOAL_DISTANCE:
            assert world.time < 25.0, f'seed {seed}: {goal} is still {world.goal_distance(goal):.2f} m away'
            twist = limiter.limit(expert_action(world, goal), twist, 0.1).twist
            world.step(twist)
            touched |= world.collided
        assert not touched, f'seed {seed}'


def test_it_stops_at_the_goal_and_stays(world):
    limiter = TwistLimiter(LIMITS)
    world.reset(EVALUATION_SEEDS[0])
    twist = (0.0, 0.0)
    for _ in range(250):
        twist = limiter.limit(expert_action(world, 'red'), twist, 0.1).twist
        world.step(twist)
    assert twist == (0.0, 0.0)
    assert world.goal_distance('red') < GOAL_DISTANCE


def test_it_spins_left_when_the_goal_is_out_of_view_on_either_side(world):
    sides = set()
    for seed in range(40):
        world.reset(seed)
        for goal in COLOURS:
            if abs(world.goal_bearing(goal)) > 0.8:
                assert expert_action(world, goal).tolist() == [0.0, 1.0]
                sides.add(world.goal_bearing(goal) > 0)
    assert sides == {False, True}


def test_it_stays_within_the_speed_limits(world):
    for seed in range(60):
        world.reset(seed)
        for goal in COLOURS:
            v, w = expert_action(world, goal)
            assert LIMITS.v_min <= v <= LIMITS.v_max
            assert abs(w) <= LIMITS.w_max
            assert expert_action(world, goal).dtype == np.float32


def test_a_search_finds_what_turning_on_the_spot_never_shows(world):
    limiter = TwistLimiter(LIMITS)
    for seed, goal in HIDDEN.items():
        world.reset(seed)
        turned, twist = 0.0, (0.0, 0.0)
        while turned < math.tau:
            assert not world.visible(goal)
            twist = limiter.limit((0.0, 1.0), twist, 0.1).twist
            world.step(twist)
            turned += 0.1 * twist[1]
        world.reset(seed)
        twist, touched = (0.0, 0.0), False
        while not world.visible(goal):
            assert world.time < 20.0, f'seed {seed}: {goal} was not found'
            twist = limiter.limit(tuple(search_action(world).tolist()), twist, 0.1).twist
            world.step(twist)
            touched |= world.collided
        assert not touched, f'seed {seed}'


def test_a_search_stops_before_walls_and_goes_on_turning(world):
    world.reset(EVALUATION_SEEDS[0])
    half = world.scene.width / 2
    speeds = []
    for gap in (1.0, 0.2, 0.0):
        world.move_robot((half - 0.16 - gap, 0.0, 0.0))
        v, w = search_action(world)
        speeds.append(v)
        assert w == pytest.approx(1.2)
    assert speeds[0] > speeds[1] > speeds[2] == 0.0

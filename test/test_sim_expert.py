"""The expert: reaches goals in rooms that no training saw, and follows rules that a camera can learn."""
import numpy as np
import pytest

from worldmodel_ros.safety.limits import TwistLimiter
from worldmodel_ros.sim.expert import expert_action
from worldmodel_ros.sim.rollout import TRAINING_SEEDS
from worldmodel_ros.sim.scene import GOAL_DISTANCE
from worldmodel_ros.sim.world import COLOURS, LIMITS, World

EVALUATION_SEEDS = range(2_000_000, 2_000_010)


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

"""How a command in force is followed and brought to rest, for speeds and for joint positions."""

import dataclasses

import pytest

from worldmodel_ros.safety.chunk import Chunk
from worldmodel_ros.safety.gate import Gate, Policy, State
from worldmodel_ros.safety.limits import Limits
from worldmodel_ros.safety.motion import PositionMotion, VelocityMotion

LIMITS = Limits(low=(-1.0, -2.0), high=(1.0, 2.0), rate=(2.0, 2.0))
STEP = 0.1


def trajectory() -> PositionMotion:
    return PositionMotion(LIMITS, whole_chunk=True)


def test_a_trajectory_is_limited_point_by_point():
    rows, limited = trajectory().follow([(0.0, 0.0), (0.5, 0.0), (0.5, 0.0), (9.0, 0.0)], STEP, 0.0)
    assert limited
    assert [row[0] for row in rows] == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_positions_stay_within_the_joint_limits():
    rows, limited = PositionMotion(LIMITS, whole_chunk=False).follow([(5.0, -5.0)], STEP, 0.0)
    assert (rows, limited) == (((1.0, -2.0),), True)


def test_rest_under_position_control_is_where_the_trajectory_has_come_to():
    motion = trajectory()
    motion.follow([(0.0, 0.0)], STEP, 0.0)
    motion.follow([(0.1, 0.0), (0.2, 0.0), (0.3, 0.0)], STEP, 1.0)
    motion.halt(1.15)
    assert motion.row == pytest.approx((0.15, 0.0))


def test_rest_after_the_end_of_a_trajectory_is_its_last_point():
    motion = trajectory()
    motion.follow([(0.1, 0.0), (0.2, 0.0)], STEP, 0.0)
    motion.halt(60.0)
    assert motion.row == (0.2, 0.0)


def test_the_next_trajectory_is_limited_from_the_point_reached():
    motion = trajectory()
    motion.follow([(0.0, 0.0)], STEP, 0.0)
    motion.follow([(0.2, 0.0), (0.4, 0.0)], STEP, 1.0)
    rows, _ = motion.follow([(-1.0, 0.0)], STEP, 1.1)
    assert rows[0] == pytest.approx((0.0, 0.0))


def test_after_others_may_have_moved_the_arm_no_rate_is_taken_from_a_stale_position():
    motion = PositionMotion(LIMITS, whole_chunk=False)
    motion.follow([(-1.0, 0.0)], STEP, 0.0)
    motion.forget()
    assert motion.follow([(1.0, 0.0)], STEP, 60.0) == (((1.0, 0.0),), False)


def test_braking_right_after_a_command_has_only_the_time_since_that_command():
    motion = VelocityMotion(LIMITS)
    motion.follow([(0.2, 0.0)], STEP, 0.0)
    motion.brake(0.001, elapsed=0.05)
    assert motion.row[0] == pytest.approx(0.2 - 2.0 * 0.001)


def test_speed_limits_that_exclude_zero_are_refused():
    with pytest.raises(ValueError, match='admit 0'):
        VelocityMotion(dataclasses.replace(LIMITS, low=(0.1, 0.0)))


@pytest.mark.parametrize('on_timeout', ['slow', 'stop'])
def test_an_arm_under_position_control_is_held_and_never_sent_to_zero(on_timeout):
    gate = Gate(('a', 'b'), trajectory(), Policy(on_timeout=on_timeout))
    gate.on_chunk(Chunk(1, 1, 1, STEP, ('a', 'b'), [0.5, 1.0] * 4), 0.01, 0.0)
    sent = [command for k in range(1, 300) if (command := gate.on_tick(k * 0.01))]
    assert gate.state is State.STOPPED
    # Once: every copy of a trajectory would start it anew.
    assert [command.rows for command in sent] == [((0.5, 1.0),)]


def test_a_single_position_is_repeated_while_the_stop_is():
    gate = Gate(('a', 'b'), PositionMotion(LIMITS, whole_chunk=False), Policy(stop_repeat=0.5))
    gate.on_chunk(Chunk(1, 1, 1, STEP, ('a', 'b'), [0.5, 1.0]), 0.01, 0.0)
    sent = [command for k in range(1, 300) if (command := gate.on_tick(k * 0.01))]
    assert {command.rows for command in sent} == {((0.5, 1.0),)}
    assert 45 <= len(sent) <= 55


def test_an_arm_left_to_others_after_a_stop_is_not_pulled_back_to_where_it_was():
    gate = Gate(('a', 'b'), trajectory(), Policy(stop_repeat=0.5, resume_after=1))
    gate.on_chunk(Chunk(1, 1, 1, STEP, ('a', 'b'), [-1.0, 0.0]), 0.01, 0.0)
    for k in range(1, 200):
        gate.on_tick(k * 0.01)
    command = gate.on_chunk(Chunk(2, 1, 2, STEP, ('a', 'b'), [1.0, 0.0]), 0.01, 2.0)
    assert command.rows == ((1.0, 0.0),)

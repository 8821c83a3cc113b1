"""How a command in force is followed and brought to rest, for speeds and for joint positions."""

import dataclasses
import math

import pytest

from worldmodel_ros.safety.gate import Chunk, Gate, Policy, State
from worldmodel_ros.safety.motion import Limits, MeasuredPositions, PositionMotion, VelocityMotion

NAMES = ('a', 'b')
LIMITS = Limits(low=(-1.0, -2.0), high=(1.0, 2.0), rate=(2.0, 2.0))
STEP = 0.1
TICK = 0.01


def positions(at=(0.0, 0.0), *, whole_chunk=True, limits=LIMITS) -> PositionMotion:
    """Joints that were measured at the time 0."""
    motion = PositionMotion(limits, MeasuredPositions(NAMES), whole_chunk=whole_chunk)
    assert motion.joints.hear(NAMES, at, 0.0) == ''
    return motion


class Arm:
    """A gate with joints that go where the commands send them at once, unless ``stuck``, and are measured at each tick."""

    def __init__(self, at=(0.0, 0.0), *, whole_chunk=True, limits=LIMITS, **policy) -> None:
        self.gate = Gate(NAMES, positions(at, whole_chunk=whole_chunk, limits=limits), Policy(**policy))
        self.at, self.now, self.sequence, self.stuck, self.sent = at, 0.0, 0, False, []

    def offer(self, *rows, step_period=STEP, **changes):
        self.sequence += 1
        stamp = round(self.now * 1e9) + 10**9
        chunk = Chunk(stamp, 1, self.sequence, step_period, NAMES, [value for row in rows for value in row])
        return self._note(self.gate.on_chunk(dataclasses.replace(chunk, **changes), stamp + 10**7, self.now))

    def wait(self, seconds: float, *, measured=True) -> list:
        before = len(self.sent)
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            if measured:
                self.gate.motion.joints.hear(NAMES, self.at, self.now)
            self._note(self.gate.on_tick(self.now))
        return self.sent[before:]

    def _note(self, command):
        if command:
            self.sent.append(command)
            if not self.stuck:
                self.at = command.rows[-1]
        return command


def test_a_trajectory_is_limited_point_by_point():
    rows, limited = positions().follow([(0.0, 0.0), (0.5, 0.0), (0.5, 0.0), (9.0, 0.0)], STEP, 0.0)
    assert limited
    assert [row[0] for row in rows] == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_positions_stay_within_the_joint_limits():
    rows, limited = positions((0.95, -1.95), whole_chunk=False).follow([(5.0, -5.0)], STEP, 0.0)
    assert (rows, limited) == (((1.0, -2.0),), True)


@pytest.mark.parametrize('whole_chunk', [False, True])
def test_the_first_command_of_all_is_limited_from_where_the_joint_is(whole_chunk):
    rows, limited = positions((0.5, 0.5), whole_chunk=whole_chunk).follow([(-1.0, 0.4)], STEP, 0.0)
    assert limited and rows[0] == pytest.approx((0.3, 0.4))


@pytest.mark.parametrize('whole_chunk', [False, True])
@pytest.mark.parametrize('step_period', [0.01, 0.1, 0.5, 3.0, 1000.0])
def test_no_joint_is_sent_further_than_it_may_go_in_the_time_it_has(whole_chunk, step_period):
    # 3 rad at 1 rad/s, in one step.
    limits = Limits(low=(-4.0, -4.0), high=(4.0, 4.0), rate=(1.0, 1.0))
    arm = Arm(whole_chunk=whole_chunk, limits=limits)
    command = arm.offer((3.0, 0.0), step_period=step_period)
    if step_period > 0.5:
        assert command is None and 'step_period is' in arm.gate.last_refusal.text
        return
    due = command.step_period if whole_chunk else 0.1
    assert command.rows[0][0] == pytest.approx(due) and command.step_period == step_period


@pytest.mark.parametrize('whole_chunk', [False, True])
def test_nothing_moves_from_a_position_that_is_not_known(whole_chunk):
    arm = Arm(whole_chunk=whole_chunk)
    arm.gate.motion.joints = MeasuredPositions(NAMES)
    assert arm.offer((0.1, 0.1)) is None
    text = arm.gate.last_refusal.text
    assert 'the position of a never was on joint_states' in text and 'joint_state_broadcaster' in text
    arm.gate.motion.joints.hear(['b', 'gripper', 'a'], [0.0, math.nan, 0.0], arm.now)
    assert arm.offer((0.1, 0.1))
    arm.wait(0.3, measured=False)
    assert arm.offer((0.1, 0.1)) is None
    assert 'last heard 0.300 s ago' in arm.gate.last_refusal.text
    arm.wait(TICK)
    assert arm.gate.state is State.STOPPED


@pytest.mark.parametrize('whole_chunk', [False, True])
def test_after_silence_an_arm_that_others_moved_goes_on_from_where_it_is(whole_chunk):
    arm = Arm(whole_chunk=whole_chunk, stop_repeat=0.5, resume_after=1)
    arm.offer((-0.1, 0.0))
    arm.wait(2.0)
    arm.at = (0.9, 0.0)
    arm.wait(0.1)
    assert arm.offer((-1.0, 0.0)).rows[0] == pytest.approx((0.7, 0.0))


def test_each_trajectory_is_limited_from_where_the_joint_is_by_then_and_not_from_where_the_last_one_began():
    arm = Arm()
    for target in (0.2, 0.4, 0.6):
        assert arm.offer((1.0, 0.0)).rows[0] == pytest.approx((target, 0.0))
        arm.wait(0.1)


@pytest.mark.parametrize('whole_chunk', [False, True])
def test_a_joint_that_does_not_follow_is_commanded_no_further(whole_chunk):
    arm = Arm(whole_chunk=whole_chunk)
    arm.stuck = True
    for _ in range(10):
        arm.offer((1.0, 0.0))
        arm.wait(PERIOD := 0.1)
    assert all(row[0] <= 2.0 * PERIOD + 1e-9 for command in arm.sent for row in command.rows)
    arm.at = (-0.5, 0.0)
    arm.wait(TICK)
    assert arm.offer((1.0, 0.0)) is None
    assert 'a is measured at -0.5, but the commands have brought it to 0.2' in arm.gate.last_refusal.text


def test_a_joint_far_out_of_its_limits_is_not_pulled_back_at_once():
    arm = Arm((3.0, 0.0))
    assert arm.offer((0.0, 0.0)) is None
    assert 'a is measured at 3, out of its limits -1 to 1' in arm.gate.last_refusal.text
    arm.at = (1.001, 0.0)  # noise
    arm.wait(TICK)
    assert arm.offer((1.0, 0.0)).rows[0] == pytest.approx((1.0, 0.0))


def test_rows_offered_in_haste_move_a_joint_no_faster_than_its_rate():
    arm = Arm(whole_chunk=False)
    arm.offer((0.0, 0.0))
    for _ in range(20):
        arm.wait(TICK)
        arm.offer((1.0, 0.0))
    assert arm.at[0] == pytest.approx(2.0 * 20 * TICK)


@pytest.mark.parametrize('names, at, complaint', [
    (['a', 'b'], [0.0], '1 positions for 2 names'), (['a', 'b'], [math.nan, 0.0], 'a at nan'),
    (['b'], [math.inf], 'b at inf')])
def test_a_measurement_that_makes_no_sense_is_refused_and_changes_nothing(names, at, complaint):
    joints = MeasuredPositions(NAMES)
    joints.hear(NAMES, [0.1, 0.2], 0.0)
    assert complaint in joints.hear(names, at, 0.1)
    assert joints.row(0.2) == (0.1, 0.2)


def test_states_without_positions_and_of_other_joints_are_passed_over():
    joints = MeasuredPositions(NAMES)
    assert joints.hear(['a', 'b'], [], 0.0) == '' and joints.hear(['c'], [math.nan], 0.0) == ''
    assert joints.unknown(0.0)
    with pytest.raises(ValueError, match='position of a never'):
        joints.row(0.0)


def test_rest_under_position_control_is_where_the_trajectory_has_come_to():
    motion = positions()
    motion.follow([(0.1, 0.0), (0.2, 0.0), (0.3, 0.0)], STEP, 0.0)
    motion.halt(0.15)
    assert motion.row == pytest.approx((0.15, 0.0))


def test_an_arm_that_lags_is_held_without_a_leap_to_where_it_should_be():
    motion = positions(limits=dataclasses.replace(LIMITS, rate=(0.5, 0.5)))
    motion.follow([(0.05, 0.0), (0.1, 0.0), (0.15, 0.0)], STEP, 0.0)
    motion.halt(0.15)  # measured at 0
    assert motion.row == pytest.approx((0.05, 0.0))


def test_rest_after_the_end_of_a_trajectory_is_its_last_point():
    motion = positions()
    motion.follow([(0.1, 0.0), (0.2, 0.0)], STEP, 0.0)
    motion.halt(60.0)
    assert motion.row == (0.2, 0.0)


def test_braking_right_after_a_command_has_only_the_time_since_that_command():
    motion = VelocityMotion(LIMITS)
    motion.follow([(0.2, 0.0)], STEP, 0.0)
    motion.brake(0.001, elapsed=0.05)
    assert motion.row[0] == pytest.approx(0.2 - 2.0 * 0.001)


def test_braking_after_a_stall_takes_no_more_than_an_interval_at_once():
    motion = VelocityMotion(LIMITS)
    for k in range(10):
        motion.follow([(1.0, 0.0)], STEP, k * STEP)
    motion.brake(5.0, elapsed=4.0)
    assert motion.row[0] == pytest.approx(1.0 - 2.0 * 0.1)


def test_speed_limits_that_exclude_zero_are_refused():
    with pytest.raises(ValueError, match='admit 0'):
        VelocityMotion(dataclasses.replace(LIMITS, low=(0.1, 0.0)))


@pytest.mark.parametrize('on_timeout', ['slow', 'stop'])
def test_an_arm_under_position_control_is_held_and_never_sent_to_zero(on_timeout):
    arm = Arm((0.5, 1.0), on_timeout=on_timeout)
    arm.offer(*[(0.5, 1.0)] * 4)
    sent = arm.wait(3.0)
    assert arm.gate.state is State.STOPPED
    # Once: every copy of a trajectory would start it anew.
    assert [command.rows for command in sent] == [((0.5, 1.0),)]


def test_a_single_position_is_repeated_while_the_stop_is():
    arm = Arm((0.5, 1.0), whole_chunk=False, stop_repeat=0.5)
    arm.offer((0.5, 1.0))
    sent = arm.wait(3.0)
    assert {command.rows for command in sent} == {((0.5, 1.0),)}
    assert 45 <= len(sent) <= 55

"""What the robot gets when no command passes, and how driving goes on, behaviour by behaviour."""

import math

import pytest
from safety_rig import PERIOD, TICK, Rig

from worldmodel_ros.safety.gate import State


def test_stop_sends_zero_at_once_when_commands_cease():
    rig = Rig(on_timeout='stop')
    rig.drive(v=0.4)
    rig.offer(rig.chunk(v=0.4))
    passed_at = rig.now
    while not rig.wait(TICK):
        pass
    assert rig.now - passed_at <= 0.13 + TICK + 1e-9
    assert rig.sent[-1].rows == ((0.0, 0.0),) and rig.sent[-1].stamp == 0
    assert rig.gate.state is State.STOPPED
    assert rig.gate.reason.startswith('no command passed for 0.1')


def test_a_watchdog_that_will_be_held_up_stops_before_rather_than_after():
    rig = Rig()
    rig.offer(rig.chunk())
    assert rig.gate.on_tick(rig.now + 0.1, ahead=0.02) is None
    assert rig.gate.on_tick(rig.now + 0.1, ahead=0.04).rows == ((0.0, 0.0),)


def test_slow_brakes_within_the_acceleration_limits_down_to_zero():
    rig = Rig(on_timeout='slow')
    rig.drive(v=0.6, w=1.5)
    speeds = [command.rows[0][0] for command in rig.wait(0.03 + 0.6 / 1.5 + 3 * TICK)]
    assert rig.gate.state is State.STOPPED
    assert speeds[-1] == 0.0
    assert all(0.0 <= a - b <= 1.5 * TICK + 1e-9 for a, b in zip([0.6, *speeds], speeds))


def test_hold_keeps_the_last_command_for_a_while_and_then_slows():
    rig = Rig(on_timeout='hold', hold=0.2)
    rig.drive(v=0.3)
    assert rig.wait(0.2) == []
    assert rig.gate.state is State.HOLDING
    assert rig.wait(0.2)[0].rows[0][0] < 0.3
    rig.wait(0.2)
    assert rig.gate.state is State.STOPPED


def test_a_stop_is_repeated_and_then_the_robot_is_left_to_others():
    rig = Rig(stop_repeat=1.0)
    rig.drive()
    stops = rig.wait(1.2)
    assert len(stops) == pytest.approx(100, abs=5)
    assert {command.rows for command in stops} == {((0.0, 0.0),)}
    assert rig.wait(5.0) == []
    assert rig.gate.state is State.STOPPED


def test_driving_resumes_with_the_third_good_command_in_a_row():
    rig = Rig(resume_after=3)
    rig.drive()
    rig.wait(0.5)
    assert rig.offer(rig.chunk()) is None
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk()) is None
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk())
    assert rig.gate.state is State.PASSING


def test_a_bad_command_between_good_ones_starts_the_count_anew():
    rig = Rig(resume_after=3)
    rig.drive()
    rig.wait(0.5)
    for age in (0.01, 0.01, 0.2, 0.01, 0.01):
        assert rig.offer(rig.chunk(), age) is None
        rig.wait(0.05)
    assert rig.offer(rig.chunk())


def test_good_commands_far_apart_are_not_in_a_row():
    rig = Rig(resume_after=2)
    rig.drive()
    rig.wait(0.5)
    for _ in range(5):
        assert rig.offer(rig.chunk()) is None
        rig.wait(0.2)


def test_a_good_command_ends_braking_without_a_debounce():
    rig = Rig(on_timeout='slow', resume_after=3)
    rig.drive(v=0.6)
    rig.wait(0.1)
    assert rig.gate.state is State.SLOWING
    assert rig.offer(rig.chunk(v=0.6)).rows[0][0] > 0.3


def test_without_resume_only_a_reset_lets_driving_go_on():
    rig = Rig(resume_after=0)
    rig.drive()
    rig.wait(0.5)
    for _ in range(20):
        assert rig.offer(rig.chunk()) is None
        rig.wait(PERIOD)
    rig.gate.reset()
    assert rig.offer(rig.chunk())


@pytest.mark.parametrize('on_timeout', ['slow', 'hold'])
def test_a_reset_while_braking_counts_and_lets_braking_end(on_timeout):
    rig = Rig(resume_after=0, on_timeout=on_timeout)
    rig.drive(v=0.6)
    rig.wait(0.15)
    assert rig.gate.state in (State.SLOWING, State.HOLDING)
    rig.gate.reset()
    rig.wait(1.0)
    assert rig.gate.state is State.STOPPED and rig.gate.motion.row == (0.0, 0.0)
    assert rig.offer(rig.chunk())


def test_a_stop_asked_for_by_the_model_is_obeyed_at_any_age():
    rig = Rig()
    rig.drive(v=0.4)
    command = rig.offer(rig.chunk(stop=True, values=[], names=[]), age=9.0)
    assert command.rows == ((0.0, 0.0),)
    assert rig.gate.reason.startswith('model asked to stop: episode 1')
    assert rig.gate.counts.stops == 1


def test_a_stop_asked_for_brakes_within_limits_where_the_policy_is_to_slow():
    rig = Rig(on_timeout='hold')
    rig.drive(v=0.6)
    rig.offer(rig.chunk(stop=True, values=[]))
    assert rig.gate.state is State.SLOWING
    assert 0.5 < rig.wait(TICK)[0].rows[0][0] < 0.6


@pytest.mark.parametrize('changes', [
    {'episode_id': 1}, {'episode_id': 2**64 - 1}, {'episode_id': 2, 'sequence': 0}, {'sequence': 2**64 - 1}, {'stamp': 0},
    {'stamp': -(2**31) * 10**9}, {'step_period': math.nan}, {'names': ['x'], 'values': [math.nan]}])
def test_a_stop_stops_whatever_else_it_says_and_blocks_nothing_that_comes_later(changes):
    rig = Rig()
    rig.offer(rig.chunk(episode_id=1))
    for _ in range(3):
        rig.offer(rig.chunk(episode_id=2))
        rig.wait(PERIOD)
    assert rig.offer(rig.chunk(stop=True, **changes)).rows == ((0.0, 0.0),)
    assert rig.gate.state is State.STOPPED
    for _ in range(3):
        rig.wait(PERIOD)
        rig.offer(rig.chunk(episode_id=2))
    assert rig.gate.state is State.PASSING


@pytest.mark.parametrize('on_timeout', ['stop', 'slow'])
def test_what_was_observed_before_a_stop_does_not_move_the_robot_after_it(on_timeout):
    rig = Rig(resume_after=1, on_timeout=on_timeout)
    rig.drive(5, v=0.6)
    before = rig.chunk(v=0.6)
    rig.offer(rig.chunk(stop=True))
    rig.wait(TICK)
    assert rig.offer(before) is None
    assert 'older than the last request to stop' in rig.gate.last_refusal.text
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk())


def test_a_stop_blocks_nothing_after_ros_time_was_set_back():
    rig = Rig(resume_after=1)
    rig.drive(2)
    rig.offer(rig.chunk(stop=True))
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk(stamp=10**9, episode_id=2))


def test_a_stop_before_the_first_command_is_no_fault():
    rig = Rig()
    rig.offer(rig.chunk(stop=True, values=[]))
    assert (rig.gate.state, rig.gate.first_reason) == (State.STOPPED, '')
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk())


def test_the_reason_of_a_time_out_names_the_first_refusal_behind_it():
    rig = Rig()
    rig.drive()
    rig.offer(rig.chunk(values=[math.nan, 0.0]))
    rig.offer(rig.chunk(), age=0.5)
    rig.wait(0.2)
    assert 'linear.x is nan in row 0' in rig.gate.reason


def test_a_refusal_is_no_cause_once_a_command_has_passed_after_it():
    rig = Rig()
    rig.drive()
    rig.offer(rig.chunk(values=[math.nan, 0.0]))
    rig.drive()
    rig.wait(0.2)
    assert 'none arrived' in rig.gate.reason


def test_the_first_reason_stays_until_reset():
    rig = Rig()
    rig.drive()
    rig.wait(0.5)
    first = rig.gate.first_reason
    assert 'none arrived' in first
    rig.drive(10)
    rig.offer(rig.chunk(stop=True))
    assert 'model asked to stop' in rig.gate.reason
    assert rig.gate.first_reason == first
    rig.gate.reset()
    assert rig.gate.first_reason == ''


def test_a_reset_admits_a_model_whose_episodes_were_counted_anew():
    rig = Rig()
    rig.offer(rig.chunk(episode_id=9))
    rig.wait(0.5)
    rig.gate.reset()
    assert rig.offer(rig.chunk(episode_id=1))


def test_halt_stops_at_once_whatever_the_policy():
    rig = Rig(on_timeout='hold')
    rig.drive(v=0.6)
    assert rig.gate.halt('shutting down', rig.now).rows == ((0.0, 0.0),)
    assert rig.gate.first_reason == 'shutting down'


def test_halt_keeps_quiet_where_the_gate_moves_nothing():
    rig = Rig()
    assert rig.gate.halt('shutting down', rig.now) is None
    rig.drive()
    rig.wait(5.0)
    assert rig.gate.halt('shutting down', rig.now) is None

"""Which chunks pass the command gate, behaviour by behaviour."""

import math
import time
from array import array

import pytest
from safety_rig import NAMES, PERIOD, Rig

from worldmodel_ros.safety.gate import MAX_ROWS, Fault, Policy, State


def test_the_first_command_passes_at_once_and_carries_the_stamp_of_its_observation():
    rig = Rig()
    chunk = rig.chunk(0.1, 0.2)
    command = rig.offer(chunk)
    assert command.rows == ((0.1, 0.2),)
    assert command.stamp == chunk.stamp
    assert (rig.gate.state, rig.gate.reason, rig.gate.counts.passed) == (State.PASSING, '', 1)


def test_nothing_is_sent_before_the_first_command():
    rig = Rig()
    assert rig.wait(2.0) == []
    assert (rig.gate.state, rig.gate.counts.stops, rig.gate.first_reason) == (State.STOPPED, 0, '')


def test_a_late_command_is_refused_and_its_age_named():
    rig = Rig()
    assert rig.offer(rig.chunk(), age=0.0441) is None
    assert rig.gate.counts.late == 1
    assert rig.gate.last_refusal.text == 'the observation is 44.1 ms old, 44.0 ms are allowed'


def test_a_command_at_the_limit_of_its_age_passes():
    assert Rig().offer(Rig().chunk(), age=0.0439)


def test_an_observation_from_the_future_is_refused_as_a_clock_mismatch():
    rig = Rig()
    assert rig.offer(rig.chunk(), age=-0.2) is None
    assert rig.gate.last_refusal.fault is Fault.INVALID
    assert 'clock mismatch' in rig.gate.last_refusal.text
    assert rig.offer(rig.chunk(), age=-0.004)


def test_an_observation_ages_on_the_steady_clock_while_ros_time_stands_still():
    rig = Rig()
    stamp = rig.chunk().stamp
    assert rig.offer(rig.chunk(stamp=stamp), age=0.0)
    rig.wait(0.06)
    assert rig.offer(rig.chunk(stamp=stamp), age=0.0) is None
    assert rig.gate.counts.late == 1


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('index', [0, 7])
def test_one_value_that_is_not_finite_refuses_the_whole_chunk(value, index):
    rig = Rig()
    chunk = rig.chunk()
    chunk.values[index] = value
    assert rig.offer(chunk) is None
    assert rig.gate.counts.invalid == 1
    text = rig.gate.last_refusal.text
    assert NAMES[index % 2] in text and f'row {index // 2}' in text


@pytest.mark.parametrize('changes, count', [
    ({'names': ['angular.z', 'linear.x']}, 'shape'), ({'names': []}, 'shape'), ({'values': []}, 'shape'),
    ({'values': [0.1]}, 'shape'), ({'values': [0.1, 0.0, 0.1]}, 'shape'), ({'step_period': 0.0}, 'invalid'),
    ({'step_period': -0.1}, 'invalid'), ({'step_period': math.nan}, 'invalid'), ({'step_period': 1e-320}, 'invalid'),
    ({'step_period': math.inf}, 'invalid'), ({'stamp': 0}, 'invalid'), ({'stamp': -(2**31) * 10**9}, 'invalid')])
def test_a_chunk_of_the_wrong_form_is_refused(changes, count):
    rig = Rig()
    assert rig.offer(rig.chunk(**changes)) is None
    assert getattr(rig.gate.counts, count) == 1


def test_a_chunk_too_long_to_be_checked_in_time_is_refused_at_once():
    rig = Rig()
    values = array('f', bytes(4 * 5_000_000))
    begun = time.thread_time()
    assert rig.offer(rig.chunk(values=values)) is None
    assert time.thread_time() - begun < 0.05
    assert rig.gate.counts.shape == 1
    assert rig.gate.last_refusal.text.startswith('5000000 values are more than 256 rows of 2 (linear.x, angular.z)')
    assert rig.offer(rig.chunk(values=values[:2 * MAX_ROWS]))


def test_a_refusal_quotes_no_more_of_the_names_than_can_be_read():
    rig = Rig()
    assert rig.offer(rig.chunk(names=['x'] * 1_000_000)) is None
    assert len(rig.gate.last_refusal.text) < 300


def test_a_duplicate_and_an_older_sequence_are_refused():
    rig = Rig()
    assert rig.offer(rig.chunk(sequence=5))
    assert rig.offer(rig.chunk(sequence=5)) is None
    assert rig.offer(rig.chunk(sequence=4)) is None
    assert rig.offer(rig.chunk(sequence=6))
    assert rig.gate.counts.order == 2


def test_a_step_period_out_of_the_configured_range_is_refused_by_name():
    rig = Rig(step_period_min=0.05, step_period_max=0.2)
    for period in (1000.0, 0.21, 0.049):
        assert rig.offer(rig.chunk(v=0.6, step_period=period)) is None
        text = rig.gate.last_refusal.text
        assert f'step_period is {period:g} s, 0.05 to 0.2 s are admitted' in text and 'step_period_max_s' in text
    assert rig.offer(rig.chunk(step_period=0.2)) and rig.offer(rig.chunk(step_period=0.05))


@pytest.mark.parametrize('step_period', [0.01, 0.1, 0.5])
def test_a_step_period_entitles_to_no_larger_change_of_speed(step_period):
    rig = Rig()
    assert rig.offer(rig.chunk(0.6, 1.5, step_period=step_period)).rows[0] == pytest.approx((0.15, 0.6))
    rig.wait(PERIOD)
    assert rig.offer(rig.chunk(0.6, 1.5, step_period=step_period)).rows[0] == pytest.approx((0.3, 1.2))


@pytest.mark.parametrize('values', [[3.4e38, -3.4e38], [1e-45, -1e-45], [-0.0, 0.0]])
def test_finite_values_however_large_or_small_come_out_within_the_limits(values):
    rig = Rig()
    v, w = rig.offer(rig.chunk(values=values)).rows[0]
    assert abs(v) <= 0.15 + 1e-9 and abs(w) <= 0.6 + 1e-9


def test_a_retired_episode_does_not_come_back_while_the_other_drives():
    rig = Rig()
    assert rig.offer(rig.chunk(episode_id=7, sequence=50))
    assert rig.offer(rig.chunk(episode_id=2, sequence=1))
    for _ in range(20):
        assert rig.offer(rig.chunk(episode_id=7)) is None
        assert 'episode 7 is retired, episode 2 is running' in rig.gate.last_refusal.text
        rig.wait(PERIOD)
        assert rig.offer(rig.chunk(episode_id=2))


@pytest.mark.parametrize('last', [{'episode_id': 2**64 - 1}, {'sequence': 2**64 - 1}, {'episode_id': 0}])
@pytest.mark.parametrize('stop', [False, True])
def test_no_identity_blocks_what_comes_later(last, stop):
    rig = Rig(resume_after=3)
    rig.drive(3)
    rig.offer(rig.chunk(**{'sequence': 4, 'stop': stop, **last}))
    rig.sequence = 4
    passed = rig.gate.counts.passed
    rig.drive(10)
    assert rig.gate.state is State.PASSING
    assert rig.gate.counts.passed - passed >= 5


def test_a_model_that_starts_again_drives_without_a_reset_whatever_its_episode():
    rig = Rig()
    for episode_id in (500, 3, 2**63):
        for _ in range(6):
            rig.offer(rig.chunk(episode_id=episode_id))
            rig.wait(PERIOD)
        assert rig.gate.state is State.PASSING and rig.gate.last_passed.episode_id == episode_id
        rig.wait(0.5)
        assert rig.gate.state is State.STOPPED
        rig.sequence = 0


def test_a_chunk_sent_again_after_silence_is_too_old_by_its_stamp():
    rig = Rig(resume_after=1)
    chunk = rig.chunk()
    assert rig.offer(chunk)
    sent = rig.now + 0.02
    rig.wait(0.3)
    assert rig.gate.on_chunk(chunk, round((sent + 0.3) * 1e9), rig.now) is None
    assert rig.gate.last_refusal.fault is Fault.LATE


def test_old_chunks_in_turn_do_not_pass_while_ros_time_stands_still():
    rig = Rig(resume_after=1)
    ros_now = int(rig.now * 1e9)
    stamps = [ros_now - 20_000_000, ros_now - 10_000_000]
    passed = []
    for k in range(40):
        chunk = rig.chunk(stamp=stamps[k % 2], episode_id=k % 2, sequence=k)
        if rig.gate.on_chunk(chunk, ros_now, rig.now):
            passed.append(rig.now)
        rig.wait(0.15)
    assert passed == pytest.approx([100.0, 100.15])


def test_a_refused_chunk_of_another_episode_does_not_keep_the_robot_stopped():
    rig = Rig(resume_after=3)
    rig.drive()
    rig.wait(0.5)
    for _ in range(3):
        rig.offer(rig.chunk(episode_id=99, values=[math.nan, 0.0]))
        rig.offer(rig.chunk())
        rig.wait(PERIOD)
    assert rig.gate.state is State.PASSING


def test_a_refused_chunk_does_not_retire_an_episode():
    rig = Rig()
    assert rig.offer(rig.chunk(episode_id=1))
    assert rig.offer(rig.chunk(episode_id=2, values=[math.nan, 0.0])) is None
    assert rig.offer(rig.chunk(episode_id=1))


def test_an_older_observation_is_refused_until_a_new_episode_begins():
    rig = Rig()
    stamp = rig.chunk().stamp
    assert rig.offer(rig.chunk(stamp=stamp))
    assert rig.offer(rig.chunk(stamp=stamp - 10**9)) is None
    assert 'new episode' in rig.gate.last_refusal.text
    assert rig.offer(rig.chunk(stamp=stamp - 10**9, episode_id=2))


def test_a_command_beyond_the_limits_is_clamped_and_counted_as_limited():
    rig = Rig()
    rig.drive(10, v=50.0, w=-50.0)
    assert rig.sent[-1].rows == ((0.6, -1.5),)
    assert rig.gate.counts.limited == rig.gate.counts.passed == 10
    assert rig.sent[0].rows[0] == pytest.approx((0.15, -0.6))


def test_a_long_pause_does_not_entitle_to_a_larger_jump():
    rig = Rig(command_timeout=5.0)
    rig.drive(1, v=0.0)
    rig.wait(2.0)
    assert rig.offer(rig.chunk(v=0.6)).rows[0][0] == pytest.approx(0.15)


@pytest.mark.parametrize('policy, complaint', [
    ({'on_timeout': 'pray'}, 'hold, slow, stop'), ({'delivery_reserve': 0.06}, 'delivery_reserve'),
    ({'command_timeout': 0.0}, 'command_timeout'), ({'deadline': math.nan}, 'deadline')])
def test_a_policy_that_cannot_work_is_refused(policy, complaint):
    with pytest.raises(ValueError, match=complaint):
        Policy(**policy)

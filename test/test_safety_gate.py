"""Which chunks pass the command gate, behaviour by behaviour."""

import math
import time
from array import array

import pytest
from safety_rig import NAMES, Rig

from worldmodel_ros.safety.chunk import MAX_ROWS, Fault
from worldmodel_ros.safety.gate import Policy, State


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
    assert rig.offer(rig.chunk(), age=0.0461) is None
    assert rig.gate.counts.late == 1
    assert rig.gate.last_refusal.text == 'the observation is 46.1 ms old, 46.0 ms are allowed'


def test_a_command_at_the_limit_of_its_age_passes():
    assert Rig().offer(Rig().chunk(), age=0.0459)


def test_an_observation_from_the_future_is_refused_as_a_clock_mismatch():
    rig = Rig()
    assert rig.offer(rig.chunk(), age=-0.2) is None
    assert rig.gate.last_refusal.fault is Fault.INVALID
    assert 'clock mismatch' in rig.gate.last_refusal.text
    assert rig.offer(rig.chunk(), age=-0.004)


def test_an_age_that_is_no_number_is_refused():
    assert Rig().offer(Rig().chunk(), age=math.nan) is None


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
    ({'step_period': -0.1}, 'invalid'), ({'step_period': math.nan}, 'invalid'), ({'stamp': 0}, 'invalid')])
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


def test_a_retired_episode_never_comes_back():
    rig = Rig()
    assert rig.offer(rig.chunk(episode_id=1, sequence=50))
    assert rig.offer(rig.chunk(episode_id=2, sequence=1))
    assert rig.offer(rig.chunk(episode_id=1, sequence=51)) is None
    assert 'episode 1 is retired' in rig.gate.last_refusal.text


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

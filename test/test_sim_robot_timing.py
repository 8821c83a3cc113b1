"""The simulated robot's sense of time: pacing, rates, and the judgement of commands by their age."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from worldmodel_ros.nodes.sim_robot.judge import CommandJudge
from worldmodel_ros.nodes.sim_robot.pacing import Pacer, Rate
from worldmodel_ros.safety.motion import FEW, Silences


class FakeTime:
    """A clock that only sleeping and working move."""

    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0.0
        self.now += seconds


def test_steps_are_due_on_a_grid_that_slow_steps_do_not_shift():
    time = FakeTime()
    pacer = Pacer(0.01, 0.2, time.clock, time.sleep)
    due = []
    for k in range(10):
        due.append(pacer.next())
        time.now += 0.025 if k == 3 else 0.002
    assert due == pytest.approx([100.0 + 0.01 * k for k in range(10)])
    assert pacer.dropped == 0.0


def test_a_step_is_never_early():
    time = FakeTime()
    pacer = Pacer(0.01, 0.2, time.clock, time.sleep)
    for _ in range(5):
        assert pacer.next() <= time.now


def test_a_lag_too_long_to_catch_up_with_is_dropped_and_counted():
    time = FakeTime()
    pacer = Pacer(0.01, 0.2, time.clock, time.sleep)
    pacer.next()
    time.now += 1.0
    assert pacer.next() == pytest.approx(time.now)
    assert pacer.dropped == pytest.approx(0.99)
    assert pacer.next() == pytest.approx(time.now)
    assert pacer.dropped == pytest.approx(0.99)


def test_a_machine_slower_than_real_time_does_not_fall_behind_without_bound():
    time = FakeTime()
    pacer = Pacer(0.01, 0.2, time.clock, time.sleep)
    for _ in range(1000):
        lag = time.now - pacer.next()
        time.now += 0.015
        assert lag <= 0.2
    assert pacer.dropped == pytest.approx(5.0, abs=0.3)


@given(hz=st.floats(1.0, 50.0), seconds=st.integers(1, 20))
def test_a_rate_keeps_its_average_on_a_grid_that_it_does_not_divide(hz, seconds):
    rate = Rate()
    due = [k for k in range(1, 100 * seconds + 1) if rate.due(k * 0.01, hz)]
    assert due[0] == 1
    assert abs(len(due) - hz * seconds) <= 1.0
    # Each is the first instant of the grid at or after its time.
    assert all(-1e-6 <= (k - 1) * 0.01 - number / hz < 0.01 + 1e-6 for number, k in enumerate(due))


def test_a_changed_rate_holds_from_now_on():
    rate = Rate()
    assert [rate.due(0.1 * k, 10.0) for k in range(3)] == [True] * 3
    assert [rate.due(0.3 + 0.1 * k, 5.0) for k in range(4)] == [True, False, True, False]


def test_commands_are_judged_by_the_age_of_what_they_answer():
    judge = CommandJudge(deadline=0.05)
    judge.observed(1_000, captured=10.0)
    judge.observed(2_000, captured=10.1)
    judge.received(1_000, now=10.03)    # on time
    judge.received(1_000, now=10.0501)  # late
    judge.received(2_000, now=10.12)    # on time
    judge.received(0, now=10.2)         # a stop without an observation
    tally = judge.tally()
    assert tally[:4] == (4, 1, 0, 1)
    assert tally.window == pytest.approx([0.03, 0.0501, 0.02])
    assert tally.late_ones == [(10.0, 10.0501)]
    assert not judge.tally().late_ones


def test_an_answer_to_no_known_observation_is_late():
    judge = CommandJudge(deadline=0.05)
    judge.received(3_000, now=10.0)
    tally = judge.tally()
    assert tally[:4] == (1, 0, 1, 1)
    ((captured, received),) = tally.late_ones
    assert np.isnan(captured) and received == 10.0


def test_a_jump_of_ros_time_does_not_change_the_judgement():
    judge = CommandJudge(deadline=0.05)
    judge.observed(50_000, captured=10.0)
    judge.observed(20, captured=10.1)   # the clock has jumped back
    judge.received(50_000, now=10.04)
    judge.received(20, now=10.2)
    tally = judge.tally()
    assert tally.late == 1
    assert tally.window == pytest.approx([0.04, 0.1])


def test_fresh_latencies_are_told_once_and_memory_is_bounded():
    judge = CommandJudge(deadline=0.05, observations=10, window=100)
    for k in range(1, 1001):
        judge.observed(k, captured=float(k))
        judge.received(k, now=k + 0.01)
    first, second = judge.tally(), judge.tally()
    assert first.received == 1000 and len(first.window) == len(first.fresh) == 100
    assert len(second.fresh) == 0
    np.testing.assert_allclose(first.window, 0.01)
    judge.received(990, now=1001.0)     # forgotten since
    assert judge.tally().unknown == 1


def test_silences_are_those_after_a_command_that_moves_and_longer_than_the_bound():
    silences = Silences(lambda: 0.14)
    for at, moves in ((0.0, True), (0.1, True), (0.3, False), (1.0, True), (1.5, True), (1.6, False)):
        silences.end(at)
        if moves:
            silences.begin(at)
    assert silences.tell() == '0.100000:0.300000 1.000000:1.500000'
    assert silences.tell() == ''
    for at in range(2 * FEW):
        silences.end(float(at))
        silences.begin(float(at))
    assert len(silences.tell().split()) == FEW

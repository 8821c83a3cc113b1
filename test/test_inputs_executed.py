"""What the robot executed, over time: means, the command in force, and the end of its time. Without ROS."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.inputs.ticks import NS, ExecutedActions, is_usable

START = 1_000 * NS


def seconds(value):
    return START + round(value * NS)


def executed(*commands, timeout=0.5):
    actions = ExecutedActions(2, 0.1, timeout)
    for at, v in commands:
        actions.add(seconds(at), (v, -v))
    return actions


@pytest.mark.parametrize(('commands', 'start', 'end', 'mean'), [
    ([], 0.0, 0.1, 0.0),
    ([(-0.3, 0.4)], 0.0, 0.1, 0.4),                             # the last command holds
    ([(0.05, 0.4)], 0.0, 0.1, 0.2),                             # nothing before the first one
    ([(-0.4, 0.2), (0.025, 0.6)], 0.0, 0.1, 0.5),
    ([(-0.4, 0.2), (0.02, 0.0), (0.06, 0.5)], 0.0, 0.1, 0.24),
    ([(-0.4, 0.2), (0.2, 0.6)], 0.0, 0.1, 0.2),                 # what came later does not count
    ([(-0.1, 0.2), (0.15, 0.6)], None, 0.2, 0.4),               # a first frame: one step period
    ([(-0.46, 0.4)], 0.0, 0.1, 0.16),                           # the base brakes on the way,
    ([(-0.46, 0.4), (0.09, 0.8)], 0.0, 0.1, 0.24),              # and drives on with the next command
    ([(-10.0, 0.4)], 0.0, 0.1, 0.0),
    ([(-0.7, 0.2), (-0.5, 0.4)], 0.0, 0.1, 0.0)])
def test_the_executed_action_is_the_time_weighted_mean(commands, start, end, mean):
    result = executed(*commands).mean(None if start is None else seconds(start), seconds(end))
    assert result.dtype == np.float32
    assert result == pytest.approx([mean, -mean], abs=1e-6)


@pytest.mark.parametrize('timeout', [0.0, 0.3])
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(-1.0, 1.0)), max_size=30), st.floats(0.0, 3.0),
       st.floats(0.001, 1.0))
def test_the_mean_is_that_of_a_fine_sampling(timeout, commands, start, length):
    commands.sort()
    actions = executed(*commands, timeout=timeout)
    samples = start + (np.arange(4000) + 0.5) / 4000 * length
    times = np.array([at for at, _ in commands])
    held, since = np.array([0.0] + [v for _, v in commands]), np.array([-np.inf, *times])
    index = np.searchsorted(times, samples, side='right')
    expected = np.mean(np.where(samples - since[index] < (timeout or np.inf), held[index], 0.0))
    assert actions.mean(seconds(start), seconds(start + length))[0] == pytest.approx(expected, abs=0.02)


def test_what_was_executed_before_ros_time_was_set_back_does_not_count():
    actions = executed((10.0, 0.5), (0.0, 0.1))
    assert actions.mean(seconds(0.0), seconds(0.1))[0] == pytest.approx(0.1)


@given(st.lists(st.floats(), min_size=1, max_size=3))
def test_an_action_is_usable_where_the_model_has_finite_numbers_of_it(action):
    assert is_usable(action) == bool((np.abs(action) <= 1e6).all())
    with np.errstate(over='ignore'):
        assert not is_usable(action) or np.isfinite(np.float32(action) ** 4).all()


def test_old_commands_are_not_kept():
    actions = executed(*((k / 10, 0.1) for k in range(1000)))
    assert len(actions._kept) < 120


def test_the_command_in_force_tells_whether_the_robot_moves():
    assert not executed().moving(seconds(0.0))
    assert executed((0.0, 0.1)).moving(seconds(0.49))
    assert not executed((0.0, 0.1)).moving(seconds(0.5))
    assert executed((0.0, 0.1), timeout=0.0).moving(seconds(1e6))
    assert not executed((0.0, 0.1), (1.0, 0.0)).moving(seconds(1.1))


def test_a_command_that_ran_out_is_one_that_moved_the_robot():
    assert not executed().ran_out(seconds(9.0))
    assert [executed((0.0, 0.1)).ran_out(seconds(at)) for at in (0.49, 0.5)] == [False, True]
    assert not executed((0.0, 0.0)).ran_out(seconds(9.0))
    assert not executed((0.0, 0.1), timeout=0.0).ran_out(seconds(9.0))


@pytest.mark.parametrize('timeout', [0.0, 60.0, 0.5])
def test_the_first_action_of_a_time_is_found_or_the_one_in_force(timeout):
    actions = ExecutedActions(1, 0.1, timeout)
    assert actions.first(START, START + NS) is None
    for k, action in enumerate((1.0, 2.0, 3.0)):
        actions.add(START + k * NS, (action,))
    assert actions.first(START - 5, START) is None
    assert actions.first(START - 5, START + 1) == (1.0,)
    assert actions.first(START, START + 5) == (1.0,)
    assert actions.first(START + 5, START + 2 * NS) == (2.0,)
    assert actions.first(START + 5, START + NS) == (1.0,)
    assert actions.first(START + NS + 5, START + 2 * NS) == (2.0,)
    assert actions.first(START + 9 * NS, START + 10 * NS) == ((0.0,) if timeout == 0.5 else (3.0,))

"""Which images are ticks, when a camera is frozen, what was executed: without ROS."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.inputs.ticks import NS, ExecutedActions, FramePacer, FrozenCamera, Pace

START = 1_000 * NS


def pace(stamps, tolerance=0.02, time_jump=1.0):
    """Return what each image is, by its stamp [s]."""
    pacer, result = FramePacer(0.1), []
    for stamp in stamps:
        stamp = START + round(stamp * NS)
        result.append(pacer.classify(stamp, tolerance, time_jump))
        if not result[-1].refused:
            pacer.take(stamp, result[-1])
    return result


def test_images_one_step_period_apart_are_ticks():
    assert pace([0.0, 0.1, 0.2, 0.295]) == [Pace.NEW_EPISODE, Pace.TICK, Pace.TICK, Pace.TICK]


def test_a_faster_camera_is_decimated():
    assert pace([0.0, 0.033, 0.067, 0.1, 0.133]) == [
        Pace.NEW_EPISODE, Pace.BETWEEN, Pace.BETWEEN, Pace.TICK, Pace.BETWEEN]


def test_duplicates_and_steps_back_are_refused_and_leave_the_pace_alone():
    assert pace([0.0, 0.1, 0.1, 0.05, 0.2]) == [
        Pace.NEW_EPISODE, Pace.TICK, Pace.DUPLICATE, Pace.BACKWARD, Pace.TICK]


@pytest.mark.parametrize('jump', [-2.0, 1.5, -1000.0 + 1e-9])
def test_a_jump_begins_an_episode(jump):
    assert pace([0.0, 0.1, jump, jump + 0.1])[2:] == [Pace.NEW_EPISODE, Pace.TICK]


def test_zero_stamps_are_refused_even_first():
    assert FramePacer(0.1).classify(0, 0.02, 1.0) is Pace.ZERO


@given(st.lists(st.floats(0.0, 0.3), max_size=40))
def test_ticks_are_never_closer_than_the_period_less_the_tolerance(gaps):
    stamps = np.cumsum(gaps)
    ticks = [s for s, p in zip(stamps, pace(stamps)) if p in (Pace.TICK, Pace.NEW_EPISODE)]
    assert all(later - earlier >= 0.08 - 2e-9 for earlier, later in zip(ticks, ticks[1:]))


def frozen(frames, timeout=0.5, recovery=2):
    """
    Play (picture, moving) at 10 Hz; return the indices of the frames at which the camera counted as frozen.
    """
    camera = FrozenCamera()
    return [k for k, (picture, moving) in enumerate(frames)
            if camera.update(bytes([picture]), moving, k * 0.1, timeout, recovery)]


def test_a_camera_is_frozen_after_the_timeout_of_one_picture_in_motion():
    assert frozen([(1, True)] * 8) == [6, 7]


def test_the_same_picture_of_a_standing_robot_is_no_freeze():
    assert frozen([(1, False)] * 20) == []


def test_a_change_begins_the_count_anew():
    assert frozen([(1, True)] * 5 + [(2, True)] * 5 + [(3, True)] * 5) == []


def test_the_freeze_ends_some_images_after_the_picture_changed_even_if_it_changes_no_more():
    assert frozen([(1, True)] * 8 + [(1, False)] * 5 + [(2, False)] * 6) == list(range(6, 15))


def test_a_timeout_of_zero_turns_it_off():
    assert frozen([(1, True)] * 100, timeout=0.0) == []


def seconds(value):
    return START + round(value * NS)


def executed(*commands):
    actions = ExecutedActions(2, 0.1)
    for at, v in commands:
        actions.add(seconds(at), (v, -v))
    return actions


@pytest.mark.parametrize(('commands', 'start', 'end', 'mean'), [
    ([], 0.0, 0.1, 0.0),
    ([(-5.0, 0.4)], 0.0, 0.1, 0.4),                             # the last command holds
    ([(0.05, 0.4)], 0.0, 0.1, 0.2),                             # nothing before the first one
    ([(-1.0, 0.2), (0.025, 0.6)], 0.0, 0.1, 0.5),
    ([(-1.0, 0.2), (0.02, 0.0), (0.06, 0.5)], 0.0, 0.1, 0.24),
    ([(-1.0, 0.2), (0.2, 0.6)], 0.0, 0.1, 0.2),                 # what came later does not count
    ([(-1.0, 0.2), (0.15, 0.6)], None, 0.2, 0.4)])              # a first frame: one step period
def test_the_executed_action_is_the_time_weighted_mean(commands, start, end, mean):
    result = executed(*commands).mean(None if start is None else seconds(start), seconds(end))
    assert result.dtype == np.float32
    assert result == pytest.approx([mean, -mean], abs=1e-6)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(-1.0, 1.0)), max_size=30), st.floats(0.0, 3.0),
       st.floats(0.001, 1.0))
def test_the_mean_is_that_of_a_fine_sampling(commands, start, length):
    commands.sort()
    actions = executed(*commands)
    samples = start + (np.arange(4000) + 0.5) / 4000 * length
    held = [0.0] + [v for _, v in commands]
    expected = np.mean([held[k] for k in np.searchsorted([at for at, _ in commands], samples, side='right')])
    assert actions.mean(seconds(start), seconds(start + length))[0] == pytest.approx(expected, abs=0.02)


def test_what_was_executed_before_ros_time_was_set_back_does_not_count():
    actions = executed((10.0, 0.5), (0.0, 0.1))
    assert actions.mean(seconds(0.0), seconds(0.1))[0] == pytest.approx(0.1)


def test_old_commands_are_not_kept():
    actions = executed(*((k / 10, 0.1) for k in range(1000)))
    assert len(actions._kept) < 120


def test_the_command_in_force_tells_whether_the_robot_moves():
    assert not executed().moving
    assert executed((0.0, 0.1)).moving
    assert not executed((0.0, 0.1), (1.0, 0.0)).moving

"""Which images are ticks at which rate of the camera, what is said of it, when a camera is frozen: without ROS."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.inputs.ticks import NS, FramePacer, FrozenCamera, Pace, misfit

START = 1_000 * NS


def pace(stamps, tolerance=0.05, time_jump=1.0):
    """Return what each image is, by its stamp [s]."""
    pacer, result = FramePacer(0.1), []
    for stamp in stamps:
        stamp = START + round(stamp * NS)
        result.append(pacer.classify(stamp, tolerance, time_jump))
        if not result[-1].refused:
            pacer.take(stamp, result[-1])
    return result


def camera(rate, seconds=120.0, jitter=0.0, seed=0):
    """Return the stamps [s] of a camera, each off by up to ``jitter`` s."""
    times = np.arange(round(seconds * rate)) / rate
    return np.sort(times + np.random.default_rng(seed).uniform(-jitter, jitter, len(times)))


def ticks(stamps, **settings):
    """Return the stamps [s] of the ticks."""
    return np.array([s for s, p in zip(stamps, pace(stamps, **settings)) if p in (Pace.TICK, Pace.NEW_EPISODE)])


def test_images_one_step_period_apart_are_ticks():
    assert pace([0.0, 0.1, 0.2, 0.295]) == [Pace.NEW_EPISODE, Pace.TICK, Pace.TICK, Pace.TICK]


@pytest.mark.parametrize(('rate', 'shortest', 'longest'), [
    (20.0, 100, 100), (30.0, 100, 100), (50.0, 100, 100), (60.0, 100, 100), (90.0, 100, 100),
    (24.0, 83, 125), (25.0, 80, 120), (14.0, 71, 143), (15.0, 67, 133), (18.0, 56, 111), (27.0, 74, 111),
    (64.0, 94, 109)])
def test_of_a_faster_camera_the_ticks_keep_the_models_time(rate, shortest, longest):
    found = ticks(camera(rate))
    steps = np.diff(found)
    assert (steps.min() * 1e3, steps.max() * 1e3) == pytest.approx((shortest, longest), abs=0.5)
    # No image is off by more than half of what is between two images and the way that the grid follows it.
    assert np.abs(found - 0.1 * np.arange(len(found))).max() < 1.0 / rate
    assert len(found) == pytest.approx(1200, abs=1)


@pytest.mark.parametrize(('rate', 'every'), [
    (29.97, 3), (30.03, 3), (59.94, 6), (20.05, 2), (10.05, 1), (9.95, 1), (12.0, 1), (12.5, 1), (9.0, 1), (8.0, 1),
    (5.0, 1)])
def test_a_camera_of_nearly_a_fit_rate_is_followed_and_a_slow_one_gives_all_its_images(rate, every):
    """A step of one image less or more now and then would be one at which the gate stops the robot."""
    stamps = camera(rate)
    assert np.array_equal(ticks(stamps), stamps[::every])


@pytest.mark.parametrize(('rate', 'jitter', 'every'), [
    (10.0, 0.015, 1), (10.0, 0.02, 1), (12.0, 0.004, 1), (8.0, 0.015, 1), (20.0, 0.01, 2), (30.0, 0.007, 3),
    (60.0, 0.003, 6)])
@pytest.mark.parametrize('seed', range(3))
def test_jitter_costs_no_tick_and_makes_none(rate, jitter, every, seed):
    stamps = camera(rate, 120.0, jitter, seed)
    steps = np.diff(np.searchsorted(stamps, ticks(stamps)))[5:]  # of the first images the spacing is not known well
    assert (steps == every).all()


@pytest.mark.parametrize(('rate', 'jitter'), [
    (15.0, 0.01), (20.0, 0.015), (24.0, 0.004), (25.0, 0.01), (50.0, 0.01), (90.0, 0.005)])
def test_the_models_time_is_kept_with_jitter_too(rate, jitter):
    """Where it is half a spacing, some images seem to be lost, which makes the mean step 1 or 2 % longer."""
    assert np.diff(ticks(camera(rate, jitter=jitter))).mean() == pytest.approx(0.1, rel=0.02)


def test_nothing_drifts_over_an_hour():
    found = ticks(camera(30.0, 3600.0))
    assert found[[18_000, 35_999]] == pytest.approx([1800.0, 3599.9], abs=1e-6)


@pytest.mark.parametrize('rate', [20.0, 30.0, 60.0])
def test_an_image_that_is_lost_makes_one_step_wrong_and_no_other(rate):
    stamps = camera(rate, 3.0)
    steps = np.diff(ticks(np.delete(stamps, round(rate))))  # a tick, at 1 s
    assert np.sort(steps)[:-1] == pytest.approx(0.1) and steps.max() == pytest.approx(0.1 + 1.0 / rate)


@pytest.mark.parametrize('before, after', [(10.0, 30.0), (30.0, 15.0), (20.0, 60.0), (30.0, 10.0)])
def test_a_camera_that_changes_its_rate_is_kept_up_with(before, after):
    stamps = np.concatenate([camera(before, 5.0), 5.0 + camera(after, 5.0)])
    steps = np.diff(ticks(stamps))
    assert 0.05 <= steps.min() and steps.max() < 0.15
    assert steps.mean() == pytest.approx(0.1, rel=0.01)


def test_after_a_gap_the_grid_begins_anew_with_the_next_image():
    assert [p is Pace.TICK for p in pace([0.0, 0.05, 0.1, 0.53, 0.58, 0.63])] == [False, False, True, True, False, True]


def test_duplicates_and_steps_back_are_refused_and_leave_the_pace_alone():
    assert pace([0.0, 0.1, 0.1, 0.05, 0.2]) == [
        Pace.NEW_EPISODE, Pace.TICK, Pace.DUPLICATE, Pace.BACKWARD, Pace.TICK]


@pytest.mark.parametrize('jump', [-2.0, 1.5, -1000.0 + 1e-9])
def test_a_jump_begins_an_episode_and_a_grid(jump):
    assert pace([0.0, 0.1, jump, jump + 0.05, jump + 0.1, jump + 0.15])[2:] == [
        Pace.NEW_EPISODE, Pace.BETWEEN, Pace.TICK, Pace.BETWEEN]


def test_zero_stamps_are_refused_even_first():
    assert FramePacer(0.1).classify(0, 0.05, 1.0) is Pace.ZERO


@given(st.lists(st.floats(0.0, 0.3), max_size=40), st.sampled_from([0.0, 0.02, 0.05]))
def test_ticks_are_never_closer_than_the_period_less_the_tolerance(gaps, tolerance):
    found = ticks(np.cumsum(gaps), tolerance=tolerance)
    assert all(later - earlier >= 0.1 - tolerance - 2e-9 for earlier, later in zip(found, found[1:]))


@pytest.mark.parametrize(('rate', 'said'), [
    (10.0, []), (20.0, []), (25.0, []), (30.0, []), (29.97, []), (60.0, []), (9.5, []),
    (8.0, ['125 ms apart', 'step is 100 ms', 'faster', '10 images a second or a multiple']),
    (12.0, ['83 ms apart', 'slower']), (5.0, ['200 ms', 'faster', '100% of the steps']),
    (15.0, ['% of the steps take up to 133 ms', 'by default', 'after 130 ms without a command', 'command_timeout_s to 0.16']),
    (24.0, ['up to 125 ms', 'command_timeout_s to 0.15']), (14.0, ['up to 143 ms', 'command_timeout_s to 0.17'])])
def test_of_a_rate_that_does_not_fit_is_said_why_and_what_to_do(rate, said):
    text = misfit(np.diff(ticks(camera(rate, 3.0))), 0.1, 0.13)
    assert bool(text) == bool(said) and all(words in text for words in said), text
    assert ('apart on average' in text) == (rate in (5.0, 8.0, 12.0))
    assert ('command_timeout_s' in text) == (rate in (14.0, 15.0, 24.0))  # else that alone would be no remedy


def test_a_lost_image_is_no_matter_of_the_rate_and_many_are():
    stamps = camera(10.0, 3.0)
    assert misfit(np.diff(np.delete(stamps, [10, 11, 20])), 0.1, 0.13) == ''
    assert 'look for what loses images' in misfit(np.diff(np.delete(stamps, range(5, 25, 3))), 0.1, 0.13)
    assert misfit([0.2] * 9, 0.1, 0.13) == ''  # too few to tell


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


def test_a_drive_in_bursts_does_not_hide_a_dead_camera():
    bursts = ([(1, True)] * 5 + [(1, False)]) * 100
    assert frozen(bursts)[0] == 7


def noisy_then(rest, differing=1.0, standing=45):
    """Indices at which the camera counts as frozen, in ``rest`` [(image, moving)], after images that differ by noise."""
    rng, size = np.random.default_rng(0), 1000
    images = []
    for _ in range(standing):
        image = np.zeros(size, np.uint8)
        image[:round(differing * size)] = rng.integers(0, 255, round(differing * size))
        images.append((image.tobytes(), False))
    camera, found = FrozenCamera(), []
    for k, (image, moving) in enumerate([*images, *rest]):
        image = images[-1][0] if image is None else image
        if camera.update(image, moving, k * 0.1, 0.5, 2):
            found.append(k - standing)
    return found


def test_where_images_have_differed_by_noise_a_standing_robot_notices_a_dead_camera():
    assert noisy_then([(None, False)] * 8) == [5, 6, 7]


@pytest.mark.parametrize('differing, standing', [(0.2, 45), (1.0, 20)])
def test_something_that_moves_before_the_camera_and_a_few_images_are_no_noise(differing, standing):
    assert noisy_then([(None, False)] * 20, differing, standing) == []


def test_a_camera_that_repeats_images_does_not_show_noise():
    repeated = [(bytes([k // 2] * 50), False) for k in range(120)]
    camera = FrozenCamera()
    for k, (image, moving) in enumerate([*repeated, *[(b'x' * 50, False)] * 20]):
        assert not camera.update(image, moving, k * 0.1, 0.5, 2)


def test_a_timeout_of_zero_turns_it_off():
    assert frozen([(1, True)] * 100, timeout=0.0) == []

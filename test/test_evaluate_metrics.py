"""Measures, intervals and moments, against what can be computed by hand."""
import numpy as np
import pytest

from worldmodel_ros.evaluate.drive import surprise
from worldmodel_ros.evaluate.drive.bootstrap import BLOCK_S, MIN_BLOCKS, block_labels, difference_interval, mean_interval
from worldmodel_ros.evaluate.drive.branches import Branches
from worldmodel_ros.evaluate.drive.columns import Columns
from worldmodel_ros.evaluate.drive.metrics import policy, prediction, what_if
from worldmodel_ros.evaluate.drive.pictures import ssim
from worldmodel_ros.evaluate.drive.windows import Window
from worldmodel_ros.model.presets import TINY


def ssim_by_the_formula(x, y):
    """Equations 13 to 17 of Wang et al. (2004) at every place of the window, in float64, without a filter library."""
    offset = np.arange(11) - 5
    gauss = np.exp(-offset ** 2 / (2 * 1.5 ** 2))
    weight = np.outer(gauss, gauss) / gauss.sum() ** 2
    c1, c2, values = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for channel in range(x.shape[2]):
        for row in range(x.shape[0] - 10):
            for column in range(x.shape[1] - 10):
                a, b = (p[row:row + 11, column:column + 11, channel].astype(np.float64) for p in (x, y))
                ma, mb = (weight * a).sum(), (weight * b).sum()
                va, vb, vab = (weight * (a - ma) ** 2).sum(), (weight * (b - mb) ** 2).sum(), \
                    (weight * (a - ma) * (b - mb)).sum()
                values.append((2 * ma * mb + c1) * (2 * vab + c2) / ((ma ** 2 + mb ** 2 + c1) * (va + vb + c2)))
    return np.mean(values)


def test_ssim_is_that_of_the_paper():
    rng = np.random.default_rng(0)
    x = (np.mgrid[0:20, 0:24].sum(0)[..., None] * 4 + rng.integers(0, 60, (20, 24, 3))).clip(0, 255).astype(np.uint8)
    y = (0.7 * x + rng.integers(0, 70, x.shape)).clip(0, 255).astype(np.uint8)
    assert ssim(x, y) == pytest.approx(ssim_by_the_formula(x, y), abs=1e-9)
    assert ssim(x, y) == pytest.approx(ssim(y, x), abs=1e-12) and ssim(x, x) == pytest.approx(1.0)


def test_ssim_sees_a_blur_that_psnr_likes():
    x = np.kron(np.indices((8, 8)).sum(0) % 2, np.ones((8, 8))).astype(np.uint8)[..., None] * 200
    assert ssim(np.full_like(x, 100), x) < 0.2


@pytest.mark.parametrize('shapes, complaint', [(((20, 20, 3), (20, 21, 3)), 'shapes'), (((10, 20, 3),) * 2, '11 x 11')])
def test_pictures_that_cannot_be_compared_are_named(shapes, complaint):
    with pytest.raises(ValueError, match=complaint):
        ssim(*(np.zeros(shape, np.uint8) for shape in shapes))


def drive_of(blocks, rng, correlated):
    """Values of a drive at 10 Hz, its blocks, true mean 0: white noise, or nearly the same for each 2 s."""
    n = round(blocks * BLOCK_S * 10)
    values = rng.standard_normal(n)
    if correlated:
        values = np.repeat(rng.standard_normal(blocks), n // blocks) + 0.1 * values
    return values, block_labels(np.zeros(n), np.arange(n) / 10 + 0.01)


@pytest.mark.parametrize('correlated', [False, True])
def test_intervals_hold_the_true_mean_about_as_often_as_they_say(correlated):
    rng, held = np.random.default_rng(1), 0
    for _ in range(60):
        interval = mean_interval(*drive_of(25, rng, correlated))
        held += interval.low <= 0.0 <= interval.high
    assert 51 <= held <= 60  # of 60; 57 on average


def test_neighbours_that_are_alike_count_as_one():
    rng = np.random.default_rng(2)
    values, blocks = drive_of(25, rng, correlated=True)
    wide = mean_interval(values, blocks)
    narrow = mean_interval(values, np.arange(len(values)))  # as if every window was a drive of its own
    assert wide.high - wide.low > 2.5 * (narrow.high - narrow.low)
    assert wide.mean == pytest.approx(values.mean()) and wide.count == len(values) and wide.blocks == 25


def test_intervals_are_the_same_every_time_and_ignore_what_is_missing():
    values, blocks = drive_of(10, np.random.default_rng(3), correlated=False)
    holes = np.where(np.arange(len(values)) % 3 == 0, np.nan, values)
    assert mean_interval(holes, blocks) == mean_interval(holes, blocks)
    assert mean_interval(holes, blocks).mean == pytest.approx(np.nanmean(holes))


def test_a_drive_that_is_too_short_has_a_mean_and_no_interval():
    values, blocks = drive_of(MIN_BLOCKS - 1, np.random.default_rng(4), correlated=False)
    interval = mean_interval(values, blocks)
    assert interval.low is interval.high is None and interval.mean == pytest.approx(values.mean())
    assert mean_interval(np.full(5, np.nan), np.arange(5)).mean is None


def test_the_same_windows_tell_a_difference_that_two_drives_do_not():
    rng = np.random.default_rng(5)
    hard, blocks = drive_of(20, rng, correlated=True)
    better = hard + 0.2 + 0.02 * rng.standard_normal(len(hard))
    assert mean_interval(better - hard, blocks).above_zero
    unpaired = difference_interval(hard, blocks, better, blocks)
    assert unpaired.mean == pytest.approx(0.2, abs=0.01) and not unpaired.above_zero


def test_a_block_does_not_reach_into_another_episode():
    labels = block_labels(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 5.0]))
    assert labels[0] == labels[1] != labels[2] != labels[3]


def timeline(spikes, n=200):
    values = 4.0 + 0.5 * np.random.default_rng(6).standard_normal(n)
    values[0] = np.nan  # nothing was predicted for the first picture
    for at, height in spikes.items():
        values[at] += height
    return np.arange(n) / 10, np.zeros(n), values


def test_moments_are_where_the_model_was_wrong_and_neighbours_are_one():
    found = surprise.moments(*timeline({50: 8.0, 53: 6.0, 120: 10.0}), count=8)
    outliers = [m for m in found if m.outlier]
    assert [(m.time_s, m.start_s, m.end_s) for m in outliers] == [(5.0, 5.0, 5.3), (12.0, 12.0, 12.0)]
    assert outliers[1].score > outliers[0].score > surprise.THRESHOLD


def test_only_the_worst_moments_are_kept_in_the_order_of_time():
    found = surprise.moments(*timeline({20 * k: 5.0 + k for k in range(1, 10)}), count=4)
    assert [m.peak for m in found] == [120, 140, 160, 180]


def test_a_drive_without_surprises_shows_its_worst_windows_as_no_outliers():
    time_s, episodes, values = timeline({})
    values = 4.0 + 0.01 * (values - 4.0)  # noise of a hundredth of a decibel is no surprise
    found = surprise.moments(time_s, episodes, values, count=8)
    assert len(found) == surprise.FEWEST and not any(m.outlier for m in found)
    assert surprise.moments(time_s, episodes, np.full(200, np.nan), count=8) == []


def window(index, **changes):
    """A window of a moving robot, predicted 5 dB better than by copying."""
    values = {'executed': [0.3, 0.0], 'actions': [[0.3, 0.0]] * 4, 'moving': [True] * 4,
              'psnr_db': [28.0, 27.0, 26.0, 25.0], 'copy_psnr_db': [23.0, 22.0, 21.0, 20.0],
              'ssim': [0.9] * 4, 'copy_ssim': [0.7] * 4,
              'reconstruction_db': 36.0, 'surprise_db': 4.0, 'goal': '', 'episode': 0,
              'plans': {goal: [0.1 * k, 0.0] for k, goal in enumerate(TINY.goals)}}
    return Window(index=index, stamp_ns=index * 100_000_000, time_s=index / 10, **{**values, **changes})


def columns_of(windows):
    columns = Columns(TINY)
    for each in windows:
        columns.add(each)
    return columns


def test_what_stands_still_is_not_counted_among_what_moves():
    still = {'moving': [False] * 4, 'psnr_db': [40.0] * 4, 'copy_psnr_db': [60.0] * 4}
    columns = columns_of([window(k) if k % 2 else window(k, **still) for k in range(200)])
    moving, everything = prediction(columns, 'moving'), prediction(columns, 'all')
    assert moving['gain_db']['mean'] == pytest.approx(5.0) and moving['pictures'] == 400
    assert everything['gain_db']['mean'] == pytest.approx((5.0 - 20.0) / 2) and everything['pictures'] == 800
    assert [row['psnr_db']['mean'] for row in moving['by_horizon']] == pytest.approx([28.0, 27.0, 26.0, 25.0])


def test_horizons_beyond_the_end_of_an_episode_are_not_there():
    columns = columns_of([window(0), window(1, moving=[True], psnr_db=[20.0], copy_psnr_db=[20.0], ssim=[0.5],
                                            copy_ssim=[0.5])])
    rows = prediction(columns, 'all')['by_horizon']
    assert [row['pictures'] for row in rows] == [2, 1, 1, 1] and rows[0]['psnr_db']['mean'] == pytest.approx(24.0)


def test_plans_are_held_against_what_was_done_for_every_goal_and_for_the_one_that_was_set():
    columns = columns_of([window(k, goal='green', actions=[[0.3 + 0.01 * (k % 5), 0.0]]) for k in range(20)])
    found = policy(columns)
    assert found['best_goal'] == 'yellow'  # plans 0.3 m/s
    assert found['goals']['yellow']['linear.x']['mae'] == pytest.approx(0.02, abs=1e-4)
    assert found['known_goal']['linear.x']['mae'] == pytest.approx(0.22, abs=1e-4)
    assert found['known_goal']['windows'] == 20
    assert found['goals']['red']['linear.x']['correlation'] is None  # it never changes
    assert policy(columns_of([window(0, actions=[])])) == {'windows': 0}


def parked_then_driven(parked=300):
    """30 s in which a robot waits for its goal, and 10 s in which it turns about as planned, but for 0.7 rad/s."""
    return columns_of([*[window(k, executed=[0.0, 0.0], actions=[[0.0, 0.0]]) for k in range(parked)], *[
        window(parked + k, goal='red', executed=[0.3, turn], actions=[[0.3, turn]],
               plans={goal: [0.3, turn + (0.7 if k % 2 else -0.7)] for goal in TINY.goals})
        for k, turn in enumerate(1.2 * np.sin(np.arange(100) / 8))]])


def test_plans_for_the_goal_that_was_set_are_compared_with_a_constant_command_over_the_same_windows():
    columns = parked_then_driven()
    found = policy(columns)
    known, driven = found['known_goal'], policy(parked_then_driven(parked=0))
    assert (found['windows'], known['windows']) == (400, 100)
    assert (known['hold'], known['mean']) == (driven['hold'], driven['mean'])
    assert found['mean']['relative_rmse'] < known['relative_rmse'] < known['mean']['relative_rmse']


def test_branches_are_judged_only_where_the_real_action_tells_them_apart():
    clear = {'forward': 0.05, 'left': 0.4, 'right': 0.4, 'stop': 0.3, 'backward': 0.6}
    undecided = {**clear, 'stop': 0.06}
    right, wrong = dict(zip(clear, (25.0, 20.0, 20.0, 22.0, 18.0))), dict(zip(clear, (20.0, 21.0, 22.0, 25.0, 18.0)))
    rows = [Branches(clear, right)] * 3 + [Branches(clear, wrong)] + [Branches(undecided, wrong)] * 5
    found = what_if(columns_of([window(k, branches=b) for k, b in enumerate(rows)]))
    assert found['asked'] == 9 and found['decisive'] == 4
    assert found['nearest_is_best']['mean'] == pytest.approx(0.75)
    assert found['mean_rank']['mean'] == pytest.approx((1 + 1 + 1 + 4) / 4)
    assert found['confusion']['forward'] == {'forward': 3, 'left': 0, 'right': 0, 'stop': 1, 'backward': 0}

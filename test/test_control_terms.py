"""Terms of tasks: what each says about outcomes that can be judged by eye."""
from dataclasses import replace

import numpy as np
import pytest

from worldmodel_ros.control import terms
from worldmodel_ros.control.terms import (
    REACHED, ROBOT_RADIUS, Avoid, Clearance, KeepDistance, Outcome, PassBehind, Reach, StayIn, Thing, Time, Touch, utilities)
from worldmodel_ros.sim import scene

TIMES = np.linspace(0.0, 2.0, 21)
NO_WALLS = np.zeros((0, 3))


def along(*ways):
    """Poses (C, T, 3) of robots that drive straight from the first place to the second."""
    share = (TIMES / TIMES[-1])[:, None]
    return np.stack([np.concatenate([(1 - share) * np.array(a) + share * np.array(b), np.zeros((len(TIMES), 1))], 1)
                     for a, b in ways])


def still(x, y, radius=0.1, colour='red'):
    return Thing(np.tile((x, y), (len(TIMES), 1)), radius, colour)


def moving(start, velocity, radius=0.1, colour='magenta'):
    return Thing(np.array(start) + TIMES[:, None] * np.array(velocity), radius, colour, True)


def outcome(poses, walls=NO_WALLS, **things):
    return Outcome(TIMES, poses, things, walls)


def test_sizes_are_those_of_the_robot():
    assert terms.ROBOT_RADIUS == scene.ROBOT_RADIUS
    assert terms.REACHED == scene.GOAL_DISTANCE


def test_a_touch_is_better_the_sooner_and_a_near_miss_better_than_a_far_one():
    found = Touch('ball').utility(outcome(along([(0, 0), (2, 0)], [(0, 0), (1, 0)], [(0, 0), (0.5, 0)], [(0, 0), (0, 0)]),
                                          ball=still(1.0, 0.0)))
    assert found[0] > found[1] > found[2] > found[3]
    assert found[1] > 1.0 > 0.0 > found[2]
    assert found[2] == pytest.approx(-(0.5 - 0.1 - ROBOT_RADIUS))


def test_reaching_counts_the_way_that_is_left():
    found = Reach('goal').utility(outcome(along([(0, 0), (2, 0)], [(0, 0), (1, 0)], [(0, 0), (1.8, 0)]), goal=still(2.0, 0.0)))
    assert found[1] == pytest.approx(-(1.0 - REACHED))
    assert found[0] > found[2] > 0.0 > found[1]


def test_a_distance_is_kept_from_both_sides():
    found = KeepDistance('ball', 1.0).utility(outcome(along([(1, 0), (1, 0)], [(0.5, 0), (0.5, 0)], [(1.5, 0), (1.5, 0)]),
                                                      ball=still(2.0, 0.0)))
    assert found == pytest.approx([0.0, -0.5, -0.5])


def test_passing_behind_is_told_from_passing_ahead():
    # The mover goes along +y at x = 1; the robots cross x = 1 at the same moment, before and behind it.
    poses = along([(0.5, 1.5), (1.5, 1.5)], [(0.5, 0.5), (1.5, 0.5)], [(0.5, 0.5), (0.9, 0.5)])
    things = {'mover': moving((1.0, 0.0), (0.0, 1.0))}
    assert PassBehind('mover').utility(outcome(poses, **things)).tolist() == [-1.0, 0.0, 0.0]
    far = along([(0.5, 9.0), (1.5, 9.0)])
    assert PassBehind('mover').utility(outcome(far, **things)).tolist() == [0.0]
    assert PassBehind('mover').utility(outcome(poses, mover=still(1.0, 0.8))).tolist() == [0.0, 0.0, 0.0]


def test_a_name_or_a_colour_is_avoided():
    poses = along([(0, 0.5), (2, 0.5)], [(0, 0.36), (2, 0.36)], [(0, 0.2), (2, 0.2)])
    things = {'pillar': still(1.0, 0.0), 'ball': still(9.0, 9.0, colour='blue')}
    for what in ('pillar', 'red'):
        free, near, hit = Avoid(what, 0.05).utility(outcome(poses, **things))
        assert free == 0.0 > near > -1.0 > hit
    assert not Avoid('blue').utility(outcome(poses, **things)).any()
    assert not Avoid('green').utility(outcome(poses, **things)).any()


def test_clearance_minds_walls_and_leaves_out_what_is_wanted():
    walls = np.array([[1.0, 0.0, 1.5]])
    free, hit = Clearance(0.1).utility(outcome(along([(0, 0), (1, 0)], [(0, 0), (1.5, 0)]), walls))
    assert free == 0.0 and hit == -2.0
    at_ball = outcome(along([(0, 0), (1, 0)]), ball=still(1.0, 0.0))
    assert Clearance(0.1).utility(at_ball) < -1.0
    assert not Clearance(0.1, but=('ball',)).utility(at_ball).any()


def test_doubt_about_a_thing_grows_out_of_view_and_goes_where_a_robot_looks():
    poses = np.zeros((3, len(TIMES), 3))
    poses[1, 10:, 2] = np.pi / 2   # turns to the left after 1 s
    poses[2, :, 2] = -np.pi / 2    # has turned away
    aside = replace(still(0.0, 1.0), moves=True, unseen=0.6)
    ahead = replace(still(1.0, 0.0), moves=True, unseen=0.0)
    found = outcome(poses, aside=aside, ahead=ahead)
    left, right = found.doubt('aside'), found.doubt('ahead')
    assert (np.diff(left[0]) > 0.0).all() and left[0, 0] < 0.05 and left[0, -1] > 0.2
    np.testing.assert_array_equal(left[0, :10], left[1, :10])
    assert left[1, 10] < 0.06 and (left[1, 10:] < 0.1).all()
    assert right[0, -1] < 0.1 < right[2, -1], 'what is kept in view is known, but for how it goes on'
    far = outcome(poses, aside=replace(still(0.0, 9.0), moves=True, unseen=0.6))
    assert far.doubt('aside')[1, -1] > 0.2, 'it is too far to be seen'


def test_what_is_in_doubt_is_given_more_room_and_what_is_sure_counts_as_before():
    poses = along([(0.0, 0.0), (0.0, 0.0)])
    def penalty(gap, unseen):
        thing = replace(still(0.0, gap + 0.1 + ROBOT_RADIUS), moves=True, unseen=unseen)
        value, = Clearance(0.12).utility(outcome(poses, ball=thing))
        return value
    for gap in (-0.2, -0.03, 0.03, 0.09, 0.2):
        assert penalty(gap, None) == pytest.approx(-np.clip((0.12 - gap) / 0.12, 0.0, 1.0) - (gap <= 0.0))
    assert penalty(0.5, 0.0) == pytest.approx(0.0, abs=0.03) and penalty(-0.5, 0.0) < -1.7
    by_time = [penalty(0.2, unseen) for unseen in (0.0, 1.0, 3.0)]
    assert -0.5 > by_time[2] and np.diff(by_time).max() < -0.05 and by_time[0] > -0.4
    # Twice as far, and in view again: the mean over draws of where it is.
    draws = 0.3 + np.random.default_rng(0).normal(0.0, 0.15, 200_000)
    mean = (np.clip((0.12 - draws) / 0.12, 0.0, 1.0) + (draws <= 0.0)).mean()
    assert -terms._expected_penalty(np.array([[0.3]]), np.array([[0.15]]), 0.12)[0, 0] == pytest.approx(mean, abs=0.02)


def test_time_and_region():
    found = Time('goal').utility(outcome(along([(0, 0), (4, 0)], [(0, 0), (2, 0)], [(0, 0), (0, 0)]), goal=still(2.0, 0.0)))
    assert 0.0 > found[0] > found[1] > found[2] == -1.0
    outside = StayIn(-1.0, 1.0, -1.0, 1.0).utility(outcome(along([(0, 0), (0.9, 0)], [(0, 0), (1.25, 0)], [(0, 0), (0, -3)])))
    assert outside == pytest.approx([0.0, -0.25, -2.0])


def test_a_score_is_the_weighted_sum_and_what_is_not_known_counts_nothing():
    seen = outcome(along([(0, 0), (1, 0)], [(0, 0), (0.5, 0)]), ball=still(2.0, 0.0))
    asked = (Touch('ball', weight=2.0), StayIn(-1, 0.8, -1, 1, weight=3.0))
    parts = utilities(asked, seen)
    assert parts.shape == (2, len(seen.poses))
    np.testing.assert_array_equal(parts, [2.0 * asked[0].utility(seen), 3.0 * asked[1].utility(seen)])
    for term in (Touch('cat'), Reach('cat'), KeepDistance('cat', 1.0), PassBehind('cat'), Avoid('cat'), Time('cat')):
        assert not utilities((term,), seen).any()

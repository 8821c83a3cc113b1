"""The wheels say where the robot is, and drift; walls and standing things that are seen again take the drift away."""
import math

import numpy as np
import pytest

from worldmodel_ros.control.localisation import Localiser
from worldmodel_ros.control.pilot import SLOTS, Pilot
from worldmodel_ros.control.task import to_place
from worldmodel_ros.control.terms import Reach
from worldmodel_ros.motion import MOTOR_LAG, PERIOD, along_arc

THINGS = np.array([(1.5, 0.8), (1.2, -1.0), (-1.4, 0.9), (-1.0, -1.2)])
HALF = np.array([2.2, 1.9])  # m, of the room
NOTHING = np.zeros(4), np.zeros((4, 2)), np.array([1.0, 0.0, 9.0, 9.0, 9.0, 9.0])


def to_base(points, pose):
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return (points - pose[:2]) @ np.array([[cos, -sin], [sin, cos]])


def seen_from(pose, rng=None, things=THINGS):
    """What a forecast tells at a true pose in a room whose middle is the origin, with errors as large as measured."""
    noise = (lambda scale, *shape: scale * rng.standard_normal(shape)) if rng else lambda scale, *shape: np.zeros(shape)
    places = to_base(things, pose)
    places = places * (1.0 + noise(0.03, len(things), 1))
    presence = (np.abs(np.arctan2(places[:, 1], places[:, 0])) < 0.75).astype(float)
    turn = math.remainder(-pose[2], math.pi / 2)
    angles = turn + np.arange(4) * math.pi / 2 + pose[2]
    normals = np.stack([np.cos(angles), np.sin(angles)], 1)
    distances = np.abs(normals) @ HALF - normals @ pose[:2]
    turn += float(noise(math.radians(0.8), 1)[0])
    return presence, places, np.array([math.cos(4 * turn), math.sin(4 * turn), *distances * (1.0 + noise(0.04, 4))])


def drive(localiser, seconds=60.0, yaw_drift=0.1, seed=0, see=seen_from):
    """A figure of eight whose odometry turns by ``yaw_drift`` rad too much for each m; returns truth and odometry."""
    rng = np.random.default_rng(seed)
    true, odometry = np.array([[0.0, 0.0, 0.0]]), np.array([[0.0, 0.0, 0.0]])
    for tick in range(round(seconds / PERIOD)):
        true, odometry = follow(eight(tick), localiser, true, odometry, rng, yaw_drift, see)
    return true[0], odometry[0]


def eight(tick):
    return np.array([[0.4, 0.8 if math.sin(tick / 40.0) > 0 else -0.8]])


def follow(twist, localiser, true, odometry, rng, yaw_drift=0.1, see=seen_from, commanded=None):
    """Drive one tick, and have the localiser hear and see it; return truth and odometry (1, 3)."""
    true = along_arc(true, twist, PERIOD)
    odometry = along_arc(odometry, twist * 1.01 + [[0.0, yaw_drift * twist[0, 0]]], PERIOD)
    localiser.moved(odometry[0], PERIOD, commanded)
    localiser.saw(*see(true[0], rng))
    return true, odometry


def test_a_quarter_of_an_hour_in_one_room_leaves_the_estimate_as_good_as_it_was():
    """Rounding errors must not add up: an asymmetry of the covariance grows with each metre driven."""
    localiser, rng = Localiser([0, 1, 2, 3]), np.random.default_rng(0)
    true = odometry = np.zeros((1, 3))
    localiser.moved(odometry[0])
    localiser.saw(*seen_from(true[0]))
    for tick in range(9000):
        x, y, yaw = true[0]
        twist = eight(tick)
        if abs(x) > 1.4 or abs(y) > 1.1:  # back to the middle
            off = math.remainder(math.atan2(-y, -x) - yaw, math.tau)
            twist = np.array([[0.3 if abs(off) < 0.6 else 0.05, min(max(2.0 * off, -1.0), 1.0)]])
        true, odometry = follow(twist, localiser, true, odometry, rng, commanded=twist[0])
        assert math.dist(localiser.pose[:2], true[0, :2]) < 0.15, f'after {tick * PERIOD:.1f} s'


def test_walls_and_things_take_the_drift_of_the_wheels_away():
    localiser = Localiser([0, 1, 2, 3])
    localiser.moved(np.zeros(3))
    localiser.saw(*seen_from(np.zeros(3)))
    true, odometry = drive(localiser)
    assert math.dist(odometry[:2], true[:2]) > 0.5 and abs(odometry[2] - true[2]) > 1.0
    assert math.dist(localiser.pose[:2], true[:2]) < 0.15
    assert abs(math.remainder(localiser.pose[2] - true[2], math.tau)) < math.radians(3.0)
    assert math.dist(localiser.pose[:2], true[:2]) < 4.0 * np.hypot(*localiser.sure[:2])


def test_where_nothing_is_seen_the_wheels_are_believed():
    localiser = Localiser([0, 1, 2, 3])
    localiser.moved(np.array([1.0, 2.0, 0.5]))
    localiser.moved(np.array([1.3, 2.1, 0.7]))
    np.testing.assert_allclose(localiser.pose, (1.3, 2.1, 0.7))
    assert (localiser.sure > 0.0).all()


def test_a_thing_that_was_moved_does_not_move_the_robot():
    localiser, at = Localiser([0, 1, 2, 3]), np.array([0.0, 0.0, 0.0])
    moved = THINGS + [(0.0, -0.6), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    for _ in range(20):
        localiser.moved(at)
        localiser.saw(*seen_from(at))
    for _ in range(40):
        localiser.moved(at)
        localiser.saw(*seen_from(at, things=moved))
    assert math.dist(localiser.pose[:2], at[:2]) < 0.03 and abs(localiser.pose[2]) < math.radians(1.0)


@pytest.mark.parametrize('pose', [(3.0, -1.0, 2.0), (0.0, 0.0, -1.5)])
def test_another_frame_keeps_all_that_is_known(pose):
    one, two = Localiser([0, 1, 2, 3]), Localiser([0, 1, 2, 3])
    for localiser in (one, two):
        localiser.moved(np.zeros(3))
        localiser.saw(*seen_from(np.zeros(3)))
        drive(localiser, 8.0)
    before = two.pose
    two.start_at(np.array(pose))
    np.testing.assert_allclose(two.pose, pose)
    for localiser in (one, two):
        drive(localiser, 4.0, seed=3)
    turn, way = pose[2] - before[2], one.pose[:2] - before[:2]
    cos, sin = math.cos(turn), math.sin(turn)
    expected = np.array(pose[:2]) + np.array([[cos, -sin], [sin, cos]]) @ way
    np.testing.assert_allclose(two.pose[:2], expected, atol=1e-3)


def test_another_frame_makes_nothing_known_that_was_not_seen():
    rng = np.random.default_rng(0)
    for _ in range(200):
        localiser = Localiser([0, 1, 2, 3])
        localiser.moved(np.zeros(3))
        localiser.start_at(rng.uniform(-3.0, 3.0, 3))
        assert localiser.things() == {} and localiser.walls() is None


def test_a_robot_goes_as_far_as_it_can_while_images_are_missing():
    localiser = Localiser([0, 1, 2, 3])
    localiser.moved(np.zeros(3))
    localiser.moved(np.array([1.6, 0.0, 0.0]), 0.8)
    np.testing.assert_allclose(localiser.pose, (1.6, 0.0, 0.0))


@pytest.mark.parametrize('before', [(4.0, 4.0, 1.0), (0.1, 0.0, 2.5)])
def test_an_odometry_that_begins_again_moves_neither_the_robot_nor_its_frame(before):
    localiser = Localiser([0, 1, 2, 3])
    localiser.moved(np.array(before))
    localiser.saw(*NOTHING)
    localiser.moved(np.zeros(3))
    np.testing.assert_allclose(localiser.pose, before)
    localiser.moved(np.array([0.1, 0.0, 0.0]))
    x, y, yaw = before
    np.testing.assert_allclose(localiser.pose, (x + 0.1 * math.cos(yaw), y + 0.1 * math.sin(yaw), yaw))


GAINS, CURVE, SLIP, LEAD = (0.94, 1.05), 0.12, 0.15, 0.06  # of a base that goes and turns otherwise than it is told


def biased_drive(localiser, commanded=True, looks=60.0, blind=5.0, seed=1):
    """Drive such a base, whose odometry slips, in a room with landmarks, and then on without seeing them. Return the errors of
    the way and of the yaw since then, m and rad, of the localiser and of the odometry."""
    rng = np.random.default_rng(seed)
    true, odometry = np.zeros((1, 3)), np.zeros((1, 3))
    slip, before, was = 0.0, 0.0, np.zeros(2)
    for tick in range(round((looks + blind) / PERIOD)):
        if tick == round(looks / PERIOD):
            start = true[0].copy(), odometry[0].copy(), localiser.pose
        command = np.array([0.4, 0.8 if math.sin(tick / 25.0) > 0.0 else -0.7])
        # The body is ahead of its wheels by LEAD, as far as these turn.
        followed, was = command + MOTOR_LAG / PERIOD * (was - command), command
        twist = followed * GAINS + (0.0, CURVE * followed[0])
        body = twist + (0.0, LEAD / PERIOD * (twist[1] - before))
        before = twist[1]
        true = along_arc(true, body[None], PERIOD)
        keep = math.exp(-PERIOD)
        slip = keep * slip + math.sqrt(1.0 - keep ** 2) * SLIP * rng.standard_normal()
        odometry = along_arc(odometry, twist[None] + [[0.0, slip * twist[0]]], PERIOD)
        localiser.moved(odometry[0], PERIOD, command if commanded else None)
        if tick < round(looks / PERIOD):
            localiser.saw(*seen_from(true[0], rng))
    went, turned = to_base(true[0, :2], start[0]), true[0, 2] - start[0][2]
    return [(math.dist(to_base(pose[:2], before), went), abs(math.remainder(pose[2] - before[2] - turned, math.tau)))
            for pose, before in ((localiser.pose, start[2]), (odometry[0], start[1]))]


def test_a_robot_that_has_seen_what_its_commands_do_knows_where_it_goes_in_the_dark():
    errors = np.array([biased_drive(Localiser([0, 1, 2, 3]), seed=seed) for seed in range(8)])
    own, odometry = np.median(errors, 0)
    assert own[1] < math.radians(5.0) < 0.7 * odometry[1], np.degrees(errors[..., 1])
    assert own[0] < 0.06 < odometry[0], errors[..., 0]
    without = np.median([biased_drive(Localiser([0, 1, 2, 3]), False, seed=seed)[0] for seed in range(8)], 0)
    assert own[1] < 0.7 * without[1]


@pytest.mark.parametrize('step, commanded', [((0.0, 0.0, 0.0), (0.4, 0.5)), ((-0.02, 0.0, 0.03), (0.0, 0.0)),
                                             ((0.04, 0.0, 0.02), (0.4, -0.8))], ids=['blocked', 'pushed', 'driven by another'])
def test_a_base_that_does_not_do_what_was_commanded_is_measured(step, commanded):
    localiser, odometry = Localiser([0, 1, 2, 3]), np.zeros((1, 3))
    for _ in range(30):
        localiser.moved(odometry[0], PERIOD, np.array(commanded))
        odometry = along_arc(odometry, np.array([[step[0], step[2]]]) / PERIOD, PERIOD)
    localiser.moved(odometry[0], PERIOD, np.array(commanded))
    np.testing.assert_allclose(localiser.pose, odometry[0], atol=0.05)


def test_a_robot_that_stands_knows_that_it_stands():
    localiser = Localiser([0, 1, 2, 3])
    for _ in range(600):
        localiser.moved(np.array([1.0, 2.0, 0.5]), PERIOD, np.zeros(2))
    np.testing.assert_allclose(localiser.pose, (1.0, 2.0, 0.5))
    assert (localiser.sure == 0.0).all()


def test_commands_of_any_size_move_no_robot_whose_wheels_stand():
    localiser = Localiser([0, 1, 2, 3])
    for commanded in (1e6, -1e6, 1e30, math.nan, 0.0, 0.0):
        localiser.moved(np.zeros(3), PERIOD, np.full(2, commanded))
    assert np.isfinite(localiser.pose).all() and np.abs(localiser.pose).max() < 1e-3


class Room:
    """Tells what there is from a true pose; no thing that moves."""

    times, true = np.array([0.0, 0.8, 1.6]), np.zeros(3)

    def observe(self, image, executed, measured, passes):
        presence, places, walls = seen_from(self.true)
        count = len(SLOTS) - len(presence)
        places = np.concatenate([places, np.zeros((count, 2))])
        return np.concatenate([presence, np.zeros(count)]), np.tile(places, (3, 1, 1)), walls


def test_a_place_and_what_is_behind_the_robot_stay_where_they_are_when_the_odometry_begins_again():
    room, image, still = Room(), np.zeros((64, 64, 3), np.uint8), np.zeros(2)
    pilot = Pilot(room, clock=lambda: 0.0)
    terms = to_place((1.0, 0.0)).terms

    def look(true, odometry):
        room.true = np.array(true)
        pilot.odometry.measured(np.array(odometry), still)
        pilot.observe(image, still, 1)
        pilot.decide(terms, [(PERIOD, still)], still)

    for k in range(16):  # looks round, then stands with its back to the first two things
        look((0.0, 0.0, k * math.pi / 15), (1.6, 0.0, k * math.pi / 15))
    terms = to_place((2.6, 0.0)).terms
    look((0.0, 0.0, math.pi), (1.6, 0.0, math.pi))
    behind = {name: to_base(pilot.view.things[name].path[:1], pilot.view.pose) for name in ('red', 'green')}
    for _ in range(5):
        look((0.0, 0.0, math.pi), (0.0, 0.0, 0.0))
    for name, place in behind.items():
        np.testing.assert_allclose(to_base(pilot.view.things[name].path[:1], pilot.view.pose), place, atol=0.05)
    np.testing.assert_allclose(to_base(np.array([terms[0].place]), pilot.view.pose), [[-1.0, 0.0]], atol=0.05)


def test_a_place_is_one_of_the_odometry_as_it_is_when_the_task_is_given():
    room, image, still = Room(), np.zeros((64, 64, 3), np.uint8), np.zeros(2)
    pilot = Pilot(room, clock=lambda: 0.0)
    odometry = np.zeros((1, 3))
    for _ in range(200):  # on the spot, by wheels that say it is an arc
        odometry = along_arc(odometry, np.array([[0.1, 0.0]]), PERIOD)
        pilot.odometry.measured(odometry[0], still)
        pilot.observe(image, still, 1)
    assert math.dist(pilot.known.pose[:2], odometry[0, :2]) > 1.0
    terms = to_place((float(odometry[0, 0]) + 1.0, 0.0)).terms  # a metre ahead of where the wheels have the robot
    pilot.decide(terms, [(PERIOD, still)], still)
    reach = next(term for term in terms if isinstance(term, Reach))
    np.testing.assert_allclose(to_base(np.array([reach.place]), pilot.view.pose), [[1.0, 0.0]], atol=1e-6)
    for _ in range(50):  # the wheels go on, the robot does not
        odometry = along_arc(odometry, np.array([[0.1, 0.0]]), PERIOD)
        pilot.odometry.measured(odometry[0], still)
        pilot.observe(image, still, 1)
        pilot.decide(terms, [(PERIOD, still)], still)
    np.testing.assert_allclose(to_base(np.array([reach.place]), pilot.view.pose), [[1.0, 0.0]], atol=0.1)

"""A goal that is an image: the pose that sees what it shows, from remembered things and walls."""
import math

import numpy as np
import pytest
from test_localisation import HALF, THINGS, Room, seen_from

from worldmodel_ros.control.localisation import Localiser
from worldmodel_ros.control.pilot import STANDING, Pilot
from worldmodel_ros.control.sight import NAME, Sight
from worldmodel_ros.control.task import TaskError, to_place, to_sight
from worldmodel_ros.control.terms import Outcome, Reach, places, utilities
from worldmodel_ros.control.wall_colours import WallColours
from worldmodel_ros.sim.world import World

GOAL = np.array([-0.2, -0.5, 0.4])  # sees THINGS[0] and THINGS[1]


def sight_from(pose, **changes):
    presence, seen, walls = seen_from(np.asarray(pose, float))
    for name, value in changes.items():
        presence[int(name[1:])] = value
    return Sight(presence, seen, walls, np.zeros((64, 64, 3), np.uint8))


def localiser_that_saw(*poses):
    localiser = Localiser([0, 1, 2, 3])
    for pose in map(np.array, poses):
        localiser.moved(pose)
        localiser.saw(*seen_from(pose))
    return localiser


def all_around(x=0.0, y=0.0):
    return [(x, y, 0.2 * step) for step in range(32)]


@pytest.mark.parametrize('pose', [GOAL, (0.5, 0.2, 3.0), (0.4, 1.0, -2.4), (-1.2, 0.0, -0.2)])
def test_an_image_of_things_has_one_pose(pose):
    sight = sight_from(pose)
    assert sight.in_view(STANDING), 'the case is of an image that shows something'
    found = sight.pose(localiser_that_saw(*all_around()))
    assert math.dist(found[:2], pose[:2]) < 0.08
    assert abs(math.remainder(found[2] - pose[2], math.tau)) < math.radians(3.0)


def test_nothing_is_found_before_a_thing_of_the_image_was_seen():
    behind = [(0.0, 0.0, math.pi + 0.1 * step) for step in range(-2, 3)]
    assert sight_from(GOAL).pose(localiser_that_saw(*behind)) is None
    assert sight_from(GOAL).pose(Localiser([0, 1, 2, 3])) is None


def test_one_thing_that_is_not_what_it_was_taken_for_is_left_out():
    pose = np.array([1.9, 1.6, -2.4])
    sight = sight_from(pose)
    shown = sight.in_view(STANDING)
    sight.places[shown[0]] += (0.9, -1.0)
    found = sight.pose(localiser_that_saw(*all_around()))
    assert len(shown) >= 3 and math.dist(found[:2], pose[:2]) < 0.15


def test_an_image_is_like_itself_and_the_less_like_another_the_further_off_that_is():
    world = World(2_000_000)
    x, y, yaw = world.pose
    seen = []
    for turn in (0.0, 0.03, 0.2, 0.6, 3.0):
        world.move_robot((x, y, yaw + turn))
        seen.append(world.render((64, 64)))
    sight = Sight(np.zeros(12), np.zeros((12, 2)), np.zeros(6), seen[0])
    alike = [sight.similarity(image) for image in seen]
    assert alike[0] == pytest.approx(1.0) and alike[1] > 0.9 and alike == sorted(alike, reverse=True)
    assert alike[-1] < 0.6
    assert math.isnan(sight.similarity(np.full((64, 64, 3), 90, np.uint8)))


BARE = (2.0, 1.6, math.radians(12.0))  # near a corner, looks at one wall, and at none of THINGS
PAINTS = np.array([(190, 150, 120), (150, 190, 130), (120, 170, 190), (180, 140, 190)], np.uint8)  # of walls at +x, +y, -x, -y


def walls_seen_from(pose):
    """An image of the room's walls above a grey floor, each in its colour, as 64 columns of 90 degrees show them."""
    columns = np.arctan(1.0 - (2.0 * np.arange(64) + 1.0) / 64) + pose[2]
    away = [(HALF[axis] - sign * pose[axis]) / np.maximum(sign * np.array((np.cos(columns), np.sin(columns)))[axis], 1e-3)
            for sign in (1.0, -1.0) for axis in (0, 1)]
    image = np.full((64, 64, 3), 110, np.uint8)
    image[:36] = PAINTS[np.argmin(away, 0)]
    return image


def bare_sight(pose, paint=None):
    presence, seen, walls = seen_from(np.asarray(pose, float))
    return Sight(np.zeros_like(presence), seen, walls, walls_seen_from(pose) if paint is None else paint)


def looked_around():
    localiser, wall_colours = localiser_that_saw(*all_around()), WallColours()
    for pose in all_around():
        direction, _ = localiser.walls()
        wall_colours.saw(walls_seen_from(pose), *seen_from(np.array(pose)), pose[2] - direction)
    return localiser, wall_colours


@pytest.mark.parametrize('yaw', [0.1, 1.7, -1.5, 3.0])
def test_an_image_of_one_wall_is_seen_all_along_it_and_the_nearest_place_without_things_is_taken(yaw):
    ahead = np.array([math.cos(yaw), math.sin(yaw)]).round()
    place = ahead * (HALF - 0.8)
    sight = bare_sight((*place, yaw))
    assert sight.is_of_one_wall(STANDING)
    localiser, wall_colours = looked_around()
    found = sight.pose(localiser, wall_colours)
    assert abs(math.remainder(found[2] - yaw, math.tau)) < math.radians(2.0)
    assert abs(ahead @ (found[:2] - place)) < 0.1, 'as far from the wall as the image is'
    assert not sight._missing(found, localiser.things()), 'no thing is in view there'
    assert (np.abs(found[:2]) < HALF - 0.2).all()


def test_an_image_of_a_corner_has_one_pose():
    pose = (-1.2, -1.0, -2.4)
    sight = bare_sight(pose)
    assert len(sight.walls_in_view()) == 2 and not sight.is_of_one_wall(STANDING)
    found = sight.pose(*looked_around())
    assert math.dist(found[:2], pose[:2]) < 0.1 and abs(math.remainder(found[2] - pose[2], math.tau)) < math.radians(2.0)


def test_walls_of_other_colours_and_walls_not_yet_seen_are_not_found():
    localiser, wall_colours = looked_around()
    other = np.full((64, 64, 3), 110, np.uint8)
    other[:36] = (230, 40, 40)
    assert bare_sight(BARE, other).pose(localiser, wall_colours) is None
    assert bare_sight(BARE).pose(localiser, WallColours()) is None
    assert bare_sight(BARE).pose(Localiser([0, 1, 2, 3]), wall_colours) is None


def test_a_thing_before_a_wall_does_not_give_it_its_colour():
    localiser, clean = looked_around()
    covered = WallColours()
    direction, _ = localiser.walls()
    for pose in all_around():
        presence, places, walls = seen_from(np.array(pose))
        image = walls_seen_from(pose)
        bearings = np.arctan(1.0 - (2.0 * np.arange(64) + 1.0) / 64)
        for x, y in places[presence > 0.5]:
            image[:, np.abs(bearings - math.atan2(y, x)) < 0.16 / math.hypot(x, y)] = (200, 20, 20)
        covered.saw(image, presence, places, walls, pose[2] - direction)
    np.testing.assert_allclose(covered.known(), clean.known(), atol=0.01)


def test_an_image_of_walls_alone_is_a_goal_and_one_of_one_colour_is_refused():
    assert to_sight(bare_sight(BARE), STANDING).name == 'image'
    with pytest.raises(TaskError, match='of one colour'):
        to_sight(bare_sight(BARE, np.full((64, 64, 3), 90, np.uint8)), STANDING)


def test_a_robot_that_has_seen_the_things_drives_to_where_they_look_as_in_the_image():
    room, still = Room(), np.zeros(2)
    pilot, terms = Pilot(room, clock=lambda: 0.0), to_sight(sight_from(GOAL), STANDING).terms
    names = []
    for pose in all_around():
        room.true = np.array(pose)
        pilot.odometry.measured(room.true, still)
        pilot.observe(np.zeros((64, 64, 3), np.uint8), still, 1)
        names.append(pilot.decide(terms, [(0.1, still)], still).name)
        if names[-1] != 'search':
            break
    assert names[-1] != 'search'
    thing = pilot.view.things[NAME]
    assert math.dist(thing.path[0], GOAL[:2]) < 0.1 and not thing.solid
    values = pilot.known.utilities(terms, np.tile((0.3, 0.0), (5, 1)))  # what-if questions know the goal
    assert len(values) == len(terms) and values[0] < 0.0


def test_the_yaw_at_a_place_counts_there_and_does_not_keep_a_robot_away():
    terms = to_place((1.0, 0.0, math.pi)).terms
    reach = next(term for term in terms if isinstance(term, Reach))
    times, walls = np.linspace(0.0, 2.0, 21), np.zeros((0, 3))
    poses = np.zeros((3, 21, 3))
    poses[0, :, 0] = 0.5                           # stays away, looks as it should
    poses[0, :, 2] = math.pi
    poses[1, :, 0] = np.linspace(0.5, 1.0, 21)     # arrives, and looks the wrong way
    poses[2, :, 0], poses[2, :, 2] = poses[1, :, 0], math.pi
    away, wrong, right = utilities((reach,), Outcome(times, poses, places((reach,), 21), walls))[0]
    assert away < wrong < right


def test_a_pose_with_a_yaw_is_faced_on_the_spot():
    from worldmodel_ros.control.reactive_policy import Aim, drive
    terms = to_place((0.0, 0.0, 1.5)).terms
    aim = Aim.of(terms, places(terms, 1))
    poses = np.array([(0.02, 0.0, 0.0), (0.1, 0.0, 0.5), (0.02, 0.0, 1.5), (-1.0, 0.0, 0.0)])
    commands = drive(aim, poses, np.zeros((4, 2)), np.zeros((0, 2)), np.zeros(0), np.zeros((0, 3)))
    np.testing.assert_allclose(commands[:3, 0], 0.0)
    assert (commands[:2, 1] > 0.5).all() and abs(commands[2, 1]) < 0.01 and commands[3, 0] > 0.3


def test_the_room_of_these_tests_holds_its_things():
    assert (np.abs(THINGS) < HALF - 0.3).all()

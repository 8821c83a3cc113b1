"""A goal that is an image: the pose that sees what it shows, from remembered things and walls."""
import math

import numpy as np
import pytest
from test_localisation import HALF, THINGS, seen_from

from worldmodel_ros.control.localisation import Localiser
from worldmodel_ros.control.pilot import SLOTS, STANDING, Pilot
from worldmodel_ros.control.sight import NAME, Sight
from worldmodel_ros.control.task import TaskError, to_place, to_sight
from worldmodel_ros.control.terms import Outcome, Reach, places, utilities
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


def test_an_image_of_walls_alone_is_refused():
    with pytest.raises(TaskError, match='none of the things'):
        to_sight(sight_from(GOAL, _0=0.0, _1=0.0, _2=0.0, _3=0.0), STANDING)


def test_a_robot_that_has_seen_the_things_drives_to_where_they_look_as_in_the_image():
    class Room:
        times, true = np.array([0.0, 0.8, 1.6]), np.zeros(3)

        def observe(self, image, executed, measured, passes):
            presence, seen, walls = seen_from(self.true)
            count = len(SLOTS) - len(presence)
            seen = np.concatenate([seen, np.zeros((count, 2))])
            return np.concatenate([presence, np.zeros(count)]), np.tile(seen, (3, 1, 1)), walls

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

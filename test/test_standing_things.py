"""What stands is remembered in the odometry's frame when the forecast has forgotten it, until the camera shows it is gone."""
import math

import numpy as np
import pytest

from worldmodel_ros.control.pilot import SLOTS, Pilot
from worldmodel_ros.control.scene_view import OutOfView, Seen, StandingThings
from worldmodel_ros.control.task import to_goal
from worldmodel_ros.motion import PERIOD

TIMES = np.array([0.0, 0.8, 1.6])
RED, BALL, MOVER, OTHER = 0, 4, 7, 8  # slots
WALLS = np.array([1.0, 0.0, 5.0, 5.0, 5.0, 5.0])


def seen(**places):
    """What a forecast tells when things are at these places in base_link, by slot: nothing of all others."""
    presence, where = np.zeros(len(SLOTS)), np.zeros((len(TIMES), len(SLOTS), 2))
    for name, place in places.items():
        slot = globals()[name]
        presence[slot], where[:, slot] = 0.9, place
    return Seen(presence, where, WALLS, TIMES)


def test_a_thing_that_stands_stays_where_it_was_while_the_robot_turns_and_drives():
    memory = StandingThings(SLOTS)
    memory.remember(seen(RED=(2.0, 0.5)), np.array([1.0, 1.0, 0.0]), {})  # at (3, 1.5) in the odometry's frame
    for _ in range(600):  # a minute, turned away
        told = memory.remember(seen(), np.array([3.0, 0.5, -math.pi / 2]), {})
    assert told.presence[RED] == pytest.approx(0.9)
    np.testing.assert_allclose(told.places[:, RED], np.tile((-1.0, 0.0), (len(TIMES), 1)), atol=1e-9)


def test_what_the_forecast_tells_comes_before_what_is_remembered():
    memory, pose = StandingThings(SLOTS), np.zeros(3)
    memory.remember(seen(RED=(2.0, 0.0)), pose, {})
    told = memory.remember(seen(RED=(1.0, 0.5)), pose, {RED: np.array([2.0, 0.1])})
    np.testing.assert_allclose(told.places[0, RED], (1.0, 0.5))


def test_out_of_view_what_was_seen_and_mapped_comes_before_what_the_forecast_carries_on():
    memory, behind = StandingThings(SLOTS), np.array([0.0, 0.0, math.pi])
    memory.remember(seen(RED=(2.0, 0.0)), np.zeros(3), {})
    drifted = seen(RED=(-1.9, 0.6))
    np.testing.assert_allclose(memory.remember(drifted, behind, {}).places[0, RED], (-2.0, 0.0), atol=1e-9)
    mapped = {RED: np.array([2.0, 0.1])}
    np.testing.assert_allclose(memory.remember(drifted, behind, mapped).places[0, RED], (-2.0, -0.1), atol=1e-9)


def test_what_is_told_aside_of_where_the_camera_would_see_it_is_believed():
    memory = StandingThings(SLOTS)
    memory.remember(seen(RED=(2.0, 0.0)), np.zeros(3), {})
    told = memory.remember(seen(RED=(0.0, 1.0)), np.zeros(3), {RED: np.array([2.0, 0.0])})
    np.testing.assert_allclose(told.places[0, RED], (0.0, 1.0))


def test_what_was_never_in_view_is_where_the_forecast_says():
    told = StandingThings(SLOTS).remember(seen(RED=(-1.0, 1.0)), np.zeros(3), {})
    np.testing.assert_allclose(told.places[0, RED], (-1.0, 1.0))


def test_what_moves_is_not_remembered():
    memory, pose = StandingThings(SLOTS), np.zeros(3)
    memory.remember(seen(BALL=(2.0, 0.0), MOVER=(1.0, 0.0)), pose, {})
    assert not memory.remember(seen(), pose, {}).presence.any()


def test_a_thing_that_is_not_seen_where_it_should_be_is_forgotten():
    memory, pose = StandingThings(SLOTS), np.zeros(3)
    memory.remember(seen(RED=(1.0, 0.0)), pose, {})
    there = [memory.remember(seen(), pose, {}).presence[RED] > 0 for _ in range(12)]
    assert there[0] and not there[-1]
    assert memory.remember(seen(), np.array([0.0, 0.0, math.pi]), {}).presence[RED] == 0.0  # and does not come back


@pytest.mark.parametrize('hidden', [dict(MOVER=(0.6, 0.0)), dict(BALL=(0.5, 0.02))])
def test_a_thing_behind_another_is_not_taken_for_gone(hidden):
    memory, pose = StandingThings(SLOTS), np.zeros(3)
    memory.remember(seen(RED=(1.2, 0.0)), pose, {})
    for _ in range(40):
        told = memory.remember(seen(**hidden), pose, {})
    assert told.presence[RED] > 0


def test_it_is_counted_how_long_a_place_is_out_of_view():
    watch, told, pose = OutOfView(SLOTS), [], np.zeros(3)
    for bearing in (0.5, 1.0, 1.0, 1.0, -0.5, -1.5, 3.0):
        told.append(watch.look(seen(RED=(np.cos(bearing), np.sin(bearing))), pose).unseen[RED])
    assert told == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.0, 0.1, 0.2])
    things = watch.look(seen(RED=(0.0, 1.0), BALL=(0.0, 1.0)), pose).view(SLOTS, np.zeros(3), np.zeros(2), TIMES).things
    assert things['red'].unseen is None, 'what stands is remembered, and in no doubt'
    assert things['magenta ball'].unseen == pytest.approx(0.1)


def test_things_that_look_alike_are_told_apart_when_they_change_their_slots():
    watch, pose = OutOfView(SLOTS), np.zeros(3)
    ahead, aside = (1.5, 0.0), (0.0, 1.0)
    for _ in range(5):
        told = watch.look(seen(MOVER=ahead, OTHER=aside), pose).unseen
    assert told[[MOVER, OTHER]] == pytest.approx([0.0, 0.5])
    told = watch.look(seen(MOVER=aside, OTHER=ahead), pose).unseen
    assert told[[MOVER, OTHER]] == pytest.approx([0.6, 0.0])
    # The robot turns: what is expected stays where it is, and what is not told for a while is not taken for another one.
    pose = np.array([0.0, 0.0, math.pi / 2])
    for _ in range(3):
        told = watch.look(seen(OTHER=(0.0, -1.5)), pose).unseen
    assert told[OTHER] == pytest.approx(0.3)
    told = watch.look(seen(MOVER=(-1.5, 0.0), OTHER=(1.0, 0.1)), np.array([0.0, 0.0, math.pi])).unseen
    assert told[MOVER] == pytest.approx(0.4) and told[OTHER] == 0.0
    told = watch.look(seen(MOVER=(0.0, -1.0)), np.array([0.0, 0.0, math.pi])).unseen
    assert told[MOVER] == pytest.approx(1.1), 'it is the one that was not told for five ticks'
    before, now = np.array([0.0, 0.0, math.pi]), np.array([5.0, -3.0, 0.5])
    watch.move(before, now)  # another frame, as where a task begins
    assert watch.look(seen(OTHER=(0.0, -1.0)), now).unseen[OTHER] == pytest.approx(1.2)


def test_a_robot_that_turns_away_knows_a_thing_by_its_wheels_though_its_forecast_turns_too_slowly():
    class TurnsTooSlowly:
        times, yaw = TIMES, 0.0

        def observe(self, image, executed, measured, passes):
            there = -0.8 * self.yaw
            now = seen(RED=(2.0 * math.cos(there), 2.0 * math.sin(there)))
            return now.presence, now.places, np.array([math.cos(4.0 * self.yaw), -math.sin(4.0 * self.yaw), 5.0, 5.0, 5.0, 5.0])

    forecast, turn = TurnsTooSlowly(), np.array([0.0, 1.0])
    pilot = Pilot(forecast, clock=lambda: 0.0)
    for tick in range(26):
        forecast.yaw = tick * turn[1] * PERIOD
        pilot.odometry.measured((0.0, 0.0, forecast.yaw), turn)
        pilot.observe(np.zeros((64, 64, 3), np.uint8), turn, 1)
    x, y = pilot.known.seen.places[0, RED]
    assert math.atan2(y, x) == pytest.approx(-2.5, abs=math.radians(10.0))


def test_a_robot_drives_to_a_goal_that_its_forecast_has_forgotten():
    class Forgets:
        times = TIMES
        told = [seen(RED=(0.0, 2.0))] + 5 * [seen()]

        def observe(self, image, executed, measured, passes):
            now = self.told.pop(0)
            return now.presence, now.places, now.walls

    pilot, terms, command = Pilot(Forgets(), clock=lambda: 0.0), to_goal('red').terms, np.zeros(2)
    for tick in range(6):
        pilot.odometry.measured((0.0, 0.0, 0.0), (0.0, 0.0))
        pilot.observe(np.zeros((64, 64, 3), np.uint8), command, 1)
        decision = pilot.decide(terms, [(PERIOD, command)], command)
        assert decision.name != 'search'
    assert decision.commands[-1, 1] > 0.0 or decision.command[1] > 0.0  # to the left, where red is

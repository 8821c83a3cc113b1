"""How well the scene forecast and the robot's own motion locate things that it does not look at: errors of the bearing.

    python benchmarks/remembered_places.py --seeds 3100000:3100300 --json remembered_places.json

Ahead: the expert drives to a goal, for 2.4 s with images for the forecast; then images end, and 1 and 5 s later
the goal's bearing is computed from its last place, moved by the commands that were executed since, by the wheels' odometry, or
by the robot's ``Localiser``, which knows both and has learned, while there were images, what they are wrong by; the bounds are
what each gives for the goal's true place. As in ``worldmodel evaluate quality``, a case counts if the
camera sees the goal at the start and at the horizon. Turned away: the robot looks at a thing for 1.6 s, turns until it is
behind it, and stands; images go on, and 5 s after the thing was last in view it should be known, with its bearing.
"""
import argparse
import math
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.control.pilot import SLOTS, Pilot
from worldmodel_ros.engine.forecast.loading import load_forecast
from worldmodel_ros.evaluate.quality.seeds import parse_seeds
from worldmodel_ros.motion import PERIOD, from_base, move, to_base
from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.expert import expert_action
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.rollout import advance, random_latency
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.task_scenes import task_scene
from worldmodel_ros.sim.world import LIMITS, World

LOOKS, AHEAD = 24, (10, 50)  # ticks: with images, and after the last one
LOOKS_AT, SINCE = 16, 50  # ticks: at the thing, and since it was last in view
WITHIN = math.radians(5.0)
WAYS = ('commands', 'odometry', 'localiser')  # by which the goal's place is moved once there are no more images
_NAMES = [slot.name for slot in SLOTS]
_TURN = 1.2  # rad/s
_LOST = 0.5  # probability below which a thing is not known


class Robot:
    """A robot in a static room that is driven and observes."""

    def __init__(self, world: World, seed: int, forecasts) -> None:
        world.load(task_scene('rooms', seed))
        self.world, self._forecasts = world, forecasts
        self.rng, self.limiter = np.random.default_rng([seed, 1]), TwistLimiter(LIMITS)
        self.odometry, self.pilot = WheelOdometry(world), Pilot(forecasts.open())
        self.executed = (0.0, 0.0)

    def look(self) -> None:
        """Give the forecast an image."""
        self.pilot.odometry.measured(self.odometry.pose, self.odometry.twist)
        self.pilot.observe(self.world.render(self._forecasts.image_size), np.array(self.executed), 1)

    def drive(self, command) -> np.ndarray:
        """Drive for a period; return the command after the limits."""
        limited = self.limiter.limit([float(value) for value in command], self.executed, PERIOD).twist
        advance(self.world, self.executed, limited, random_latency(self.rng))
        self.odometry.update(self.world)
        self.executed = limited
        return np.array(limited)

    def error(self, name: str, place: np.ndarray, pose: np.ndarray) -> float:
        """Return radians between the true bearing of a thing and that of ``place`` (2,) from ``pose`` (3,), in one frame."""
        told = math.atan2(place[1] - pose[1], place[0] - pose[0]) - pose[2]
        return abs(math.remainder(told - self.world.goal_bearing(name), math.tau))


def ahead(robot: Robot) -> list[dict]:
    """Return errors of the goal's bearing at each of AHEAD, in one room."""
    world = robot.world
    goal = min(COLOURS, key=lambda colour: abs(world.goal_bearing(colour)))
    for _ in range(LOOKS):
        robot.look()
        robot.drive(expert_action(world, goal))
    robot.look()
    if not world.visible(goal):
        return []
    seen, slot, localiser = robot.pilot.known.seen, _NAMES.index(goal), robot.pilot.localiser
    place, known = seen.places[0, slot], seen.presence[slot] > _LOST
    true = to_base(np.array(world.position(goal)), np.array(world.pose))
    start, localised = np.array(robot.odometry.pose), localiser.pose
    poses, twists, rows = start[None], np.array([robot.odometry.twist]), []
    for tick in range(1, max(AHEAD) + 1):
        command = robot.drive(expert_action(world, goal))
        poses, twists = move(poses, twists, command[None], PERIOD)
        measured = np.array(robot.odometry.pose)
        localiser.moved(measured, PERIOD, command)
        if tick not in AHEAD or not world.visible(goal):
            continue
        row = {'seconds': tick * PERIOD}
        for by, before, pose in zip(WAYS, (start, start, localised), (poses[0], measured, localiser.pose), strict=True):
            row[by] = robot.error(goal, from_base(place, before), pose) if known else math.pi / 2
            row[f'bound of {by}'] = robot.error(goal, from_base(true, before), pose)
        rows.append(row)
    return rows


def turned_away(robot: Robot) -> tuple[bool, float] | None:
    """Return whether a thing is known, and its bearing error, SINCE ticks after it was last in view; None if none was."""
    world = robot.world
    name = min(COLOURS, key=lambda colour: abs(world.goal_bearing(colour)))
    for _ in range(LOOKS_AT):
        robot.look()
        robot.drive((0.0, np.clip(2.5 * world.goal_bearing(name), -1.0, 1.0)))
    if not world.visible(name):
        return None
    since, side = 0, 1.0 if robot.rng.random() < 0.5 else -1.0
    while since < SINCE:
        robot.look()
        robot.drive((0.0, side * _TURN if abs(world.goal_bearing(name)) < math.radians(150.0) else 0.0))
        since = 0 if world.visible(name) else since + 1
    robot.look()
    seen, slot = robot.pilot.known.seen, _NAMES.index(name)
    x, y = seen.places[0, slot]
    return bool(seen.presence[slot] > _LOST), robot.error(name, np.array([x, y]), np.zeros(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', required=True, metavar='A:B')
    parser.add_argument('--forecast', default='tiny')
    parser.add_argument('--cases', type=int, default=300, help='of each kind, at most')
    parser.add_argument('--json', type=Path)
    chosen = parser.parse_args()
    forecasts, world = load_forecast(chosen.forecast), World()
    rows: list[dict] = []
    away: list[tuple[bool, float]] = []
    for seed in parse_seeds(chosen.seeds):
        if sum(row['seconds'] == AHEAD[-1] * PERIOD for row in rows) < chosen.cases:
            rows += ahead(Robot(world, seed, forecasts))
        if len(away) < chosen.cases and (case := turned_away(Robot(world, seed, forecasts))):
            away.append(case)
        if seed % 20 == 0:
            write_result(_result(chosen, seed, rows, away), chosen.json)
    write_result(_result(chosen, seed, rows, away), chosen.json, show=True)


def _result(chosen: argparse.Namespace, last: int, rows: list[dict], away: list[tuple[bool, float]]) -> dict:
    found = {}
    for ticks in AHEAD:
        of = [row for row in rows if row['seconds'] == ticks * PERIOD]
        for by in (f'{bound}{way}' for way in WAYS for bound in ('', 'bound of ')):
            found[f'{ticks * PERIOD:g} s, {by}'] = _row(np.array([row[by] for row in of]))
    known = np.array([case[0] for case in away], bool)
    errors = np.array([case[1] for case in away])
    return {**provenance(), 'seeds': chosen.seeds, 'last_seed': last, 'forecast': chosen.forecast, 'ahead': found,
            'turned_away': {'cases': len(away), 'known': round(float(known.sum()) / max(1, len(away)), 4),
                            'known_within_5_degrees': round(float((known & (errors <= WITHIN)).sum()) / max(1, len(away)), 4),
                            'median_degrees': round(math.degrees(np.median(errors[known])), 2) if known.any() else None}}


def _row(errors: np.ndarray) -> dict:
    if not len(errors):
        return {'cases': 0}
    return {'cases': len(errors), 'within_5_degrees': round(float((errors <= WITHIN).mean()), 4),
            'median_degrees': round(math.degrees(np.median(errors)), 2)}


if __name__ == '__main__':
    main()

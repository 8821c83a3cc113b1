"""Drives to a goal from the true state, by rules that a policy with only the camera can learn to follow.

``expert_action`` knows where the goal is, even if something hides it. ``search_action`` is for when nothing seen so far tells
where the goal is: a policy that imitates the expert there learns to turn on the spot, which never ends if every view of the
goal from that spot is blocked.
"""
import math

import numpy as np

from worldmodel_ros.sim.scene import COLOURS, ROBOT_RADIUS
from worldmodel_ros.sim.world import World

STOP_DISTANCE = 0.42  # m, between centres: a little inside the distance that counts as reached
CRUISE, SEARCH_SPEED = 0.5, 0.25  # m/s
SPIN, TURN = 1.0, 1.2  # rad/s

_VIEW = math.radians(40.0)  # the robot steers at a goal within this bearing
_KEEP = math.radians(36.0)  # a detour keeps the goal within this bearing
_STEER_GAIN = 2.5  # rad/s per rad
_FULL_TURN = math.radians(45.0)  # at this heading error the robot turns in place
_BACK_OFF = 0.30  # m, to an object that is too wide to pass with the goal in view
_MARGIN = 0.10  # m, next to an object on a detour
_WALL_MARGIN = 0.08  # m, next to a wall on a detour
_ARC_SPEED, _ARC_TURN = 0.5, 1.2  # m/s, rad/s: a search's circle of 0.4 m
_FAR = 3.0  # m of free path ahead beyond which a search turns more slowly
_FAR_TURN = 0.5  # rad/s


def expert_action(world: World, goal: str) -> np.ndarray:
    """Return the expert's command towards the object named ``goal``: float32 (2,), m/s and rad/s.

    It is within the robot's speed limits; the caller limits its rate of change. It depends on the state alone,
    without memory. Raises ValueError for a goal that is not in the room.
    """
    distance, bearing = world.goal_distance(goal), world.goal_bearing(goal)
    if abs(bearing) >= _VIEW:
        # Always to the left, even when the right is nearer: a policy that learns from this has only the camera,
        # and an image without the goal does not say on which side it is.
        return np.array([0.0, SPIN], np.float32)
    visible = world.visible(goal)
    if visible and distance < STOP_DISTANCE:
        return np.zeros(2, np.float32)
    # A goal ahead but hidden: go round what hides it, slowly, until it shows. Spinning on would never end if every
    # view of the goal from here is blocked.
    obstacles = _obstacles(world, goal)
    wanted = _heading(world, obstacles, distance, bearing)
    heading = min(max(wanted, bearing - _KEEP), bearing + _KEEP)
    ahead = _clearance(obstacles)
    if abs(wanted - bearing) > _KEEP and ahead < _BACK_OFF:
        # Too near to pass with the goal in view: back off, facing it, until the detour is at a small angle.
        return np.array([-0.2, min(max(_STEER_GAIN * bearing, -TURN), TURN)], np.float32)
    speed = min(CRUISE if visible else SEARCH_SPEED, 0.1 + 0.9 * max(0.0, distance - STOP_DISTANCE))
    speed *= max(0.0, 1.0 - abs(heading) / _FULL_TURN)
    clearance = min(ahead, _wall_clearance(world))
    if clearance < 0.04:
        speed = -0.15  # too near to turn away and keep the goal in view
    else:
        speed = min(speed, 1.5 * clearance)
    return np.array([speed, min(max(_STEER_GAIN * heading, -TURN), TURN)], np.float32)


def search_action(world: World) -> np.ndarray:
    """Return the command of a search for a goal that is not in view: float32 (2,), m/s and rad/s.

    Circles to the left, which look around and behind things at once. It turns more slowly if the path ahead is long, so
    that it moves through the room instead of closing the circle, and drives more slowly the nearer anything is ahead. It
    depends on the state alone, without memory, and not on where any goal is.
    """
    free = min(_clearance(_obstacles(world)), _wall_clearance(world))
    return np.array([min(_ARC_SPEED, 1.5 * max(0.0, free - 0.02)), _FAR_TURN if free > _FAR else _ARC_TURN], np.float32)


def _obstacles(world: World, goal: str | None = None) -> list[tuple[float, float, float]]:
    """Return x and y in base_link and the radius (m) of every object except the goal, if one is named."""
    x, y, yaw = world.pose
    cos, sin = math.cos(yaw), math.sin(yaw)
    found = []
    for colour, prop in zip(COLOURS, world.scene.props, strict=True):
        if colour != goal:
            dx, dy = (a - b for a, b in zip(world.position(colour), (x, y), strict=True))
            found.append((cos * dx + sin * dy, cos * dy - sin * dx, prop.radius))
    return found


def _heading(world: World, obstacles: list, distance: float, bearing: float) -> float:
    """Return the direction to drive in, rad in base_link: the goal's, or past the nearest object in the way."""
    heading = bearing
    for x, y, radius in sorted(obstacles, key=lambda o: math.hypot(o[0], o[1])):
        away, direction, reach = math.hypot(x, y), math.atan2(y, x), radius + ROBOT_RADIUS + _MARGIN
        if away >= distance:
            break
        offset = math.remainder(bearing - direction, math.tau)
        tangent = math.asin(min(1.0, reach / away))
        if abs(offset) < tangent:
            side = math.copysign(1.0, offset)
            if not _has_room(world, direction, away, side * reach):
                side = -side
            heading = direction + side * tangent
            break
    return math.remainder(heading, math.tau)


def _has_room(world: World, direction: float, away: float, sideways: float) -> bool:
    """Return whether the robot fits at the point ``sideways`` m from the one ``away`` m off in ``direction``."""
    x, y, yaw = world.pose
    cos, sin = math.cos(yaw + direction), math.sin(yaw + direction)
    px, py = x + away * cos - sideways * sin, y + away * sin + sideways * cos
    room = ROBOT_RADIUS + _WALL_MARGIN
    return abs(px) < world.scene.width / 2 - room and abs(py) < world.scene.depth / 2 - room


def _clearance(obstacles: list) -> float:
    """Return how many metres the robot can drive straight on before it touches an object."""
    free = math.inf
    for x, y, radius in obstacles:
        reach = radius + ROBOT_RADIUS + 0.01
        if x > 0.0 and abs(y) < reach:
            free = min(free, x - math.sqrt(reach * reach - y * y))
    return free


def _wall_clearance(world: World) -> float:
    """Return how many metres the robot can drive straight on before it touches a wall."""
    x, y, yaw = world.pose
    free = math.inf
    half_x, half_y = world.scene.width / 2, world.scene.depth / 2
    for at, half, rate in ((x, half_x, math.cos(yaw)), (y, half_y, math.sin(yaw))):
        if abs(rate) > 1e-6:
            free = min(free, (math.copysign(half - ROBOT_RADIUS, rate) - at) / rate)
    return free

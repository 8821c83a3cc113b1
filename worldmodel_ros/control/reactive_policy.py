"""The reactive policy: drives to a place by the present state alone, for many robots at once.

The rules are those of ``sim.expert``: steer at the place, pass what is in the way at its side, slow down before what is ahead.
It is what decides without imagination, and what a candidate of the planner goes on with after its manoeuvre. Of so few rows,
numpy's calls take longer than their work: hence ufuncs where methods would read better.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .terms import ROBOT_RADIUS, Avoid, KeepDistance, Reach, Term, Thing, Touch

SPIN = np.array([0.0, 1.0])     # m/s and rad/s: looks for what is not known, always to the left
_STOP, _CRUISE, _RUSH = 0.42, 0.5, 0.6   # m; m/s to reach, and to touch
_STOP_AT_PLACE = 0.05           # m
_TURN_AT_PLACE = 0.13           # m: a robot no farther from a place that is not _AHEAD of it turns to the yaw there
_AHEAD = math.radians(45.0)
_STEER, _TURN = 2.5, 1.2        # rad/s a rad; rad/s
_FULL_TURN = math.radians(60.0)
_KEEP_VIEW = math.radians(36.0)
_MARGIN, _WALL_MARGIN = 0.10, 0.08       # m, to an object or a wall on a detour
_BRAKE = 1.5                    # m/s for each metre of free way


@dataclass(frozen=True)
class Aim:
    """What a task asks the policy to drive to: ``apart`` in m is the distance that it keeps to the target's centre, 0 for a
    touch; ``wide``: m that each name or colour is passed at more than others; ``in_view``: the target is kept there on a
    detour, which a place need not be; ``yaw`` in rad: to be faced at a place, None: any."""

    target: str
    apart: float
    wide: dict[str, float]
    in_view: bool = True
    yaw: float | None = None

    @classmethod
    def of(cls, terms: Sequence[Term], things: Mapping[str, Thing] = {}) -> Aim:
        """Return the aim of the first term that has a target, one of ``things`` if it is known. Raises ValueError where none
        has."""
        wide = {term.what: max(term.clearance, 0.05) for term in terms if isinstance(term, Avoid)}
        for term in terms:
            match term:
                case Touch():
                    return cls(term.target, 0.0, wide)
                case Reach(place=None, sight=None):
                    return cls(term.target, _STOP, wide)
                case Reach():
                    yaw = things[term.target].yaw if term.target in things else None
                    return cls(term.target, _STOP_AT_PLACE, wide, in_view=False, yaw=yaw)
                case KeepDistance():
                    return cls(term.target, term.distance, wide, in_view=term.place is None)
        raise ValueError('a task without a thing to touch, to reach or to keep a distance to gives a policy no aim')


def drive(aim: Aim, poses: np.ndarray, target: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray
          ) -> np.ndarray:
    """Return commands (C, 2), m/s and rad/s, for robots at ``poses`` (C, 3) and their ``target`` (C, 2).

    ``obstacles`` (N, 2) are all other things, with their ``radii`` (N,); ``walls`` as in ``Outcome``.
    """
    cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
    x, y = _in_base(target - poses[:, :2], cos, sin)
    distance, bearing = np.hypot(x, y), np.arctan2(y, x)
    heading = bearing
    seen = _in_base(obstacles[None] - poses[:, None, :2], cos[:, None], sin[:, None]) if len(obstacles) else None
    free = _free(poses, cos, sin, seen, radii, walls)
    if seen is not None:
        heading = _round_obstacles(poses, distance, bearing, np.hypot(*seen), np.arctan2(seen[1], seen[0]),
                                   radii + ROBOT_RADIUS + _MARGIN, walls)
    if aim.apart:
        if aim.in_view:
            heading = np.minimum(np.maximum(heading, bearing - _KEEP_VIEW), bearing + _KEEP_VIEW)
        speed = _approach(aim, distance)
    else:
        speed = np.full(len(poses), _RUSH)
    facing = np.maximum(0.0, 1.0 - np.abs(heading) / _FULL_TURN)
    np.multiply(speed, facing, out=speed, where=speed > 0.0)
    most = _BRAKE * free
    most[free < 0.04] = -0.15
    commands = np.empty((len(poses), 2))
    np.minimum(speed, most, out=commands[:, 0])
    commands[:, 1] = np.minimum(np.maximum(_STEER * heading, -_TURN), _TURN)
    if not aim.in_view and aim.apart < ROBOT_RADIUS:
        at = distance <= aim.apart  # its direction says nothing any more
        if aim.yaw is None:
            commands[at, 1] = 0.0
        else:
            at |= (distance <= _TURN_AT_PLACE) & (np.abs(bearing) > _AHEAD)
            left = np.remainder(aim.yaw - poses[at, 2] + np.pi, 2 * np.pi) - np.pi
            commands[at, 0] = 0.0
            commands[at, 1] = np.minimum(np.maximum(_STEER * left, -_TURN), _TURN)
    return commands


def free_way(poses: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Return the metres (C,) that robots at ``poses`` (C, 3) can drive straight on before they touch an obstacle or a wall."""
    cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
    seen = _in_base(obstacles[None] - poses[:, None, :2], cos[:, None], sin[:, None]) if len(obstacles) else None
    return _free(poses, cos, sin, seen, radii, walls)


def _free(poses: np.ndarray, cos: np.ndarray, sin: np.ndarray, seen: tuple[np.ndarray, np.ndarray] | None,
          radii: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """``free_way``, given the obstacles' x and y (C, N) in each robot's base."""
    free = np.full(len(poses), np.inf)
    if len(walls):
        ahead = np.empty((len(poses), 2))
        ahead[:, 0], ahead[:, 1] = cos, sin
        rate = ahead @ walls[:, :2].T
        gap = walls[:, 2] - poses[:, :2] @ walls[:, :2].T - ROBOT_RADIUS
        ways = gap / np.maximum(rate, 1e-6)
        ways[rate <= 1e-6] = np.inf
        free = np.minimum.reduce(ways, 1)
    if seen is not None:
        x, y = seen
        reach = radii + ROBOT_RADIUS + 0.01
        blocks = (x > 0.0) & (np.abs(y) < reach)
        if np.count_nonzero(blocks):
            ways = x - np.sqrt(np.maximum(reach * reach - y * y, 0.0))
            ways[~blocks] = np.inf
            free = np.minimum(free, np.minimum.reduce(ways, 1))
    return free


class Search:
    """Looks for a target that is not known: a turn on the spot, then a drive to another place, and again. A turn alone
    never ends where every view of the target is blocked; a circle comes back to where it began."""

    SPIN_S, DRIVE_S = 7.0, 6.0   # s, of a turn, and at most of a drive
    _WAY, _LEAST = 1.5, 0.6      # m, of a drive: at most, and at least unless all ways are shorter
    _GOLDEN = 2.399963           # rad: directions that it goes on by never repeat

    def __init__(self) -> None:
        self._ticks = self._drives = 0
        self._place: np.ndarray | None = None

    def found(self) -> None:
        """The target is known."""
        self._ticks, self._place = 0, None

    def command(self, pose: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray, period: float
                ) -> np.ndarray:
        """Return the command (2,) of a robot at ``pose`` (3,) that is asked every ``period`` s; the rest as for ``drive``."""
        spent = self._ticks * period
        self._ticks += 1
        if spent < self.SPIN_S:
            return SPIN
        if self._place is None:
            self._place = self._somewhere(pose, obstacles, radii, walls)
        if spent > self.SPIN_S + self.DRIVE_S or math.dist(pose[:2], self._place) < _STOP + 0.05:
            self.found()
            return SPIN
        return drive(Aim('', _STOP, {}), pose[None], self._place[None], obstacles, radii, walls)[0]

    def _somewhere(self, pose: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray) -> np.ndarray:
        self._drives += 1
        headings = self._GOLDEN * (self._drives + np.arange(12))
        free = free_way(np.column_stack([np.tile(pose[:2], (12, 1)), headings]), obstacles, radii, walls)
        chosen = int(np.argmax(free > self._LEAST)) if (free > self._LEAST).any() else int(free.argmax())
        way = min(self._WAY, float(free[chosen]) - 0.1) + _STOP
        return pose[:2] + way * np.array([math.cos(headings[chosen]), math.sin(headings[chosen])])


def _approach(aim: Aim, distance: np.ndarray) -> np.ndarray:
    left = distance - aim.apart
    if aim.apart > _STOP:  # a distance to keep, from both sides
        return np.minimum(np.maximum(1.5 * left, -0.3), _RUSH)
    return np.where(left <= 0.0, 0.0, np.minimum(_CRUISE, 0.1 + 0.9 * left))


def _round_obstacles(poses: np.ndarray, distance: np.ndarray, bearing: np.ndarray, away: np.ndarray,
                     direction: np.ndarray, reach: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Headings (C,) past the nearest obstacle in the way of each robot, on the side that it is nearer to and has room."""
    offset = np.remainder(bearing[:, None] - direction + np.pi, 2 * np.pi) - np.pi
    tangent = np.arcsin(np.minimum(1.0, reach / np.maximum(away, 1e-6)))
    blocks = (away < distance[:, None]) & (np.abs(offset) < tangent)
    if not np.count_nonzero(blocks):
        return bearing
    # Only of those whose way is blocked.
    rows = np.flatnonzero(np.logical_or.reduce(blocks, 1))
    poses, ahead = poses[rows], away[rows]
    ahead[~blocks[rows]] = np.inf
    nearest = ahead.argmin(1)
    way, off = direction[rows, nearest], tangent[rows, nearest]
    side = np.where(offset[rows, nearest] >= 0.0, 1.0, -1.0)
    if len(walls):
        angle, far, wide = poses[:, 2] + way, away[rows, nearest], side * reach[nearest]
        cos, sin = np.cos(angle), np.sin(angle)
        past = poses[:, :2].copy()
        past[:, 0] += far * cos
        past[:, 1] += far * sin
        past[:, 0] += wide * -sin
        past[:, 1] += wide * cos
        narrow = (walls[:, 2] - past @ walls[:, :2].T).min(1) < ROBOT_RADIUS + _WALL_MARGIN
        side = np.where(narrow, -side, side)
    heading = bearing.copy()
    heading[rows] = np.remainder(way + side * off + np.pi, 2 * np.pi) - np.pi
    return heading


def _in_base(way: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = way[..., 0], way[..., 1]
    return cos * x + sin * y, cos * y - sin * x

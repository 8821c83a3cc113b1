"""The reactive policy: drives to a place by the present state alone, for many robots at once.

The rules are those of `sim.expert`: steer at the place, pass what is in the way at its side, slow down before what is ahead.
It is the reference without imagination, and what a candidate of the planner goes on with after its manoeuvre.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.control.terms import ROBOT_RADIUS, Avoid, KeepDistance, Reach, Term, Touch

SPIN = np.array([0.0, 1.0])     # m/s and rad/s: looks for what is not known, always to the left
_STOP, _CRUISE, _RUSH = 0.42, 0.5, 0.6   # m; m/s to reach, and to touch
_STEER, _TURN = 2.5, 1.2        # rad/s a rad; rad/s
_FULL_TURN = math.radians(60.0)
_KEEP_VIEW = math.radians(36.0)
_MARGIN, _WALL_MARGIN = 0.10, 0.08       # m, to an object or a wall on a detour
_BRAKE = 1.5                    # m/s for each metre of free way


@dataclass(frozen=True)
class Aim:
    """What a task asks the policy to drive to: `apart` in m is the distance that it keeps to the target's centre, 0 for a
    touch; `wide`: m that each name or colour is passed at more than others."""

    target: str
    apart: float
    wide: dict[str, float]

    @classmethod
    def of(cls, terms: Sequence[Term]) -> Aim:
        """The aim of the first term that has a target. Raises ValueError where none has."""
        wide = {term.what: max(term.clearance, 0.05) for term in terms if isinstance(term, Avoid)}
        for term in terms:
            match term:
                case Touch():
                    return cls(term.target, 0.0, wide)
                case Reach():
                    return cls(term.target, _STOP, wide)
                case KeepDistance():
                    return cls(term.target, term.distance, wide)
        raise ValueError('a task without a thing to touch, to reach or to keep a distance to gives a policy no aim')


def drive(aim: Aim, poses: np.ndarray, target: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray
          ) -> np.ndarray:
    """Commands (C, 2), m/s and rad/s, for robots at `poses` (C, 3) and their `target` (C, 2).

    `obstacles` (N, 2) are all other things, with their `radii` (N,); `walls` as in `Outcome`.
    """
    cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
    distance, bearing = _polar(target - poses[:, :2], cos, sin)
    heading = bearing.copy()
    free = free_way(poses, obstacles, radii, walls)
    if len(obstacles):
        x, y = _in_base(obstacles[None] - poses[:, None, :2], cos[:, None], sin[:, None])
        heading = _round_obstacles(poses, distance, bearing, np.hypot(x, y), np.arctan2(y, x),
                                   radii + ROBOT_RADIUS + _MARGIN, walls)
    if aim.apart:
        heading = np.clip(heading, bearing - _KEEP_VIEW, bearing + _KEEP_VIEW)
        speed = _approach(aim, distance)
    else:
        speed = np.full(len(poses), _RUSH)
    facing = np.maximum(0.0, 1.0 - np.abs(heading) / _FULL_TURN)
    speed = np.where(speed > 0.0, speed * facing, speed)
    speed = np.where(free < 0.04, np.minimum(speed, -0.15), np.minimum(speed, _BRAKE * free))
    return np.stack([speed, np.clip(_STEER * heading, -_TURN, _TURN)], 1)


def free_way(poses: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Metres (C,) that robots at `poses` (C, 3) can drive straight on before they touch an obstacle or a wall."""
    cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
    free = np.full(len(poses), np.inf)
    if len(walls):
        rate = np.stack([cos, sin], 1) @ walls[:, :2].T
        gap = walls[:, 2] - poses[:, :2] @ walls[:, :2].T - ROBOT_RADIUS
        free = np.where(rate > 1e-6, gap / np.maximum(rate, 1e-6), np.inf).min(1)
    if len(obstacles):
        x, y = _in_base(obstacles[None] - poses[:, None, :2], cos[:, None], sin[:, None])
        reach = radii + ROBOT_RADIUS + 0.01
        ahead = (x > 0.0) & (np.abs(y) < reach)
        free = np.minimum(free, np.where(ahead, x - np.sqrt(np.maximum(reach * reach - y * y, 0.0)), np.inf).min(1))
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
        """Command (2,) of a robot at `pose` (3,) that is asked every `period` s; the rest as for `drive`."""
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
        return np.clip(1.5 * left, -0.3, _RUSH)
    return np.where(left <= 0.0, 0.0, np.minimum(_CRUISE, 0.1 + 0.9 * left))


def _round_obstacles(poses: np.ndarray, distance: np.ndarray, bearing: np.ndarray, away: np.ndarray,
                     direction: np.ndarray, reach: np.ndarray, walls: np.ndarray) -> np.ndarray:
    """Headings (C,) past the nearest obstacle in the way of each robot, on the side that it is nearer to and has room."""
    offset = np.remainder(bearing[:, None] - direction + np.pi, 2 * np.pi) - np.pi
    tangent = np.arcsin(np.minimum(1.0, reach / np.maximum(away, 1e-6)))
    blocks = (away < distance[:, None]) & (np.abs(offset) < tangent)
    nearest = np.where(blocks, away, np.inf).argmin(1)
    rows = np.arange(len(poses))
    side = np.where(offset[rows, nearest] >= 0.0, 1.0, -1.0)
    wide = reach[nearest]
    angle = poses[:, 2] + direction[rows, nearest]
    past = poses[:, :2] + away[rows, nearest, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    past += (side * wide)[:, None] * np.stack([-np.sin(angle), np.cos(angle)], 1)
    if len(walls):
        narrow = (walls[:, 2] - past @ walls[:, :2].T).min(1) < ROBOT_RADIUS + _WALL_MARGIN
        side = np.where(narrow, -side, side)
    heading = direction[rows, nearest] + side * tangent[rows, nearest]
    heading = np.remainder(heading + np.pi, 2 * np.pi) - np.pi
    return np.where(blocks.any(1), heading, bearing)


def _in_base(way: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return cos * way[..., 0] + sin * way[..., 1], cos * way[..., 1] - sin * way[..., 0]


def _polar(way: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = _in_base(way, cos, sin)
    return np.hypot(x, y), np.arctan2(y, x)

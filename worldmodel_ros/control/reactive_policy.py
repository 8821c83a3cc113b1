"""The reactive policy: drives to a place by the present state alone, for many robots at once.

The rules are those of ``sim.expert``: steer at the place, pass obstacles on the side, slow down before what is ahead. The
policy decides alone when no futures are compared, and continues each candidate after its manoeuvre. With so few rows, numpy's
call overhead exceeds the work: hence ufuncs where methods would read better.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .terms import ROBOT_RADIUS, Avoid, KeepDistance, Reach, Term, Thing, Touch

SPIN = np.array([0.0, 1.0])     # m/s and rad/s: searches for an unknown target, always to the left
_STOP, _CRUISE, _RUSH = 0.42, 0.5, 0.6   # m; m/s to reach, and to touch
_STOP_AT_PLACE = 0.05           # m
_TURN_AT_PLACE = 0.13           # m: a robot this close to a place that is not _AHEAD of it turns to the yaw
_AHEAD = math.radians(45.0)
_STEER, _TURN = 2.5, 1.2        # rad/s per rad; rad/s
_FULL_TURN = math.radians(60.0)
_KEEP_VIEW = math.radians(36.0)
_MARGIN, _WALL_MARGIN = 0.10, 0.08       # m, to an object or a wall on a detour
_BRAKE = 1.5                    # m/s per metre of free path


@dataclass(frozen=True)
class Aim:
    """What a task asks the policy to drive to: ``apart``: distance in m to keep to the target's centre, 0 for a touch;
    ``wide``: extra distance in m at which to pass each name or colour; ``in_view``: whether to keep the target in view on a
    detour, which a place does not need; ``yaw``: to face at a place, rad, None for any."""

    target: str
    apart: float
    wide: dict[str, float]
    in_view: bool = True
    yaw: float | None = None

    @classmethod
    def of(cls, terms: Sequence[Term], things: Mapping[str, Thing] = {}) -> Aim:
        """Return the aim of the first term that has a target, one of ``things`` if it is known. Raises ValueError if none
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


class Course:
    """The policy with an aim, among obstacles and walls: computes once what depends on neither robots nor time.

    Points of the plane are complex numbers here, so that one call rotates them and one gives their distance.
    """

    def __init__(self, aim: Aim, radii: np.ndarray, walls: np.ndarray) -> None:
        """``radii`` (N,) of the obstacles; ``walls`` as in ``Outcome``."""
        self._aim, self._walls = aim, len(walls)
        self._touched, self._passed = (radii + (ROBOT_RADIUS + 0.01)) ** 2, radii + (ROBOT_RADIUS + _MARGIN)
        self._normals, self._room = np.ascontiguousarray(walls[:, :2].T), walls[:, 2] - ROBOT_RADIUS

    def drive(self, poses: np.ndarray, target: np.ndarray, obstacles: np.ndarray) -> np.ndarray:
        """Return commands (C, 2), m/s and rad/s, for robots at ``poses`` (C, 3), given their ``target`` (C,) and all other
        things (N,), both complex."""
        aim, (state, ahead, at) = self._aim, _state(poses)
        back = ahead.conj()
        way = (target - at) * back
        distance, bearing = np.abs(way), np.arctan2(way.imag, way.real)
        heading, seen = bearing, None
        if len(obstacles):
            seen = (obstacles - at[:, None]) * back[:, None]
            heading = self._round_obstacles(ahead, at, way, distance, bearing, seen)
        most = self._free(state, seen)
        if aim.apart:
            if aim.in_view:
                heading = np.minimum(np.maximum(heading, bearing - _KEEP_VIEW), bearing + _KEEP_VIEW)
            speed = _approach(aim, distance)
        else:
            speed = np.full(len(poses), _RUSH)
        facing = np.maximum(0.0, 1.0 - np.abs(heading) / _FULL_TURN)
        np.multiply(speed, facing, out=speed, where=speed > 0.0)
        blocked = most < 0.04
        most *= _BRAKE
        most[blocked] = -0.15
        commands = np.empty((len(poses), 2))
        np.minimum(speed, most, out=commands[:, 0])
        heading = _STEER * heading
        np.minimum(np.maximum(heading, -_TURN), _TURN, out=commands[:, 1])
        if not aim.in_view and aim.apart < ROBOT_RADIUS:
            there = distance <= aim.apart  # too close for the bearing to mean anything
            if aim.yaw is None:
                commands[there, 1] = 0.0
            else:
                there |= (distance <= _TURN_AT_PLACE) & (np.abs(bearing) > _AHEAD)
                left = np.remainder(aim.yaw - poses[there, 2] + np.pi, 2 * np.pi) - np.pi
                commands[there, 0] = 0.0
                commands[there, 1] = np.minimum(np.maximum(_STEER * left, -_TURN), _TURN)
        return commands

    def free_way(self, poses: np.ndarray, obstacles: np.ndarray) -> np.ndarray:
        """Return the metres (C,) that robots at ``poses`` (C, 3) can drive straight on before they touch one of ``obstacles``
        (N,), complex, or a wall."""
        state, ahead, at = _state(poses)
        return self._free(state, (obstacles - at[:, None]) * ahead.conj()[:, None] if len(obstacles) else None)

    def _free(self, state: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
        """``free_way``, given the obstacles (C, N) in each robot's base frame."""
        free = np.full(state.shape[1], np.inf)
        if self._walls:
            rate, along = state @ self._normals
            ways = np.full(rate.shape, np.inf)
            np.divide(self._room - along, rate, out=ways, where=rate > 1e-6)
            free = np.minimum.reduce(ways, 1)
        if seen is not None:
            x, y = seen.real, seen.imag
            wide = self._touched - y * y
            blocks = (x > 0.0) & (wide > 0.0)
            if np.count_nonzero(blocks):
                ways = np.where(blocks, x - np.sqrt(np.maximum(wide, 0.0)), np.inf)
                free = np.minimum(free, np.minimum.reduce(ways, 1))
        return free

    def _round_obstacles(self, ahead: np.ndarray, at: np.ndarray, way: np.ndarray, distance: np.ndarray, bearing: np.ndarray,
                         seen: np.ndarray) -> np.ndarray:
        """Return headings (C,) past the nearest obstacle in each robot's way, on the nearer side unless a wall is there."""
        away = np.abs(seen)
        turned = seen * way.conj()[:, None]  # along the way to the target and across it, times its length
        blocks = (away < distance[:, None]) & (turned.real > 0.0) & (np.abs(turned.imag) < self._passed * distance[:, None])
        if not np.count_nonzero(blocks):
            return bearing
        far = np.where(blocks, away, np.inf)
        rows, nearest = np.arange(len(far)), far.argmin(1)
        far, it, reach = far[rows, nearest], seen[rows, nearest], self._passed[nearest]
        side = np.where(turned.imag[rows, nearest] <= 0.0, 1.0, -1.0)
        if self._walls:
            past = at + it * ahead * (1.0 + 1j * (side * reach / far))
            room = self._room - past.view(float).reshape(-1, 2) @ self._normals
            side = np.where(np.minimum.reduce(room, 1) < _WALL_MARGIN, -side, side)
        round_it = np.arctan2(it.imag, it.real) + side * np.arcsin(np.minimum(1.0, reach / far))
        return np.where(far < np.inf, np.remainder(round_it + np.pi, 2 * np.pi) - np.pi, bearing)


def drive(aim: Aim, poses: np.ndarray, target: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray
          ) -> np.ndarray:
    """Return commands (C, 2), m/s and rad/s, for robots at ``poses`` (C, 3) and their ``target`` (C, 2).

    ``obstacles`` (N, 2) are all other things, with their ``radii`` (N,); ``walls`` as in ``Outcome``.
    """
    return Course(aim, radii, walls).drive(poses, as_complex(target), as_complex(obstacles))


def as_complex(places: np.ndarray) -> np.ndarray:
    """Return places (..., 2) as complex numbers (...)."""
    return np.ascontiguousarray(places, float).view(complex)[..., 0]


def _state(poses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the robots' directions and positions, (2, C, 2), and both as complex numbers (C,)."""
    state = np.empty((2, len(poses), 2))
    np.cos(poses[:, 2], out=state[0, :, 0])
    np.sin(poses[:, 2], out=state[0, :, 1])
    state[1] = poses[:, :2]
    return state, *state.view(complex)[..., 0]


class Search:
    """Searches for an unknown target: turns on the spot, drives to another place, and repeats. Turning alone would never end
    where every view of the target is blocked; a circle would come back to where it began."""

    SPIN_S, DRIVE_S = 7.0, 6.0   # s, of turning, and at most of driving
    _WAY, _LEAST = 1.5, 0.6      # m to drive: at most, and at least unless all ways are shorter
    _GOLDEN = 2.399963           # rad, the golden angle: multiples of it never repeat a direction

    def __init__(self) -> None:
        self._ticks = self._drives = 0
        self._place: np.ndarray | None = None

    def found(self) -> None:
        """Reset the search: the target is known."""
        self._ticks, self._place = 0, None

    def command(self, pose: np.ndarray, obstacles: np.ndarray, radii: np.ndarray, walls: np.ndarray, period: float,
                fastest: float = math.inf) -> np.ndarray:
        """Return the command (2,) for a robot at ``pose`` (3,), called every ``period`` s; ``fastest`` [rad/s]: of a base that
        turns more slowly, and thus for longer. The rest as for ``drive``."""
        spent = self._ticks * period * (min(1.0, fastest / SPIN[1]) or 1.0)
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
        course = Course(Aim('', _STOP, {}), radii, walls)
        free = course.free_way(np.column_stack([np.tile(pose[:2], (12, 1)), headings]), as_complex(obstacles))
        chosen = int(np.argmax(free > self._LEAST)) if (free > self._LEAST).any() else int(free.argmax())
        way = min(self._WAY, float(free[chosen]) - 0.1) + _STOP
        return pose[:2] + way * np.array([math.cos(headings[chosen]), math.sin(headings[chosen])])


def _approach(aim: Aim, distance: np.ndarray) -> np.ndarray:
    left = distance - aim.apart
    if aim.apart > _STOP:  # a distance to keep, from both sides
        return np.minimum(np.maximum(1.5 * left, -0.3), _RUSH)
    return np.where(left <= 0.0, 0.0, np.minimum(_CRUISE, 0.1 + 0.9 * left))

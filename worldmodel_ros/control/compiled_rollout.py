"""Numba version of ``deliberation.imagine``: with so few rows, numpy's call overhead exceeds the work.

The policy, with its rules and constants, is that of ``reactive_policy``; a test checks that both give the same commands.
"""
from __future__ import annotations

import math

import numpy as np
from numba import njit

from worldmodel_ros.motion import MOTOR_LAG
from .reactive_policy import (
    _AHEAD, _BRAKE, _CRUISE, _FULL_TURN, _KEEP_VIEW, _MARGIN, _RUSH, _STEER, _STOP, _TURN, _TURN_AT_PLACE, _WALL_MARGIN)
from .terms import ROBOT_RADIUS

_compiled = njit(cache=True, nogil=True, error_model='numpy')


@_compiled
def roll_out(pose: np.ndarray, twist: np.ndarray, previous: np.ndarray, path: np.ndarray, others: np.ndarray,
             radii: np.ndarray, walls: np.ndarray, leads: np.ndarray, holds: np.ndarray, held: np.ndarray, apart: float,
             in_view: bool, yaw: float, low: np.ndarray, high: np.ndarray, reach: np.ndarray, period: float
             ) -> tuple[np.ndarray, np.ndarray]:
    """
    Return poses (C, T, 3) of the robot from ``pose`` (3,) on, and the commands (C, T - 1, 2) between them.

    ``twist`` and ``previous`` (2,): m/s and rad/s. ``path`` (T + 1, 2) of the target and ``others`` (N, T + 1, 2) with
    ``radii`` (N,): in m, ``period`` s apart. ``walls``: as in ``Outcome``. Per candidate: ``leads`` (C,) in steps, ``holds``
    (C, 2), and ``held`` (C,), for how many steps. ``apart``, ``in_view`` and ``yaw``: of the aim, NaN for no yaw. ``low``,
    ``high`` and ``reach`` (2,): from ``Limits.arrays``. Releases the GIL.
    """
    count, steps = len(leads), len(path) - 1
    poses, commands = np.empty((count, steps, 3)), np.empty((count, steps - 1, 2))
    keep = math.exp(-period / MOTOR_LAG)
    behind = (1.0 - keep) * MOTOR_LAG / period
    for number in range(count):
        x, y, turned = pose
        v, w = twist
        last_v, last_w = previous
        poses[number, 0] = pose
        for step in range(steps - 1):
            if step < held[number]:
                wanted_v, wanted_w = holds[number]
            else:
                target = path[min(step + 1 + leads[number], steps)]
                wanted_v, wanted_w = _drive(x, y, turned, target, others, step + 1, radii, walls, apart, in_view, yaw)
            last_v = min(max(min(max(wanted_v, last_v - reach[0]), last_v + reach[0]), low[0]), high[0])
            last_w = min(max(min(max(wanted_w, last_w - reach[1]), last_w + reach[1]), low[1]), high[1])
            commands[number, step] = last_v, last_w
            turn = (last_w + (w - last_w) * behind) * period
            half = turn / 2 if turn != 0.0 else 1.0e-20
            chord = (last_v + (v - last_v) * behind) * period * (math.sin(half) / half)
            x += math.cos(turned + turn / 2) * chord
            y += math.sin(turned + turn / 2) * chord
            turned += turn
            v, w = last_v + (v - last_v) * keep, last_w + (w - last_w) * keep
            poses[number, step + 1] = x, y, turned
    return poses, commands


@_compiled
def _drive(x: float, y: float, turned: float, target: np.ndarray, others: np.ndarray, time: int, radii: np.ndarray,
           walls: np.ndarray, apart: float, in_view: bool, yaw: float) -> tuple[float, float]:
    """``Course.drive`` for one robot, with the others where they are at step ``time``."""
    cos, sin = math.cos(turned), math.sin(turned)
    ahead, left = target[0] - x, target[1] - y
    ahead, left = ahead * cos + left * sin, left * cos - ahead * sin
    distance, bearing = math.hypot(ahead, left), math.atan2(left, ahead)
    free, nearest, near_x, near_y, near_side = np.inf, np.inf, 0.0, 0.0, 0.0
    passing = 0.0
    for k in range(len(walls)):
        rate = cos * walls[k, 0] + sin * walls[k, 1]
        if rate > 1e-6:
            free = min(free, (walls[k, 2] - ROBOT_RADIUS - x * walls[k, 0] - y * walls[k, 1]) / rate)
    for k in range(len(radii)):
        there, aside = others[k, time, 0] - x, others[k, time, 1] - y
        there, aside = there * cos + aside * sin, aside * cos - there * sin
        wide = (radii[k] + (ROBOT_RADIUS + 0.01)) ** 2 - aside * aside
        if there > 0.0 and wide > 0.0:
            free = min(free, there - math.sqrt(wide))
        away, passed = math.hypot(there, aside), radii[k] + (ROBOT_RADIUS + _MARGIN)
        along, across = there * ahead + aside * left, aside * ahead - there * left
        if away < distance and away < nearest and along > 0.0 and abs(across) < passed * distance:
            nearest, near_x, near_y, near_side, passing = away, there, aside, across, passed
    heading = bearing
    if nearest < np.inf:
        side = 1.0 if near_side <= 0.0 else -1.0
        shift = side * passing / nearest
        past_x, past_y = near_x - near_y * shift, near_y + near_x * shift  # in base_link
        past_x, past_y = x + past_x * cos - past_y * sin, y + past_x * sin + past_y * cos
        for k in range(len(walls)):
            if walls[k, 2] - ROBOT_RADIUS - past_x * walls[k, 0] - past_y * walls[k, 1] < _WALL_MARGIN:
                side = -side
                break
        heading = _wrapped(math.atan2(near_y, near_x) + side * math.asin(min(1.0, passing / nearest)))
    speed = _RUSH
    if apart != 0.0:
        if in_view:
            heading = min(max(heading, bearing - _KEEP_VIEW), bearing + _KEEP_VIEW)
        missing = distance - apart
        if apart > _STOP:
            speed = min(max(1.5 * missing, -0.3), _RUSH)
        else:
            speed = 0.0 if missing <= 0.0 else min(_CRUISE, 0.1 + 0.9 * missing)
    if speed > 0.0:
        speed *= max(0.0, 1.0 - abs(heading) / _FULL_TURN)
    speed = min(speed, -0.15 if free < 0.04 else free * _BRAKE)
    turning = min(max(_STEER * heading, -_TURN), _TURN)
    if not in_view and apart < ROBOT_RADIUS:
        if math.isnan(yaw):
            if distance <= apart:
                turning = 0.0
        elif distance <= apart or (distance <= _TURN_AT_PLACE and abs(bearing) > _AHEAD):
            speed, turning = 0.0, min(max(_STEER * _wrapped(yaw - turned), -_TURN), _TURN)
    return speed, turning


@_compiled
def _wrapped(angle: float) -> float:
    return (angle + math.pi) % (2 * math.pi) - math.pi

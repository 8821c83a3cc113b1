"""Kinematics of a differential-drive base under commands, for many candidates at once, without contacts; named maneuvers.

Outside the packages, since simulation, forecast and control need the same formulas and do not import each other.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

PERIOD = 0.1        # s, between two decisions
MOTOR_LAG = 0.03    # s, time constant with which the robot follows a command
# For a robot that stands still, repeating the last frame is perfect: only frames after a command beyond one of these
# tell a good prediction from a bad one.
MOVING_V = 0.05  # [m/s]
MOVING_W = 0.1   # [rad/s]
_ACTIONS = {  # linear.x [m/s], angular.z [rad/s]
    'forward': (0.4, 0.0),
    'left': (0.3, 1.0),
    'right': (0.3, -1.0),
    'stop': (0.0, 0.0),
    'backward': (-0.2, 0.0),
}
MANEUVERS = tuple(_ACTIONS)


@dataclass(frozen=True)
class Limits:
    """Bounds of (linear.x, angular.z) in m/s and rad/s, and of their rates of change, per second. The defaults are those of
    the command gate and of the simulated robot."""

    low: tuple[float, float] = (-0.3, -1.5)
    high: tuple[float, float] = (0.6, 1.5)
    rate: tuple[float, float] = (1.5, 6.0)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lowest and highest command (2,), and how much a command may differ from that a PERIOD before (2,)."""
        return np.array(self.low), np.array(self.high), np.array(self.rate) * PERIOD


LIMITS = Limits()


def limited(targets: np.ndarray, previous: np.ndarray, limits: Limits = LIMITS) -> np.ndarray:
    """Return the commands (C, 2) nearest to ``targets`` that may follow ``previous`` (C, 2) a PERIOD later; as
    ``TwistLimiter``."""
    low, high, reach = limits.arrays
    # With few rows, numpy's clip takes longer than minimum and maximum.
    near = np.minimum(np.maximum(targets, previous - reach), previous + reach)
    return np.minimum(np.maximum(near, low), high)


def move(poses: np.ndarray, twists: np.ndarray, commands: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Return poses (C, 3) and twists (C, 2) after ``seconds`` under ``commands`` (C, 2)."""
    keep, lost = _lag(seconds)
    behind = twists - commands
    mean = commands + behind * lost * MOTOR_LAG / seconds
    return along_arc(poses, mean, seconds), commands + behind * keep


def along_arc(poses: np.ndarray, twists: np.ndarray, seconds: float) -> np.ndarray:
    """Return poses (C, 3), m and rad, after ``seconds`` with ``twists`` (C, 2), m/s and rad/s: exact for constant ones. Yaw is
    not wrapped."""
    turn = twists[:, 1] * seconds
    half = turn / 2
    heading = poses[:, 2] + half
    half[half == 0.0] = 1.0e-20  # sin(h) / h as in numpy's sinc, which is slow for few rows
    chord = twists[:, 0] * seconds * (np.sin(half) / half)
    moved = np.empty_like(poses)
    np.cos(heading, out=moved[:, 0])
    np.sin(heading, out=moved[:, 1])
    moved[:, :2] *= chord[:, None]
    moved[:, :2] += poses[:, :2]
    np.add(poses[:, 2], turn, out=moved[:, 2])
    return moved


def increments(poses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how far a robot went ahead [m] and turned left [rad] between poses (M + 1, 3) in the plane."""
    x, y, yaw = poses.T
    turned = np.remainder(np.diff(yaw) + np.pi, 2 * np.pi) - np.pi
    middle = yaw[:-1] + turned / 2
    return np.diff(x) * np.cos(middle) + np.diff(y) * np.sin(middle), turned


def twists_between(poses: np.ndarray, seconds: float) -> np.ndarray:
    """Return the constant twists (T, 2), m/s and rad/s, that lead from each of the poses (T + 1, 3) to the next one in
    ``seconds``, the inverse of ``along_arc``. A move to the side, which no such twist gives, is left out."""
    ahead, turned = increments(poses)
    return np.stack([ahead / np.sinc(turned / (2 * np.pi)), turned], 1) / seconds


@lru_cache(maxsize=64)
def _lag(seconds: float) -> tuple[float, float]:
    """Return the share of a deviation from the command that remains after ``seconds``, and the share that is gone."""
    keep = np.exp(-seconds / MOTOR_LAG)
    return keep, 1.0 - keep


def under_way(pose: np.ndarray, twist: np.ndarray, commands: list[tuple[float, np.ndarray]]
              ) -> tuple[np.ndarray, np.ndarray]:
    """Return pose (3,) and twist (2,) after commands (2,) that were already sent, each with its duration in s."""
    poses, twists = pose[None], twist[None]
    for seconds, command in commands:
        if seconds > 0.0:
            poses, twists = move(poses, twists, command[None], seconds)
    return poses[0], twists[0]


def maneuver(name: str, steps: int) -> np.ndarray:
    """
    Return the named sequence, float32 (steps, 2): linear.x [m/s], angular.z [rad/s].

    Raises ValueError for a name that is not in MANEUVERS and for less than one step.
    """
    if name not in _ACTIONS:
        raise ValueError(f'unknown maneuver {name!r}; use one of: {", ".join(MANEUVERS)}')
    if steps < 1:
        raise ValueError(f'a maneuver has at least one step, not {steps}')
    return np.tile(np.float32(_ACTIONS[name]), (steps, 1))


def path(actions: np.ndarray, step_period: float) -> np.ndarray:
    """
    Return the poses after each step, float32 (T, 3): x [m], y [m], yaw [rad, -pi to pi], in base_link at the
    start.

    ``actions`` is (T, 2), linear.x [m/s] and angular.z [rad/s], each held for ``step_period`` s. Within a step
    the base follows an arc: exact for constant velocities and an unconstrained differential drive.
    """
    poses = np.zeros((1, 3))
    found = [poses]
    for action in np.asarray(actions, np.float64).reshape(-1, 1, 2):
        poses = along_arc(poses, action, step_period)
        found.append(poses)
    led = np.concatenate(found)[1:]
    led[:, 2] = np.remainder(led[:, 2] + np.pi, 2 * np.pi) - np.pi
    return led.astype(np.float32)


def to_base(place: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Transform a point (2,) from the frame of a pose (3,) to base_link at that pose."""
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return np.array([[cos, sin], [-sin, cos]]) @ (place - pose[:2])


def from_base(points: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Transform points (..., 2) from base_link at a pose (3,) to the frame of the pose."""
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return points @ np.array([[cos, sin], [-sin, cos]]) + pose[:2]

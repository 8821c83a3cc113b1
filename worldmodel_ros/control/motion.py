"""How a differential-drive base moves under commands, for many candidates at once; no contacts."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

PERIOD = 0.1        # s, between two decisions
MOTOR_LAG = 0.03    # s, time constant with which the robot follows a command


@dataclass(frozen=True)
class Limits:
    """Bounds of (linear.x, angular.z) in m/s and rad/s, and how fast each may change, per second. The defaults are those of
    the command gate and of the simulated robot."""

    low: tuple[float, float] = (-0.3, -1.5)
    high: tuple[float, float] = (0.6, 1.5)
    rate: tuple[float, float] = (1.5, 6.0)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lowest and highest command (2,), and by how much one may differ from that of a PERIOD before (2,)."""
        return np.array(self.low), np.array(self.high), np.array(self.rate) * PERIOD


LIMITS = Limits()


def limited(targets: np.ndarray, previous: np.ndarray, limits: Limits = LIMITS) -> np.ndarray:
    """Return the commands (C, 2) nearest to ``targets`` that may follow ``previous`` (C, 2) a PERIOD later; as
    ``TwistLimiter``."""
    low, high, reach = limits.arrays
    # Of a few rows, numpy's clip takes longer than its two halves.
    near = np.minimum(np.maximum(targets, previous - reach), previous + reach)
    return np.minimum(np.maximum(near, low), high)


def move(poses: np.ndarray, twists: np.ndarray, commands: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Return poses (C, 3) and twists (C, 2) after ``seconds`` under ``commands`` (C, 2)."""
    keep, lost = _lag(seconds)
    behind = twists - commands
    mean = commands + behind * lost * MOTOR_LAG / seconds
    after = commands + behind * keep
    turn = mean[:, 1] * seconds
    half = np.pi * (turn / (2 * np.pi))
    half[half == 0.0] = np.pi * 1.0e-20  # sin(h) / h as numpy's sinc has it, which is slow for a few rows
    chord = mean[:, 0] * seconds * (np.sin(half) / half)
    heading = poses[:, 2] + turn / 2
    moved = np.empty_like(poses)
    moved[:, 0] = poses[:, 0] + chord * np.cos(heading)
    moved[:, 1] = poses[:, 1] + chord * np.sin(heading)
    moved[:, 2] = poses[:, 2] + turn
    return moved, after


@lru_cache(maxsize=64)
def _lag(seconds: float) -> tuple[float, float]:
    """Share of a deviation from the command that is left after ``seconds``, and the share that is gone."""
    keep = np.exp(-seconds / MOTOR_LAG)
    return keep, 1.0 - keep


def under_way(pose: np.ndarray, twist: np.ndarray, commands: list[tuple[float, np.ndarray]]
              ) -> tuple[np.ndarray, np.ndarray]:
    """Return pose (3,) and twist (2,) after commands (2,) that were sent already, each with the seconds that it holds."""
    poses, twists = pose[None], twist[None]
    for seconds, command in commands:
        if seconds > 0.0:
            poses, twists = move(poses, twists, command[None], seconds)
    return poses[0], twists[0]

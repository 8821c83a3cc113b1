"""How the robot moves under commands, for many candidates at once; no contacts."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.sim.world import LIMITS

PERIOD = 0.1        # s, between two decisions
MOTOR_LAG = 0.03    # s, time constant with which the robot follows a command
_LOW = np.array([LIMITS.v_min, -LIMITS.w_max])
_HIGH = np.array([LIMITS.v_max, LIMITS.w_max])
_RATE = np.array([LIMITS.a_max, LIMITS.alpha_max])


def limited(targets: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """Commands (C, 2) nearest to `targets` that may follow `previous` (C, 2) a PERIOD later, as `TwistLimiter` has it."""
    reach = _RATE * PERIOD
    return np.clip(np.clip(targets, previous - reach, previous + reach), _LOW, _HIGH)


def move(poses: np.ndarray, twists: np.ndarray, commands: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Poses (C, 3) and twists (C, 2) after `seconds` under `commands` (C, 2)."""
    keep = np.exp(-seconds / MOTOR_LAG)
    mean = commands + (twists - commands) * (1.0 - keep) * MOTOR_LAG / seconds
    after = commands + (twists - commands) * keep
    turn = mean[:, 1] * seconds
    chord = mean[:, 0] * seconds * np.sinc(turn / (2 * np.pi))
    heading = poses[:, 2] + turn / 2
    return np.stack([poses[:, 0] + chord * np.cos(heading), poses[:, 1] + chord * np.sin(heading),
                     poses[:, 2] + turn], 1), after


def under_way(pose: np.ndarray, twist: np.ndarray, commands: list[tuple[float, np.ndarray]]
              ) -> tuple[np.ndarray, np.ndarray]:
    """Pose (3,) and twist (2,) after commands (2,) that were sent already, each with the seconds that it holds."""
    poses, twists = pose[None], twist[None]
    for seconds, command in commands:
        if seconds > 0.0:
            poses, twists = move(poses, twists, command[None], seconds)
    return poses[0], twists[0]

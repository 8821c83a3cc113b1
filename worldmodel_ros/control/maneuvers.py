"""Named action sequences for a differential-drive base, and the path that an action sequence leads along."""
from __future__ import annotations

import numpy as np

_ACTIONS = {  # linear.x [m/s], angular.z [rad/s]
    'forward': (0.4, 0.0),
    'left': (0.3, 1.0),
    'right': (0.3, -1.0),
    'stop': (0.0, 0.0),
    'backward': (-0.2, 0.0),
}
NAMES = tuple(_ACTIONS)


def maneuver(name: str, steps: int) -> np.ndarray:
    """
    Return the named sequence, float32 (steps, 2): linear.x [m/s], angular.z [rad/s].

    Raises ValueError for a name that is not in NAMES and for less than one step.
    """
    if name not in _ACTIONS:
        raise ValueError(f'unknown maneuver {name!r}; use one of: {", ".join(NAMES)}')
    if steps < 1:
        raise ValueError(f'a maneuver has at least one step, not {steps}')
    return np.tile(np.float32(_ACTIONS[name]), (steps, 1))


def path(actions: np.ndarray, step_period: float) -> np.ndarray:
    """
    Return the poses after each step, float32 (T, 3): x [m], y [m], yaw [rad, -pi to pi], in base_link at the
    start.

    ``actions`` is (T, 2), linear.x [m/s] and angular.z [rad/s], each held for ``step_period`` s. Within a step
    the base follows an arc, which is exact for constant velocities and an unconstrained differential drive.
    """
    v, w = np.asarray(actions, np.float64).reshape(-1, 2).T
    turn = w * step_period
    yaw = np.cumsum(turn)
    # The chord of an arc: sinc makes a straight line of it where there is no turn.
    chord = v * step_period * np.sinc(turn / (2 * np.pi))
    heading = yaw - turn / 2
    x, y = np.cumsum(chord * np.cos(heading)), np.cumsum(chord * np.sin(heading))
    wrapped = np.remainder(yaw + np.pi, 2 * np.pi) - np.pi
    return np.stack([x, y, wrapped], 1).astype(np.float32)

"""Motion of a differential drive along arcs, which is exact for constant velocities.

Here, since what simulates, forecasts and decides needs the same formula, and these packages do not import each other.
"""
import numpy as np


def along_arc(poses: np.ndarray, twists: np.ndarray, seconds: float) -> np.ndarray:
    """Return poses (C, 3), m and rad, after ``seconds`` with ``twists`` (C, 2), m/s and rad/s. Yaw is not wrapped."""
    turn = twists[:, 1] * seconds
    half = turn / 2
    heading = poses[:, 2] + half
    half[half == 0.0] = 1.0e-20  # sin(h) / h as numpy's sinc has it, which is slow for a few rows
    chord = twists[:, 0] * seconds * (np.sin(half) / half)
    moved = np.empty_like(poses)
    np.cos(heading, out=moved[:, 0])
    np.sin(heading, out=moved[:, 1])
    moved[:, :2] *= chord[:, None]
    moved[:, :2] += poses[:, :2]
    np.add(poses[:, 2], turn, out=moved[:, 2])
    return moved

"""How near a predicted picture is to what came, and when that says something."""
from __future__ import annotations

import numpy as np

PSNR_CAP_DB = 60.0  # identical pictures would be infinitely good and spoil every mean
# With a robot that stands still, copying the last frame is perfect: only a frame that a command beyond one of these led to
# tells a good prediction from a bad one.
MOVING_V = 0.05  # [m/s]
MOVING_W = 0.1   # [rad/s]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of uint8 pictures [dB], at most PSNR_CAP_DB; ValueError if shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f'cannot compare pictures of shapes {a.shape} and {b.shape}')
    mse = float(np.mean(np.square(a.astype(np.float32) - b.astype(np.float32))))
    if mse == 0.0:
        return PSNR_CAP_DB
    return min(PSNR_CAP_DB, 10.0 * float(np.log10(255.0 ** 2 / mse)))


def is_moving(v: float, w: float) -> bool:
    """Whether a command (m/s, rad/s) moves the robot enough to judge the prediction of what follows."""
    return abs(v) > MOVING_V or abs(w) > MOVING_W

"""Image metrics: how near a prediction is to the ground truth, and when that is informative; sharpness, motion."""
from __future__ import annotations

import cv2
import numpy as np

from worldmodel_ros.motion import MOVING_V, MOVING_W

PSNR_CAP_DB = 60.0  # identical images would have an infinite PSNR and spoil every mean

# The constants of Wang et al. (2004), which every published SSIM uses.
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * 255.0) ** 2, (0.03 * 255.0) ** 2


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of uint8 images [dB], at most PSNR_CAP_DB; ValueError if shapes differ."""
    _require_same_shape(a, b)
    mse = float(np.mean(np.square(a.astype(np.float32) - b.astype(np.float32))))
    if mse == 0.0:
        return PSNR_CAP_DB
    return min(PSNR_CAP_DB, 10.0 * float(np.log10(255.0 ** 2 / mse)))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean structural similarity of uint8 images (H, W) or (H, W, C), -1 to 1; 1 only for identical ones.

    Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural similarity",
    IEEE Transactions on Image Processing 13(4), 2004: a Gaussian window of 11 x 11 pixels and sigma 1.5, population
    moments, only where the window is inside the image; the mean over the channels. ValueError if shapes differ or
    a side has less than 11 pixels.
    """
    _require_same_shape(a, b)
    height, width = a.shape[:2]
    if min(height, width) < _WINDOW:
        raise ValueError(f'SSIM needs images of at least {_WINDOW} x {_WINDOW} pixels, not {width} x {height}')
    x, y = (np.asarray(p, np.float64).reshape(height, width, -1) for p in (a, b))
    # One filter call over all moments and channels: the variances are differences, hence float64.
    moments = cv2.GaussianBlur(np.concatenate([x, y, x * x, y * y, x * y], 2), (_WINDOW, _WINDOW), _SIGMA)
    margin = _WINDOW // 2
    mx, my, xx, yy, xy = np.split(moments[margin:-margin, margin:-margin], 5, 2)
    numerator = (2.0 * mx * my + _C1) * (2.0 * (xy - mx * my) + _C2)
    denominator = (mx * mx + my * my + _C1) * (xx - mx * mx + yy - my * my + _C2)
    return float(np.mean(numerator / denominator))


def sharpness(picture: np.ndarray) -> float:
    """Return the variance of the Laplacian of the grey values of uint8 (H, W, 3), which blur lowers (Pech-Pacheco et al.,
    "Diatom autofocusing in brightfield microscopy: a comparative study", 2000)."""
    return float(cv2.Laplacian(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY).astype(np.float32), cv2.CV_32F).var())


def rms(a: np.ndarray, b: np.ndarray) -> float:
    """Return the root mean square difference of uint8 images of one shape, 0 to 255."""
    return float(np.sqrt(np.mean(np.square(a.astype(np.float32) - b))))


def shift(before: np.ndarray, after: np.ndarray) -> float:
    """Return the pixels that grey images float32 (H, W) moved to the right (Kuglin and Hines, "The phase correlation image
    alignment method", 1975)."""
    window = cv2.createHanningWindow(before.shape[::-1], cv2.CV_32F)
    return cv2.phaseCorrelate(before, after, window)[0][0]


def is_moving(v: float, w: float) -> bool:
    """Return whether a command (m/s, rad/s) moves the robot enough to judge the prediction of what follows."""
    return abs(v) > MOVING_V or abs(w) > MOVING_W


def _require_same_shape(a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise ValueError(f'cannot compare images of shapes {a.shape} and {b.shape}')

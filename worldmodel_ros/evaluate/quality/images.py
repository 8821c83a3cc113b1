"""Measures of pictures beside those that every evaluation shares (evaluate.pictures)."""
from __future__ import annotations

import cv2
import numpy as np


def sharpness(picture: np.ndarray) -> float:
    """Variance of the Laplacian of the grey values of uint8 (H, W, 3), which blur takes away (Pech-Pacheco et al.,
    "Diatom autofocusing in brightfield microscopy: a comparative study", 2000)."""
    return float(cv2.Laplacian(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY).astype(np.float32), cv2.CV_32F).var())


def rms(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square difference of uint8 pictures of one shape, 0 to 255."""
    return float(np.sqrt(np.mean(np.square(a.astype(np.float32) - b))))


def shift(before: np.ndarray, after: np.ndarray) -> float:
    """Pixels that grey pictures float32 (H, W) moved to the right (Kuglin and Hines, "The phase correlation image
    alignment method", 1975)."""
    window = cv2.createHanningWindow(before.shape[::-1], cv2.CV_32F)
    return cv2.phaseCorrelate(before, after, window)[0][0]

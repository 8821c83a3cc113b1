"""Decoding, comparing and enlarging the small pictures of the demo."""
from __future__ import annotations

import cv2
import numpy as np

PSNR_CAP_DB = 60.0  # identical pictures would be infinitely good and spoil every mean


def decode_rgb(encoded: bytes) -> np.ndarray:
    """Decode a JPEG or PNG to (H, W, 3) uint8 RGB; raises ValueError when it is no picture."""
    picture = None
    if encoded:
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError(f'{len(encoded)} bytes are no JPEG or PNG picture')
    return np.ascontiguousarray(picture[:, :, ::-1])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of uint8 pictures [dB], at most PSNR_CAP_DB; ValueError if shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f'cannot compare pictures of shapes {a.shape} and {b.shape}')
    mse = float(np.mean(np.square(a.astype(np.float32) - b.astype(np.float32))))
    if mse == 0.0:
        return PSNR_CAP_DB
    return min(PSNR_CAP_DB, 10.0 * float(np.log10(255.0 ** 2 / mse)))


def enlarge(picture: np.ndarray, factor: int) -> np.ndarray:
    """Repeat every pixel `factor` times both ways: small pictures are to show their pixels, not a blur."""
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)

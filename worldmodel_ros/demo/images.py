"""Decoding and enlarging the demo's small images."""
from __future__ import annotations

import cv2
import numpy as np


def decode_rgb(encoded: bytes) -> np.ndarray:
    """Decode a JPEG or PNG to (H, W, 3) uint8 RGB. Raises ValueError if it is not an image."""
    picture = None
    if encoded:
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError(f'{len(encoded)} bytes are no JPEG or PNG picture')
    return np.ascontiguousarray(picture[:, :, ::-1])


def enlarge(picture: np.ndarray, factor: int) -> np.ndarray:
    """Enlarge by repeating every pixel ``factor`` times in both directions, so that small images show pixels, not a blur."""
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)

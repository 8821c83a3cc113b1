"""Decoding and enlarging the small pictures of the demo."""
from __future__ import annotations

import cv2
import numpy as np


def decode_rgb(encoded: bytes) -> np.ndarray:
    """Decode a JPEG or PNG to (H, W, 3) uint8 RGB; raises ValueError when it is no picture."""
    picture = None
    if encoded:
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise ValueError(f'{len(encoded)} bytes are no JPEG or PNG picture')
    return np.ascontiguousarray(picture[:, :, ::-1])


def enlarge(picture: np.ndarray, factor: int) -> np.ndarray:
    """Repeat every pixel ``factor`` times both ways: small pictures are to show their pixels, not a blur."""
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)

"""The order in which the DiT has the tokens of a frame."""
from __future__ import annotations

import numpy as np

from ..cache.layout import TileLayout
from .presets import Preset


def token_order(preset: Preset) -> np.ndarray | None:
    """Which token of a frame, counted row by row, each of the DiT's is: int64 (tokens,), tile by tile in Z-order for a
    preset with tiles; None where they are counted row by row, too."""
    return None if preset.tile is None else TileLayout(preset.tile, preset.grid).frame_order

"""Where tokens are: their order in a frame, and the phases of the 3-D rotary embedding, which a session computes for every
pass, without torch."""
from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ..cache.layout import TileLayout
from .presets import VideoPreset

# Longest wavelengths, in frames and in tokens: a few times what one window and one image span.
TIME_WAVELENGTH = 200.0
SPACE_WAVELENGTH = 32.0


def rotary_angles(preset: VideoPreset, times: np.ndarray) -> np.ndarray:
    """Cosines and sines of the 3-D rotary embedding (axial RoPE, Su et al. 2021), float32 (2, T, P, head_dim / 2).

    ``times`` (T,) are absolute frame numbers of a session. Only differences of positions reach the attention, so a
    session may run for hours: the phases are reduced in float64, and stay exact where float32 would have drifted.
    """
    time, space = time_rotation(preset, times), space_rotation(preset)
    shape = (2, len(time[0]), preset.tokens)
    return np.concatenate([np.broadcast_to(time[:, :, None], (*shape, time.shape[-1])),
                           np.broadcast_to(space[:, None], (*shape, space.shape[-1]))], -1)


def time_rotation(preset: VideoPreset, times: np.ndarray) -> np.ndarray:
    """The pairs of ``rotary_angles`` that differ from frame to frame, which come first: float32 (2, T, pairs)."""
    return _rotation(np.asarray(times, np.float64), _split(preset)[0], TIME_WAVELENGTH)


def shift_in_time(preset: VideoPreset, frames: int) -> np.ndarray:
    """Cosines and sines that move what is rotated already by so many frames: float32 (2, 1, head_dim / 2)."""
    time = time_rotation(preset, np.array([frames]))
    stays = np.zeros((2, 1, preset.head_dim // 2 - time.shape[-1]), np.float32)
    stays[0] = 1.0
    return np.concatenate([time, stays], -1)


@lru_cache(maxsize=8)
def space_rotation(preset: VideoPreset) -> np.ndarray:
    """The other pairs, which differ from token to token: float32 (2, P, pairs), tokens in the DiT's order; not to be
    written to."""
    order = token_order(preset)
    rows, columns = np.divmod(np.arange(preset.tokens) if order is None else order, preset.grid[1])
    count = _split(preset)[1]
    return np.concatenate([_rotation(axis, count, SPACE_WAVELENGTH) for axis in (rows, columns)], -1)


def token_order(preset: VideoPreset) -> np.ndarray | None:
    """Which token of a frame, counted row by row, each of the DiT's is: int64 (tokens,), tile by tile in Z-order for a
    preset with tiles; None where they are counted row by row, too."""
    return None if preset.tile is None else TileLayout(preset.tile, preset.grid).frame_order


def _split(preset: VideoPreset) -> tuple[int, int]:
    """Pairs for time, and for each axis of space."""
    pairs = preset.head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3


def _rotation(position: np.ndarray, count: int, wavelength: float) -> np.ndarray:
    # Wavelengths from 4 positions up, so that neighbours never alias.
    wave = 4.0 * (wavelength / 4.0) ** (np.arange(count) / max(count - 1, 1))
    phase = np.remainder(position[..., None] / wave, 1.0) * (2.0 * math.pi)
    return np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)

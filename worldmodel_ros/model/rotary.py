"""Token order in a frame, and phases of the 3-D rotary embedding, which a session computes for every pass without torch.

In a preset with ``heading_pairs``, some pairs rotate with the robot's heading instead of time, the n-th by n times the heading
that its actions give, so that attention finds the frames of a window that looked the same way. From times alone it would have
to add up all turns since each of them.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..cache.layout import TileLayout
from ..motion import along_arc
from .presets import Preset, VideoPreset

# Longest wavelengths, in frames and in tokens: a few times what one window and one image span.
TIME_WAVELENGTH = 200.0
SPACE_WAVELENGTH = 32.0


def rotary_angles(preset: VideoPreset, times: np.ndarray) -> np.ndarray:
    """Return cosines and sines of the 3-D rotary embedding (axial RoPE, Su et al. 2021), float32 (2, T, P, head_dim / 2).

    ``times`` (T,) are absolute frame numbers of a session. Only differences of positions reach the attention, so a session may
    run for hours: phases are reduced in float64, and stay exact where float32 would have drifted.
    """
    time, space = time_rotation(preset, times), space_rotation(preset)
    heading = np.broadcast_to(heading_rotation(preset, 0.0), (2, len(time[0]), preset.heading_pairs))
    time = np.concatenate([time, heading], -1)
    shape = (2, len(time[0]), preset.tokens)
    return np.concatenate([np.broadcast_to(time[:, :, None], (*shape, time.shape[-1])),
                           np.broadcast_to(space[:, None], (*shape, space.shape[-1]))], -1)


def time_rotation(preset: VideoPreset, times: np.ndarray) -> np.ndarray:
    """Return the pairs of ``rotary_angles`` that rotate with time, which come first: float32 (2, T, pairs)."""
    return _rotation(np.asarray(times, np.float64), _split(preset)[0], TIME_WAVELENGTH)


def heading_rotation(preset: VideoPreset, heading: float) -> np.ndarray:
    """Return a frame's pairs that rotate with the robot's heading, after those of time: float32 (2, 1, heading_pairs)."""
    phase = heading * np.arange(1, preset.heading_pairs + 1)[None]
    return np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)


def heading_after(preset: Preset, heading: float, actions: np.ndarray) -> float:
    """Return the heading [rad] after actions (T, A), in [0, 2 pi), rounded to float32 as in a saved session."""
    return float(np.float32((heading + preset.step_period * float(np.sum(actions[:, preset.turn]))) % (2.0 * math.pi)))


def poses_along(preset: Preset, actions: np.ndarray, start: Sequence[float] = (0.0, 0.0, 0.0)) -> np.ndarray:
    """Return x, y [m] and heading [rad] after each of the actions (T, A) of a robot at ``start``: float64 (T, 3)."""
    twists = actions[:, [preset.forward, preset.turn]].astype(np.float64)
    heading = start[2] + preset.step_period * twists[:, 1].cumsum()
    begun = np.zeros((len(twists), 3))
    begun[:, 2] = np.concatenate([[start[2]], heading[:-1]])
    steps = along_arc(begun, twists, preset.step_period)
    return np.concatenate([np.asarray(start[:2]) + steps[:, :2].cumsum(0), heading[:, None]], 1)


def shift_in_time(preset: VideoPreset, frames: int) -> np.ndarray:
    """Return cosines and sines that move already rotated vectors by ``frames``: float32 (2, 1, head_dim / 2)."""
    time = time_rotation(preset, np.array([frames]))
    stays = np.zeros((2, 1, preset.head_dim // 2 - time.shape[-1]), np.float32)
    stays[0] = 1.0
    return np.concatenate([time, stays], -1)


@lru_cache(maxsize=8)
def space_rotation(preset: VideoPreset) -> np.ndarray:
    """Return the spatial pairs, which differ from token to token: float32 (2, P, pairs), tokens in the DiT's order. The
    array is cached: do not write to it."""
    order = token_order(preset)
    rows, columns = np.divmod(np.arange(preset.tokens) if order is None else order, preset.grid[1])
    count = _split(preset)[1]
    return np.concatenate([_rotation(axis, count, SPACE_WAVELENGTH) for axis in (rows, columns)], -1)


def token_order(preset: VideoPreset) -> np.ndarray | None:
    """Return the row-major index in the frame of each of the DiT's tokens: int64 (tokens,), tile by tile in Z-order for a
    preset with tiles; None if they are in row-major order, too."""
    return None if preset.tile is None else TileLayout(preset.tile, preset.grid).frame_order


def _split(preset: VideoPreset) -> tuple[int, int]:
    """Return the number of pairs for time, without those for the heading, and for each axis of space."""
    pairs = preset.head_dim // 2
    return pairs - 2 * (pairs // 3) - preset.heading_pairs, pairs // 3


@lru_cache(maxsize=8)
def _waves(count: int, wavelength: float) -> np.ndarray:
    # Wavelengths from 4 positions up, so that neighbours never alias.
    return 4.0 * (wavelength / 4.0) ** (np.arange(count) / max(count - 1, 1))


def _rotation(position: np.ndarray, count: int, wavelength: float) -> np.ndarray:
    phase = np.remainder(position[..., None] / _waves(count, wavelength), 1.0) * (2.0 * math.pi)
    return np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)

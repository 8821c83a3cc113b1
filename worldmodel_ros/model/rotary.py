"""Phases of the 3-D rotary embedding, computed without torch: a session makes them for every pass."""
from __future__ import annotations

import math

import numpy as np

from .presets import Preset

# Longest wavelengths, in frames and in tokens: a few times what one window and one picture span.
TIME_WAVELENGTH = 200.0
SPACE_WAVELENGTH = 32.0


def rotary_angles(preset: Preset, times: np.ndarray) -> np.ndarray:
    """Cosines and sines of the 3-D rotary embedding (axial RoPE, Su et al. 2021), float32 (2, T, P, head_dim / 2).

    ``times`` (T,) are absolute frame numbers of a session. Only differences of positions reach the attention, so a
    session may run for hours: the phases are reduced in float64, and stay exact where float32 would have drifted.
    """
    pairs = preset.head_dim // 2
    space = pairs // 3
    split = (pairs - 2 * space, space, space)
    rows, columns = np.divmod(np.arange(preset.tokens), preset.grid[1])
    times = np.asarray(times, np.float64)
    angles = []
    for count, wavelength, position in zip(
            split, (TIME_WAVELENGTH, SPACE_WAVELENGTH, SPACE_WAVELENGTH),
            (np.repeat(times[:, None], preset.tokens, 1), np.broadcast_to(rows, (len(times), preset.tokens)),
             np.broadcast_to(columns, (len(times), preset.tokens)))):
        # Wavelengths from 4 positions up, so that neighbours never alias.
        wave = 4.0 * (wavelength / 4.0) ** (np.arange(count) / max(count - 1, 1))
        angles.append(np.remainder(position[..., None] / wave, 1.0) * (2.0 * math.pi))
    phase = np.concatenate(angles, -1)
    return np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)

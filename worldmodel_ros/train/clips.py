"""Layout of a training sequence: clean frames first, then noisy chunks, under one mask between frames.

The clean frames are what a session commits; a noisy chunk sees the window before it and itself, exactly as at run time.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.presets import Preset
from ..model.rotary import rotary_angles

BLOCKED = float('-inf')


def draw_starts(preset: Preset, frames: int, chunks: int, rng: np.random.Generator) -> np.ndarray:
    """First frames of the noisy chunks, at least one observed frame before each."""
    return rng.integers(1, frames - preset.chunk_frames + 1, chunks)


def chunk_frames(preset: Preset, starts: np.ndarray) -> np.ndarray:
    """Frame numbers of all noisy frames (chunks * K,)."""
    return (starts[:, None] + np.arange(preset.chunk_frames)).reshape(-1)


def clean_bias(preset: Preset, frames: int) -> np.ndarray:
    """Mask (F, F) of committed frames: each sees itself and the window before it."""
    t = np.arange(frames)
    age = t[:, None] - t[None]
    return np.where((age >= 0) & (age <= preset.window_frames), 0.0, BLOCKED)


def noisy_bias(preset: Preset, frames: int, starts: np.ndarray) -> np.ndarray:
    """Mask (chunks * K, F + chunks * K) of the noisy chunks: the window before each, and itself."""
    k = preset.chunk_frames
    first = np.repeat(starts, k)[:, None]
    t = np.arange(frames)[None]
    window = (t < first) & (t >= first - preset.window_frames)
    chunk = np.repeat(np.arange(len(starts)), k)
    return np.where(np.concatenate([window, chunk[:, None] == chunk[None]], 1), 0.0, BLOCKED)


def sequence_bias(preset: Preset, frames: int, starts: np.ndarray) -> np.ndarray:
    """Mask between all frames of the sequence; clean frames never see noisy ones."""
    noisy = noisy_bias(preset, frames, starts)
    clean = np.concatenate([clean_bias(preset, frames), np.full((frames, len(noisy)), BLOCKED)], 1)
    return np.concatenate([clean, noisy])


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device, non_blocking=True)


def rotary(preset: Preset, times: np.ndarray, device: torch.device) -> Tensor:
    return on_device(rotary_angles(preset, times), device)

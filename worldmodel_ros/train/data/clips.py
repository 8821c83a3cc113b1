"""Layout of a training sequence: clean frames first, then noisy chunks, under one mask between frames.

The clean frames are what a session commits; a noisy chunk sees the window before it and itself, exactly as at run time.
"""
from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rollout import BLOCKED, frame_mask
from worldmodel_ros.model.rotary import rotary_angles


def draw_starts(preset: Preset, frames: int, chunks: int, rng: np.random.Generator, full_windows: float = 0.0
                ) -> np.ndarray:
    """First frames of the noisy chunks, at least one frame before each; a share of them has a full window before it,
    where the clip is long enough."""
    last = frames - preset.chunk_frames
    starts = rng.integers(1, last + 1, chunks)
    if last >= preset.window_frames:
        full = round(full_windows * chunks)
        starts[:full] = rng.integers(preset.window_frames, last + 1, full)
    return starts


def chunk_frames(preset: Preset, starts: np.ndarray) -> np.ndarray:
    """Frame numbers of all noisy frames (chunks * K,)."""
    return (starts[:, None] + np.arange(preset.chunk_frames)).reshape(-1)


def noisy_bias(preset: Preset, frames: int, starts: np.ndarray, blind: bool = False) -> np.ndarray:
    """Mask (chunks * K, F + chunks * K) of the noisy chunks: the window before each, and itself; the last one sees only
    itself where it is ``blind``."""
    k = preset.chunk_frames
    first = np.repeat(starts, k)[:, None]
    t = np.arange(frames)[None]
    window = (t < first) & (t >= first - preset.window_frames)
    window[len(window) - k * blind:] = False
    chunk = np.repeat(np.arange(len(starts)), k)
    return np.where(np.concatenate([window, chunk[:, None] == chunk[None]], 1), 0.0, BLOCKED)


def sequence_bias(preset: Preset, frames: int, starts: np.ndarray, blind: bool = False) -> np.ndarray:
    """Mask between all frames of the sequence; clean frames never see noisy ones."""
    noisy = noisy_bias(preset, frames, starts, blind)
    clean = np.concatenate([frame_mask(preset, 0, frames, committed=True), np.full((frames, len(noisy)), BLOCKED)], 1)
    return np.concatenate([clean, noisy])


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device, non_blocking=True)


def rotary(preset: Preset, times: np.ndarray, device: torch.device) -> Tensor:
    """Phases of frames at ``times``, small integers. Only their numbers go to the device: copying the phases themselves
    with every pass would make the host wait for it."""
    length = 1 << int(max(times)).bit_length()
    return _rotary_table(preset, length, device)[:, torch.from_numpy(np.asarray(times, np.int64)).to(device)]


@lru_cache(maxsize=8)
def _rotary_table(preset: Preset, length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the caller's mode
        return on_device(rotary_angles(preset, np.arange(length)), device)

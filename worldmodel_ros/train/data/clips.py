"""Layout of a training sequence: clean frames first, then noisy chunks, under one mask between frames.

The clean frames are what a session commits; a noisy chunk sees the window before it and itself, exactly as at run time. For a
preset with tiles there is one mask per pattern instead (``model.tile_mask``), and clean frames have their session's numbers:
its sinks stay, however long ago they were seen.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rollout import BLOCKED, frame_mask
from worldmodel_ros.model.rotary import space_rotation, time_rotation
from worldmodel_ros.model.tile_mask import FrameOrder, TileMask, chunk_sees, commit_frames, plane_tiles

Mask = Tensor | list[TileMask]  # what ``DiT.forward`` takes


def draw_starts(preset: Preset, frames: int, chunks: int, rng: np.random.Generator, full_windows: float = 0.0, first: int = 1
                ) -> np.ndarray:
    """Draw the first frames of the noisy chunks, each with at least ``first`` frames before it; a share ``full_windows`` has a
    full window before it, if the clip is long enough."""
    last, filled = frames - preset.chunk_frames, first - 1 + preset.window_frames
    starts = rng.integers(first, last + 1, chunks)
    if last >= filled:
        full = round(full_windows * chunks)
        starts[:full] = rng.integers(filled, last + 1, full)
    return starts


def chunk_frames(preset: Preset, starts: np.ndarray) -> np.ndarray:
    """Return the frame numbers of all noisy frames (chunks * K,)."""
    return (starts[:, None] + np.arange(preset.chunk_frames)).reshape(-1)


def noisy_bias(preset: Preset, frames: int, starts: np.ndarray, blind: bool = False) -> np.ndarray:
    """Return the mask (chunks * K, F + chunks * K) of the noisy chunks: each sees the window before it and itself, the last
    one only itself if ``blind``."""
    k = preset.chunk_frames
    first = np.repeat(starts, k)[:, None]
    t = np.arange(frames)[None]
    window = (t < first) & (t >= first - preset.window_frames)
    window[len(window) - k * blind:] = False
    chunk = np.repeat(np.arange(len(starts)), k)
    return np.where(np.concatenate([window, chunk[:, None] == chunk[None]], 1), 0.0, BLOCKED)


def sequence_bias(preset: Preset, frames: int, starts: np.ndarray, blind: bool = False) -> np.ndarray:
    """Return the mask between all frames of the sequence; clean frames never see noisy ones."""
    noisy = noisy_bias(preset, frames, starts, blind)
    clean = np.concatenate([frame_mask(preset, 0, frames, committed=True), np.full((frames, len(noisy)), BLOCKED)], 1)
    return np.concatenate([clean, noisy])


def committed_mask(preset: Preset, times: np.ndarray, device: torch.device, until: np.ndarray | None = None) -> Mask:
    """Return the mask of clean frames at ``times``, each committed after those before it; ``until``: see ``FrameOrder``."""
    if preset.tile is None:
        return on_device(frame_mask(preset, 0, len(times), committed=True), device)
    order = FrameOrder.committed(preset, times, until)
    return _of_layers(preset, device, lambda slabs: commit_frames(preset, order, slabs))


def noisy_mask(preset: Preset, times: np.ndarray, starts: np.ndarray, device: torch.device, blind: bool = False,
               until: np.ndarray | None = None) -> Mask:
    """Return the mask of ``noisy_bias``, after clean frames at ``times``."""
    if preset.tile is None:
        return on_device(noisy_bias(preset, len(times), starts, blind), device)
    return _of_layers(preset, device, lambda slabs: _noisy_frames(preset, times, starts, slabs, blind, until))


def sequence_mask(preset: Preset, times: np.ndarray, starts: np.ndarray, device: torch.device, blind: bool = False,
                  until: np.ndarray | None = None) -> Mask:
    """Return the mask of ``sequence_bias``, of clean frames at ``times`` and the chunks after them."""
    if preset.tile is None:
        return on_device(sequence_bias(preset, len(times), starts, blind), device)
    order, f = FrameOrder.committed(preset, times, until), len(times)

    def frames(slabs: int) -> np.ndarray:
        noisy = _noisy_frames(preset, times, starts, slabs, blind, until)
        clean = np.concatenate([commit_frames(preset, order, slabs), np.zeros((f, len(noisy)), bool)], 1)
        return np.concatenate([clean, noisy])

    return _of_layers(preset, device, frames)


def _noisy_frames(preset: Preset, times: np.ndarray, starts: np.ndarray, slabs: int, blind: bool, until: np.ndarray | None
                  ) -> np.ndarray:
    """What ``noisy_bias`` lets through within a neighbourhood of ``slabs``: bool (chunks * K, F + chunks * K)."""
    k, f, before = preset.chunk_frames, len(times), FrameOrder.committed(preset, times, until)
    seen = np.zeros((k * len(starts), f + k * len(starts)), bool)
    for number, start in enumerate(starts):
        rows = slice(number * k, (number + 1) * k)
        sees = chunk_sees(preset, before, FrameOrder.chunk(preset, times[start - 1] + 1 + np.arange(k)), slabs)
        seen[rows, :f], seen[rows, f + rows.start:f + rows.stop] = sees[:, :f], sees[:, f:]
    if blind:
        seen[-k:, :f] = False
    return seen


def _of_layers(preset: Preset, device: torch.device, frames: Callable[[int], np.ndarray]) -> list[TileMask]:
    """One mask per cache layer, from ``frames`` of its pattern's slabs; layers of one pattern share it."""
    masks = {pattern: TileMask(preset, torch.from_numpy(frames(pattern[0])).to(device, non_blocking=True),
                               plane_tiles(preset, *(size or 1 << 20 for size in pattern[1:])))
             for pattern in dict.fromkeys(preset.patterns)}
    return [masks[preset.patterns[layer % len(preset.patterns)]] for layer in range(len(preset.cache_layers))]


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device, non_blocking=True)


def rotary(preset: Preset, times: np.ndarray, headings: Tensor) -> Tensor:
    """Return the rotary phases of frames at integer ``times`` (T,), of B clips with robot ``headings`` (B, T) [rad]: float32
    (2, B, T, P, d / 2), or (2, T, P, d / 2) for a preset without heading pairs. Only frame numbers go to the device: copying
    the phases themselves with every pass would make the host wait for it."""
    device, length = headings.device, 1 << int(max(times)).bit_length()
    time, space = _rotary_tables(preset, length, device)
    time = time[:, indices(times, device)]
    if preset.heading_pairs:
        angle = headings[..., None] * torch.arange(1, preset.heading_pairs + 1, device=device)
        time = time[:, None].expand(-1, len(headings), -1, -1)
        time = torch.cat([time, torch.stack([angle.cos(), angle.sin()])], -1)
    shape = *time.shape[:-1], preset.tokens
    return torch.cat([time[..., None, :].expand(*shape, -1), space.view(2, *(1,) * (len(shape) - 2), *space.shape[1:]).expand(
        *shape, -1)], -1)


def indices(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy integers to the device without waiting for the work queued there."""
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def headings(preset: Preset, actions: Tensor) -> Tensor:
    """Return the heading [rad] (..., T) after each executed action (..., T, A) of a session; zeros for a preset that does not
    use it."""
    if not preset.heading_pairs:
        return torch.zeros(actions.shape[:-1], device=actions.device)
    return (actions[..., preset.turn] * preset.step_period).cumsum(-1)


@lru_cache(maxsize=8)
def _rotary_tables(preset: Preset, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Phases of frame numbers below ``length``, (2, length, pairs), and of a frame's tokens, (2, P, pairs)."""
    with torch.inference_mode(False):  # it outlives the caller's mode
        return on_device(time_rotation(preset, np.arange(length)), device), on_device(space_rotation(preset), device)

"""The attention window of one session: keys and values of its newest frames, in a ring.

A frame is written once, into the slot of the oldest one, and is never moved. Keys are stored rotated to their absolute
time; the attention sees differences of times only, so the window works at any age of the session.
"""
from __future__ import annotations

import numpy as np

from ..model.presets import Preset

BLOCKED = np.float32(-1e9)  # finite, so that a row that is blocked everywhere gives numbers instead of NaN


class WindowCache:
    """k and v are float32 (layers, 1, heads, W, tokens, head_dim); times int64 (W,) is -1 where a slot is empty."""

    def __init__(self, preset: Preset):
        shape = (preset.depth, 1, preset.heads, preset.window_frames, preset.tokens, preset.head_dim)
        self.k = np.zeros(shape, np.float32)
        self.v = np.zeros(shape, np.float32)
        self.times = np.full(preset.window_frames, -1, np.int64)

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as the DiT reads them, (layers, 1, heads, W * tokens, head_dim); views, not copies."""
        layers, batch, heads, frames, tokens, dim = self.k.shape
        return (self.k.reshape(layers, batch, heads, frames * tokens, dim),
                self.v.reshape(layers, batch, heads, frames * tokens, dim))

    def write(self, k: np.ndarray, v: np.ndarray, times: np.ndarray) -> None:
        """Stores T frames, (layers, 1, heads, T * tokens, head_dim) each, over the oldest slots."""
        tokens = self.k.shape[4]
        for index, time in enumerate(times):
            slot = int(time) % len(self.times)
            part = slice(index * tokens, (index + 1) * tokens)
            self.k[:, :, :, slot] = k[:, :, :, part]
            self.v[:, :, :, slot] = v[:, :, :, part]
            self.times[slot] = time

    def bias(self, times: np.ndarray, causal: bool) -> np.ndarray:
        """Additive mask (T, W + T) of a block at ``times``: which slots and which of its own frames a frame sees."""
        window = np.where(self.times < 0, BLOCKED, np.float32(0.0))
        # A frame of a longer block no longer sees what a later session, committing frame by frame, would have evicted.
        old = times[:, None] - self.times[None] > len(self.times) if causal else np.zeros((len(times), 1), bool)
        own = np.where(times[:, None] < times[None], BLOCKED, np.float32(0.0)) if causal \
            else np.zeros((len(times), len(times)), np.float32)
        return np.concatenate([np.where(old, BLOCKED, window[None]), own], 1).astype(np.float32)

    def fork(self) -> WindowCache:
        """A copy that shares nothing: what is written to one is not seen by the other."""
        copy = object.__new__(WindowCache)
        copy.k, copy.v, copy.times = self.k.copy(), self.v.copy(), self.times.copy()
        return copy

    def clear(self) -> None:
        self.times[:] = -1
        # A masked slot is still multiplied by zero, and zero times a NaN that was committed would be NaN for ever.
        self.k[:] = 0.0
        self.v[:] = 0.0

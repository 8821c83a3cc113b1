"""
Dense autoregressive rollout: chunk after chunk for many streams in one batch, with keys and values as plain tensors.

A session makes the same passes for one robot at a time, through a back end and on pages (``engine.sampler``). Training and
evaluation need no pages and roll out hundreds of streams at once, and a 32-step teacher takes more than four hundred passes for
five seconds. A test compares both with a session.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .dit import DiT, rotate
from .presets import Preset
from .rotary import rotary_angles, shift_in_time
from .sampling import FLOW, Steps, adain

BLOCKED = float('-inf')


@dataclass(frozen=True)
class Streams:
    """
    What B streams have committed up to frame ``newest``: keys and values (L, B, H, n * P, d) of the last n frames.

    latent (B, h, w, Z), of the newest frame; observed: the newest frame that was observed, not predicted; sinks: those of
    ``Rollout.sinks``, or () for a plain rolling window.
    """

    newest: int
    keys: Tensor
    values: Tensor
    latent: Tensor
    observed: int
    sinks: tuple[Tensor, ...]


AnyStreams = TypeVar('AnyStreams', bound=Streams)
# Maps a chunk z, its predicted clean latents, the step's index and the chunk's place in the rollout to z after the step.
Update = Callable[[Tensor, Tensor, int, slice], Tensor]


class Rollout:
    """The passes of one DiT. Gradients, autocast and inference mode are the caller's choice."""

    def __init__(self, dit: DiT) -> None:
        self.dit, self.preset = dit, dit.preset
        self._masks: dict[tuple[int, int, bool], Tensor] = {}  # one per pass would make the host slower than a GPU

    def observe(self, latents: Tensor, actions: Tensor) -> Streams:
        """Start streams from frames (B, T, h, w, Z) and the actions (B, T, A) that led to them."""
        return self.commit(None, latents, actions)[0]

    def commit(self, streams: AnyStreams | None, latents: Tensor, actions: Tensor, rotary: Tensor | None = None
               ) -> tuple[AnyStreams | Streams, Tensor]:
        """
        Return streams extended by clean frames (B, T, h, w, Z), and the frames' features (B, T, P, D).

        ``streams`` None starts new ones. ``rotary``: of these frames, computed here if not given.
        """
        first = 0 if streams is None else streams.newest + 1
        _, features, keys, values = self._pass(streams, first, latents, 1.0, FLOW, actions, rotary, committed=True)
        newest, kept = first + latents.shape[1] - 1, self.preset.window_frames * self.preset.tokens
        if streams is None:
            return Streams(newest, keys[..., -kept:, :], values[..., -kept:, :], latents[:, -1], newest, ()), features
        return replace(streams, newest=newest, latent=latents[:, -1],
                       keys=torch.cat([streams.keys, keys], 3)[..., -kept:, :],
                       values=torch.cat([streams.values, values], 3)[..., -kept:, :]), features

    def sinks(self, latents: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """
        Return the sinks (``Preset.sinks_from``) of streams of observed frames: latents (B, n, h, w, Z) of the last n, and their
        keys and values (L, B, H, n * P, d) as frames 0 to n - 1; () for a preset without.

        If fewer than n were observed, the first is repeated.
        """
        count = self.preset.sink_frames
        if not count:
            return ()
        last = np.maximum(latents.shape[1] - count + np.arange(count), 0)
        _, _, keys, values = self._pass(None, 0, latents[:, last], 1.0, FLOW, actions[:, last], None, committed=True)
        return latents[:, last], keys, values

    def roll(self, streams: AnyStreams, noise: Tensor, actions: Tensor, steps: Steps, update: Update | None = None,
             commit_last: bool = True) -> tuple[Tensor, AnyStreams]:
        """
        Predict latents (B, N, h, w, Z) under actions (B, N, A) from noise (B, N, h, w, Z), each chunk committed before the
        next.

        N is a multiple of chunk_frames. ``update`` makes the steps, by default as a session does. Also returns the streams to
        continue from; without ``commit_last`` those before the last chunk, which saves a pass.
        """
        preset, size, total = self.preset, self.preset.chunk_frames, actions.shape[1]
        begin, chunks = streams.newest + 1, []
        # One copy to the device for all chunks: with one per pass, the host would wait for the device.
        rotary = self._rotary(begin + np.arange(total), noise.device)
        for first in range(0, total, size):
            chunk, predicted = slice(first, first + size), streams.newest - streams.observed
            if streams.sinks and predicted >= preset.sinks_from:
                streams = self._with_sinks(streams)
            z = self._denoise(streams, noise[:, chunk], actions[:, chunk], rotary[:, chunk], steps, chunk, update)
            if streams.sinks and predicted >= preset.anchor_statistics_from:
                z = adain(z, streams.sinks[0], preset.sink_statistics)
            chunks.append(z)
            if commit_last or first + size < total:
                streams, _ = self.commit(streams, z, actions[:, chunk], rotary[:, chunk])
        return torch.cat(chunks, 1), streams

    def _denoise(self, streams: Streams, z: Tensor, actions: Tensor, rotary: Tensor, steps: Steps, chunk: slice,
                 update: Update | None) -> Tensor:
        if steps.count < 1:
            raise ValueError(f'a chunk is denoised in at least one step, not {steps.count}')
        for step in range(steps.count):
            tau = step / steps.count
            x = self._pass(streams, streams.newest + 1, z, tau, steps.row, actions, rotary)[0].to(z.dtype)
            if update is not None:
                z = update(z, x, step, chunk)
            elif step + 1 < steps.count:
                z = z + (x - z) * (1.0 / (steps.count * (1.0 - tau)))
            else:
                z = x
        return z

    def _with_sinks(self, streams: AnyStreams) -> AnyStreams:
        """
        Replace the oldest frames of the window by the sinks.

        A session commits them there again; as attention depends on time differences only, rotating the keys is equivalent.
        """
        _, keys, values = streams.sinks
        oldest = max(0, streams.newest + 1 - self.preset.window_frames)
        keys = rotate(keys, _on(shift_in_time(self.preset, oldest), keys.device))
        rest = (streams.newest + 1 - oldest - self.preset.sink_frames) * self.preset.tokens
        return replace(streams, keys=torch.cat([keys, streams.keys[..., -rest:, :]], 3),
                       values=torch.cat([values, streams.values[..., -rest:, :]], 3))

    def _pass(self, streams: Streams | None, first: int, latents: Tensor, tau: float, row: int, actions: Tensor,
              rotary: Tensor | None, committed: bool = False) -> tuple[Tensor, ...]:
        """Run ``DiT.forward`` on frames from number ``first`` on, over the streams' window."""
        device, count = latents.device, latents.shape[1]
        window = (None, None) if streams is None else (streams.keys, streams.values)
        shape = (0 if streams is None else streams.keys.shape[3] // self.preset.tokens, count, committed)
        if shape not in self._masks:
            self._masks[shape] = _on(frame_mask(self.preset, *shape), device)
        if rotary is None:
            rotary = self._rotary(first + np.arange(count), device)
        level = torch.full(latents.shape[:2], tau, device=device)
        return self.dit(latents, level, torch.full_like(level, row, dtype=torch.long), actions, rotary, self._masks[shape],
                        *window)

    def _rotary(self, times: np.ndarray, device: torch.device) -> Tensor:
        return _on(rotary_angles(self.preset, times), device)


def frame_mask(preset: Preset, window: int, frames: int, committed: bool) -> np.ndarray:
    """
    Return the additive mask (T, window + T) between frames, for a block of T frames after a window.

    A committed block is causal, and none of its frames sees further back than its own window; a block to be denoised sees all
    of itself.
    """
    t = np.arange(window, window + frames)
    age = (t if committed else np.full(frames, window))[:, None] - np.arange(window + frames)
    seen = age <= preset.window_frames
    return np.where(seen & (age >= 0) if committed else seen, 0.0, BLOCKED)


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(device, non_blocking=True)

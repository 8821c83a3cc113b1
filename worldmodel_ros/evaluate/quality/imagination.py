"""Open-loop imagination of many moments in one batch, as a session would imagine each of them.

`Session.what_if` asks its back end for one robot's pass at a time. Here the same passes, with the same window, commits
and noise, are made for a batch of moments by plain PyTorch, because a 32-step teacher five seconds ahead takes more
than four hundred of them. A test holds the two to the same numbers.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...model.attention import rotate
from ...model.latent_statistics import drawn_to
from ...model.rotary import rotary_angles, shift_in_time
from ...model.steps import FLOW, HALF, WHOLE
from ...model.world_model import WorldModel

BLOCKED = float('-inf')


@dataclass(frozen=True)
class Sampler:
    """How a chunk is denoised: which row of the step embedding, and in how many equal steps."""

    row: int
    steps: int


TEACHER = Sampler(FLOW, 32)
TWO_STEP, ONE_STEP = Sampler(HALF, 2), Sampler(WHOLE, 1)
# The flow cut short, which was not trained for so few steps.
TRUNCATED, TRUNCATED_ONE = Sampler(FLOW, 2), Sampler(FLOW, 1)


@dataclass(frozen=True)
class Memory:
    """What B streams have committed up to frame `newest`: keys and values (L, B, H, n * P, d) of the last n frames.

    latent (B, h, w, Z), of the newest frame; `seeds`: of the streams' noise, one each; `observed`: the newest frame that
    was seen; `sinks`: of the last n that were (`Preset.sees_sinks`), their latents (B, n, h, w, Z), and their keys and
    values (L, B, H, n * P, d) as frames 0 to n - 1, which nothing came before; () for a model without.
    """

    newest: int
    keys: Tensor
    values: Tensor
    latent: Tensor
    seeds: tuple[int, ...]
    observed: int
    sinks: tuple[Tensor, ...]

    def branches(self, count: int) -> Memory:
        """Each stream `count` times, one after the other."""
        return replace(self, keys=self.keys.repeat_interleave(count, 1), values=self.values.repeat_interleave(count, 1),
                       latent=self.latent.repeat_interleave(count, 0),
                       sinks=tuple(part.repeat_interleave(count, axis) for part, axis in zip(self.sinks, (0, 1, 1))),
                       seeds=tuple(seed for seed in self.seeds for _ in range(count)))


class Imagination:
    """Batches of streams through one model, on the model's device."""

    def __init__(self, model: WorldModel) -> None:
        self.model, self.spec = model, model.preset
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def observe(self, frames: np.ndarray, executed: np.ndarray, seeds: tuple[int, ...]) -> Memory:
        """Commits frames uint8 (B, C, H, W, 3), the first of their streams, with executed (B, C, A)."""
        latents = self.encode(frames)
        b, count = latents.shape[:2]
        times = np.arange(count)
        actions = self._tensor(executed)
        _, keys, values = self._pass(latents, 1.0, FLOW, actions, times, None)
        keep = min(count, self.spec.window_frames) * self.spec.tokens
        return Memory(count - 1, keys[..., -keep:, :], values[..., -keep:, :], latents[:, -1], tuple(seeds), count - 1,
                      self._sinks(latents, actions))

    @torch.inference_mode()
    def encode(self, frames: np.ndarray) -> Tensor:
        """Latents (B, C, h, w, Z) of streams of frames uint8 (B, C, H, W, 3)."""
        images = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device).movedim(-1, -3).float() / 127.5 - 1.0
        features, latents = None, []
        for i in range(images.shape[1]):
            latent, features = self.model.vae.encode(images[:, i], features)
            latents.append(latent)
        return torch.stack(latents, 1)

    @torch.inference_mode()
    def roll(self, memory: Memory, actions: np.ndarray, sampler: Sampler) -> tuple[Tensor, Memory]:
        """Latents (B, N, h, w, Z) under actions (B, N, A), chunk by chunk, each committed before the next.

        N is a multiple of chunk_frames. Returns the memory after them too, to go on from.
        """
        size, chunks = self.spec.chunk_frames, []
        steps = self._tensor(actions)
        for start in range(0, steps.shape[1], size):
            chunk = steps[:, start:start + size]
            imagined = memory.newest - memory.observed
            if self.spec.sees_sinks(imagined):
                memory = self._with_sinks(memory)
            latents = self._denoise(memory, chunk, sampler)
            if self.spec.draws_to_sinks(imagined):
                latents = drawn_to(latents, memory.sinks[0], self.spec.sink_statistics)
            chunks.append(latents)
            memory = self._commit(memory, latents, chunk)
        return torch.cat(chunks, 1), memory

    @torch.inference_mode()
    def decode(self, latents: Tensor, before: Tensor) -> np.ndarray:
        """Pictures uint8 (N, H, W, 3) of latents (N, h, w, Z), each of which follows one of `before`, same shape."""
        vae = self.model.vae
        _, features = vae.decode(before)
        images = vae.decode(latents, features)[0]
        return ((images + 1.0) * 127.5).round().clamp(0, 255).byte().movedim(-3, -1).cpu().numpy()

    def _denoise(self, memory: Memory, actions: Tensor, sampler: Sampler) -> Tensor:
        times = memory.newest + 1 + np.arange(self.spec.chunk_frames)
        z = self._tensor(np.stack([self._noise(seed, memory.newest + 1) for seed in memory.seeds]))
        for step in range(sampler.steps):
            tau = step / sampler.steps
            x, _, _ = self._pass(z, tau, sampler.row, actions, times, memory, causal=False)
            if step + 1 == sampler.steps:
                return x
            z = z + (x - z) * (1.0 / (sampler.steps * (1.0 - tau)))
        raise ValueError(f'a sampler has at least one step, not {sampler.steps}')

    def _commit(self, memory: Memory, latents: Tensor, actions: Tensor) -> Memory:
        times = memory.newest + 1 + np.arange(latents.shape[1])
        _, keys, values = self._pass(latents, 1.0, FLOW, actions, times, memory)
        keep = self.spec.window_frames * self.spec.tokens
        return replace(memory, newest=int(times[-1]), latent=latents[:, -1],
                       keys=torch.cat([memory.keys, keys], 3)[..., -keep:, :],
                       values=torch.cat([memory.values, values], 3)[..., -keep:, :])

    def _sinks(self, latents: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Those of streams of latents (B, C, h, w, Z), whose first frame stands for those that never were."""
        count = self.spec.sink_frames
        if not count:
            return ()
        last = np.maximum(latents.shape[1] - count + np.arange(count), 0)
        _, keys, values = self._pass(latents[:, last], 1.0, FLOW, actions[:, last], np.arange(count), None)
        return latents[:, last], keys, values

    def _with_sinks(self, memory: Memory) -> Memory:
        """The window with the sinks in the place of its oldest frames. A session commits them there anew; but as only
        differences in time reach the attention, it is enough to move the keys."""
        _, keys, values = memory.sinks
        oldest = max(0, memory.newest + 1 - self.spec.window_frames)
        keys = rotate(keys, self._tensor(shift_in_time(self.spec, oldest)))
        rest = (memory.newest + 1 - oldest - self.spec.sink_frames) * self.spec.tokens
        return replace(memory, keys=torch.cat([keys, memory.keys[..., -rest:, :]], 3),
                       values=torch.cat([values, memory.values[..., -rest:, :]], 3))

    def _noise(self, seed: int, first: int) -> np.ndarray:
        """The noise that a session of that seed begins with, for the chunk that starts at frame `first`."""
        rng = np.random.Generator(np.random.Philox(key=[seed, first]))
        return rng.standard_normal((self.spec.chunk_frames, *self.spec.latent_size, self.spec.latent_channels),
                                   np.float32)

    def _pass(self, latents: Tensor, tau: float, row: int, actions: Tensor, times: np.ndarray, memory: Memory | None,
              causal: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """One pass of the network over frames at `times`; a causal one commits them."""
        b, t = latents.shape[:2]
        level = torch.full((b, t), tau, device=self.device)
        x, _, keys, values = self.model.dit(
            latents, level, torch.full((b, t), row, dtype=torch.long, device=self.device), actions,
            self._tensor(rotary_angles(self.spec, times)), self._tensor(self._bias(times, memory, causal)),
            *((None, None) if memory is None else (memory.keys, memory.values)))
        return x, keys, values

    def _bias(self, times: np.ndarray, memory: Memory | None, causal: bool) -> np.ndarray:
        """What a session's pass sees: of the past the last window_frames, of its own frames those not later."""
        kept = 0 if memory is None else memory.keys.shape[3] // self.spec.tokens
        past = times[0] - kept + np.arange(kept)
        oldest = (times if causal else np.full_like(times, times[0])) - self.spec.window_frames
        own = (times[:, None] >= times) & (times[:, None] - times <= self.spec.window_frames) if causal \
            else np.ones((len(times), len(times)), bool)
        return np.where(np.concatenate([past >= oldest[:, None], own], 1), 0.0, BLOCKED)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self.device)

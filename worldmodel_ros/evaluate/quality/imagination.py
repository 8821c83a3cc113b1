"""
Open-loop predictions of many moments in one batch, as a session would make each of them.

``Session.what_if`` asks its back end for one robot's pass at a time. Here the same passes, with the same window, commits
and noise, are made for a batch of moments by ``model.rollout``, because a 32-step teacher five seconds ahead takes more
than four hundred of them. A test checks that both give the same numbers.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ...engine.sampler import Noise
from ...model.rollout import Rollout, Streams
from ...model.sampling import Steps
from ...model.vae import to_frames
from ...model.world_model import WorldModel


@dataclass(frozen=True)
class Memory(Streams):
    """Streams, and the seeds of their noise, one each."""

    seeds: tuple[int, ...]

    def branches(self, count: int) -> Memory:
        """Return each stream ``count`` times, one after the other."""
        return replace(self, keys=self.keys.repeat_interleave(count, 1), values=self.values.repeat_interleave(count, 1),
                       latent=self.latent.repeat_interleave(count, 0),
                       sinks=tuple(part.repeat_interleave(count, axis) for part, axis in zip(self.sinks, (0, 1, 1))),
                       seeds=tuple(seed for seed in self.seeds for _ in range(count)))


class Imagination:
    """Batches of streams through one model, on the model's device."""

    def __init__(self, model: WorldModel) -> None:
        self.model, self.spec = model, model.preset
        self.rollout = Rollout(model.dit)
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def observe(self, frames: np.ndarray, executed: np.ndarray, seeds: tuple[int, ...]) -> Memory:
        """Commit frames uint8 (B, C, H, W, 3), the first of their streams, with executed (B, C, A)."""
        latents, actions = self.encode(frames), self._tensor(executed)
        streams = replace(self.rollout.observe(latents, actions), sinks=self.rollout.sinks(latents, actions))
        return Memory(**{field.name: getattr(streams, field.name) for field in fields(streams)}, seeds=tuple(seeds))

    @torch.inference_mode()
    def encode(self, frames: np.ndarray) -> Tensor:
        """Return latents (B, C, h, w, Z) of streams of frames uint8 (B, C, H, W, 3)."""
        images = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device).movedim(-1, -3).float() / 127.5 - 1.0
        features, latents = None, []
        for i in range(images.shape[1]):
            latent, features = self.model.vae.encode(images[:, i], features)
            latents.append(latent)
        return torch.stack(latents, 1)

    @torch.inference_mode()
    def roll(self, memory: Memory, actions: np.ndarray, steps: Steps, keep: bool = True) -> tuple[Tensor, Memory | None]:
        """
        Return latents (B, N, h, w, Z) under actions (B, N, A), chunk by chunk, each committed before the next, and the
        memory after them, to continue from; None unless ``keep``.

        N is a multiple of chunk_frames.
        """
        firsts = range(memory.newest + 1, memory.newest + 1 + actions.shape[1], self.spec.chunk_frames)
        shape = self.spec.chunk_frames, *self.spec.latent_size, self.spec.latent_channels
        noise = np.stack([np.concatenate([Noise(seed, shape).draw(first) for first in firsts]) for seed in memory.seeds])
        latents, after = self.rollout.roll(memory, self._tensor(noise), self._tensor(actions), steps, commit_last=keep)
        return latents, after if keep else None

    @torch.inference_mode()
    def decode(self, latents: Tensor, before: Tensor) -> np.ndarray:
        """Return images uint8 (N, H, W, 3) of latents (N, h, w, Z), each of which follows one of ``before``, same shape."""
        vae = self.model.vae
        _, features = vae.decode(before)
        return to_frames(vae.decode(latents, features)[0]).cpu().numpy()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self.device)

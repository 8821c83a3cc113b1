"""Denoising without gradients: chunks over a fixed context, and rollouts that continue from their own predictions."""
from __future__ import annotations

import torch
from torch import Tensor

from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.rollout import Rollout
from worldmodel_ros.model.sampling import FLOW, Steps
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks, expand


class ChunkSampler:
    """Denoises chunks over their context, whose keys and values are computed once."""

    def __init__(self, model: WorldModel, batch: Chunks):
        self.model, self.batch, preset = model, batch, model.preset
        device, times = batch.context.device, batch.frame_times
        committed, self.rotary = batch.rotary(preset)
        ones = torch.ones(batch.context.shape[:2], device=device)
        _, _, self.k, self.v = model.dit(
            batch.context, ones, ones.long() * FLOW, batch.actions, committed,
            clips.committed_mask(preset, times, device, batch.until))
        self.mask = clips.noisy_mask(preset, times, batch.starts, device, until=batch.until)

    def predict(self, z: Tensor, tau: Tensor, step: Tensor) -> Tensor:
        return self.model.dit(z, tau, step, self.batch.noisy_actions, self.rotary, self.mask, self.k, self.v)[0].float()

    def euler(self, z: Tensor, tau: Tensor, length: Tensor | float, row: int, steps: int = 1) -> Tensor:
        """Move z (B, N, ...) from level tau (B, N) by ``length``, in equal steps."""
        for _ in range(steps):
            x = self.predict(z, tau, torch.full_like(tau, row, dtype=torch.long))
            z = z + (x - z) / expand(1.0 - tau) * (length / steps)
            tau = tau + length / steps
        return z


@torch.no_grad()
def roll_out(dit: DiT, observed: Tensor, actions: Tensor, noise: Tensor, steps: int,
             truth: Tensor | None = None, tether: Tensor | None = None) -> Tensor:
    """
    Return the latents (B, N, h, w, Z) that B sessions predict, each from its own predictions (``model.rollout``).

    observed (B, T, h, w, Z), at most a window of frames; actions (B, T + N, A), the one that leads to each frame; noise
    (B, N, h, w, Z) of whole chunks; steps per chunk. The window simply rolls on, also for presets with sinks.
    With ``truth`` (B, N, h, w, Z), partly denoised latents are moved towards the truth at the same level by ``tether``
    (B,), 0 to 1: the rollout keeps its own flaws, yet stays near the truth however long it is.
    Raises ValueError for no observed frame, or more of them than a window.
    """
    seen, longest = observed.shape[1], dit.preset.window_frames
    if not 0 < seen <= longest:
        raise ValueError(f'{seen} observed frames: a rollout begins with 1 to {longest}')

    def tethered(z: Tensor, x: Tensor, step: int, chunk: slice) -> Tensor:
        z = z + (x - z) * (1.0 / (steps - step))
        if truth is None or step + 1 == steps:
            return z
        level = (step + 1) / steps
        return torch.lerp(z, (1 - level) * noise[:, chunk] + level * truth[:, chunk], expand(tether[:, None]))

    rollout = Rollout(dit)
    streams = rollout.observe(observed, actions[:, :seen])
    return rollout.roll(streams, noise, actions[:, seen:seen + noise.shape[1]], Steps.of(steps), tethered,
                        commit_last=False)[0]

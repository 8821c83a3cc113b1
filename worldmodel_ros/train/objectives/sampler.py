"""Denoising without gradients: chunks over a fixed context, and roll-outs that go on from what they imagined."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.steps import FLOW, HALF, WHOLE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks, expand


class Sampler:
    """Chunks, denoised over their context, whose keys and values are computed once."""

    def __init__(self, model: WorldModel, batch: Chunks):
        self.model, self.batch, preset = model, batch, model.preset
        device, frames = batch.context.device, batch.context.shape[1]
        ones = torch.ones(batch.context.shape[:2], device=device)
        _, _, self.k, self.v = model.dit(
            batch.context, ones, ones.long() * FLOW, batch.actions, clips.rotary(preset, np.arange(frames), device),
            clips.on_device(clips.block_bias(preset, 0, frames, committed=True), device))
        self.rotary = clips.rotary(preset, clips.chunk_frames(preset, batch.starts), device)
        self.bias = clips.on_device(clips.noisy_bias(preset, frames, batch.starts), device)

    def predict(self, z: Tensor, tau: Tensor, step: Tensor) -> Tensor:
        return self.model.dit(z, tau, step, self.batch.noisy_actions, self.rotary, self.bias, self.k, self.v)[0].float()

    def euler(self, z: Tensor, tau: Tensor, length: Tensor | float, row: int, steps: int = 1) -> Tensor:
        """Moves z (B, N, ...) from level tau (B, N) by ``length``, in equal steps."""
        for _ in range(steps):
            x = self.predict(z, tau, torch.full_like(tau, row, dtype=torch.long))
            z = z + (x - z) / expand(1.0 - tau) * (length / steps)
            tau = tau + length / steps
        return z


@torch.no_grad()
def roll_out(dit: DiT, observed: Tensor, actions: Tensor, noise: Tensor, steps: int,
             truth: Tensor | None = None, tether: Tensor | None = None) -> Tensor:
    """What B sessions imagine when each goes on from its own predictions, as `Session.what_if` does.

    observed (B, T, h, w, Z), at most a window of frames; actions (B, T + N, A), the one that leads to each frame; noise
    (B, N, h, w, Z) of whole chunks; steps per chunk. Returns the imagined latents (B, N, h, w, Z). Each chunk is
    denoised over the window and then committed; keys and values of the window roll on: the cost is linear in N.
    With ``truth`` (B, N, h, w, Z), what is half denoised is moved towards the same level of the truth by ``tether``
    (B,), 0 to 1: the roll-out keeps its own flaws, and yet stays near the truth for as long as it goes on.
    Raises ValueError for no observed frame, or more of them than a window.
    """
    preset, device = dit.preset, observed.device
    k, longest = preset.chunk_frames, preset.window_frames
    row = {1: WHOLE, 2: HALF}.get(steps, FLOW)
    seen, end = observed.shape[1], observed.shape[1] + noise.shape[1]
    if not 0 < seen <= longest:
        raise ValueError(f'{seen} observed frames: a roll-out begins with 1 to {longest}')
    cached = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else observed.dtype
    rotary = clips.rotary(preset, np.arange(end), device)
    biases: dict[tuple[int, int, bool], Tensor] = {}

    def block(z: Tensor, first: int, tau: float, row: int, window: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        last = first + z.shape[1]
        frames = 0 if window is None else window[0].shape[3] // preset.tokens
        shape = (frames, z.shape[1], tau == 1.0)
        if shape not in biases:  # these are few; the host would be slower than the device with one a pass
            biases[shape] = clips.on_device(clips.block_bias(preset, *shape), device)
        level = torch.full(z.shape[:2], tau, device=device)
        return dit(z, level, torch.full_like(level, row, dtype=torch.long), actions[:, first:last],
                   rotary[:, first:last], biases[shape], *(window or (None, None)))

    window, z, imagined = None, observed, []
    for first in range(seen, end, k):
        new = block(z, first - z.shape[1], 1.0, FLOW, window)[2:]
        if window:
            stays = longest * preset.tokens - new[0].shape[3]
            new = [torch.cat([old[:, :, :, -stays:], part.to(cached)], 3) for old, part in zip(window, new)]
        window = tuple(part.to(cached) for part in new)
        chunk = slice(first - seen, first - seen + k)
        z = noise[:, chunk]
        for step in range(steps):
            if step and truth is not None:
                level = step / steps
                z = torch.lerp(z, (1 - level) * noise[:, chunk] + level * truth[:, chunk],
                               tether[:, None, None, None, None])
            x = block(z, first, step / steps, row, window)[0].to(z.dtype)
            z = z + (x - z) * (1.0 / (steps - step))
        imagined.append(z)
    return torch.cat(imagined, 1)

"""Guards the nearest predictions, of one chunk after observed frames, against a stage that makes them worse.

A stage that improves far predictions may degrade near ones unnoticed, since its own losses are on other contexts.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.sampling import FLOW, ONE_STEP, TWO_STEP, Steps
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.batches import Chunks
from worldmodel_ros.train.data.episodes import Episodes
from .sampler import ChunkSampler

SAMPLERS = {'flow': Steps(FLOW, 8), 'two_step': TWO_STEP, 'one_step': ONE_STEP}
TOLERANCE = 1.1  # of the squared error: 0.4 dB


class ShortHorizon:
    """The same few clips, with the same noise, for every measurement."""

    def __init__(self, model: WorldModel, episodes: Episodes, clips: int = 32):
        """Clips of the episodes, drawn by a fixed seed and encoded with the model's autoencoder."""
        self.preset, device = model.preset, episodes.frames.device
        k, generator = self.preset.chunk_frames, torch.Generator(device).manual_seed(0)
        longest = episodes.frames.shape[1] if episodes.lengths is None else int(episodes.lengths.max())
        seen = min(self.preset.window_frames, longest - k)
        episode, frame = episodes.clips(clips, seen + k, generator)
        with torch.no_grad():
            latents = model.vae.encode_clips(episodes.images(episode, frame)).float()
        actions = episodes.actions[episode, frame]
        self.truth = latents[:, seen:]
        noise = torch.randn(self.truth.shape, device=device, generator=generator)
        self.chunks = Chunks(latents[:, :seen], actions[:, :seen], np.array([seen]), noise,
                             actions[:, seen:])

    @torch.no_grad()
    def errors(self, model: WorldModel) -> dict[str, float]:
        """Return the mean squared error of the predicted latents, which have unit variance, for each sampler."""
        noise = self.chunks.noise
        zero = torch.zeros(noise.shape[:2], device=noise.device)

        def error(predicted: Tensor) -> float:
            return round(float((predicted - self.truth).square().mean()), 5)

        with torch.autocast(noise.device.type, torch.bfloat16, enabled=noise.device.type == 'cuda'):
            sampler = ChunkSampler(model, self.chunks)
            return {name: error(sampler.euler(noise, zero, 1.0, way.row, way.count)) for name, way in SAMPLERS.items()}


def lost(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return descriptions of what got worse by more than the tolerance."""
    return [f'{name} {before[name]:.4f} -> {after[name]:.4f}' for name in after
            if not after[name] <= TOLERANCE * before[name]]

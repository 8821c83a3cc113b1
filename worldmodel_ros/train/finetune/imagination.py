"""Batched predictions from many moments of a recording, like those of a session that has just seen a window of it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.train.objectives.sampler import roll_out
from ...model.presets import Preset
from ...model.vae import VAE, to_frames
from ...model.world_model import WorldModel
from .split import Part, judged_frames

_BATCH = 32  # moments at a time


@dataclass(frozen=True)
class Moments:
    """B moments with a window of W frames up to them and the F frames that followed.

    frames uint8 (B, 1 + W + F, H, W, 3): the first one is what the autoencoder saw before the window; actions float32
    (B, W + F, A), the one that led to each frame but the first; drive int (B,) and times (B,) locate the moments.
    """

    frames: np.ndarray
    actions: np.ndarray
    drive: np.ndarray
    times: np.ndarray
    window: int

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def now(self) -> np.ndarray:
        """The newest observed images (B, H, W, 3)."""
        return self.frames[:, self.window]

    @property
    def followed(self) -> np.ndarray:
        """The true images that followed (B, F, H, W, 3)."""
        return self.frames[:, self.window + 1:]

    @property
    def ahead(self) -> np.ndarray:
        """The actions (B, F, A) that led to them."""
        return self.actions[:, self.window:]


def moments(parts: Sequence[Part], preset: Preset, most: int) -> Moments:
    """Return at most ``most`` moments of parts of recordings, evenly spread. Raises ValueError if there is none."""
    window, length = preset.window_frames, judged_frames(preset)
    places = [(drive, chain, k) for drive, part in enumerate(parts)
              for chain in part.chains(preset, length) for k in range(len(chain) - length + 1)]
    if not places:
        raise ValueError(f'there are no {length} consecutive frames')
    places = [places[k] for k in np.unique(np.linspace(0, len(places) - 1, most).round().astype(int))]
    return Moments(np.stack([chain.frames[k:k + length] for _, chain, k in places]),
                   np.stack([chain.actions[k + 1:k + length] for _, chain, k in places]),
                   np.array([drive for drive, _, _ in places]),
                   np.array([chain.times[k + window] for _, chain, k in places]), window)


@torch.no_grad()
def imagine(model: WorldModel, moments: Moments, steps: int, ahead: np.ndarray | None = None) -> np.ndarray:
    """Return the F imagined images of each moment, uint8 (B, F, H, W, 3), under its own actions or those of ``ahead``.

    The same moments give the same images on one machine, as the noise is fixed.
    """
    device, preset, window = model.vae.latent_mean.device, model.preset, moments.window
    count = moments.followed.shape[1]
    chunks = -(-count // preset.chunk_frames)
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for first in range(0, len(moments), _BATCH):
        chosen = slice(first, first + _BATCH)
        latents = encode(model.vae, moments.frames[chosen, :window + 1])
        actions = moments.actions[chosen].copy()
        if ahead is not None:
            actions[:, window:] = ahead[chosen]
        # A short last chunk repeats its last action, as in a session.
        actions = np.concatenate([actions, actions[:, -1:].repeat(chunks * preset.chunk_frames - count, 1)], 1)
        noise = torch.randn((len(latents), chunks * preset.chunk_frames, *latents.shape[2:]), generator=generator)
        imagined = roll_out(model.dit, latents[:, 1:], torch.from_numpy(actions).to(device), noise.to(device), steps)
        pictures.append(_decode(model.vae, imagined[:, :count], latents[:, -1]))
    return np.concatenate(pictures)


@torch.no_grad()
def reconstruct(vae: VAE, moments: Moments) -> np.ndarray:
    """Return the moments' newest images as the autoencoder alone reconstructs them, uint8 (B, H, W, 3)."""
    pictures = []
    for first in range(0, len(moments), _BATCH):
        latents = encode(vae, moments.frames[first:first + _BATCH, moments.window - 2:moments.window + 1])
        pictures.append(_decode(vae, latents[:, 2:], latents[:, 1])[:, 0])
    return np.concatenate(pictures)


def encode(vae: VAE, frames: np.ndarray) -> Tensor:
    """Return latents (B, T, h, w, Z) of frames uint8 (B, T, H, W, 3), each row its own stream."""
    images = torch.from_numpy(frames).to(vae.latent_mean.device).float().div_(127.5).sub_(1.0)
    return vae.encode_clips(images.movedim(-1, 2))


def _decode(vae: VAE, latents: Tensor, before: Tensor) -> np.ndarray:
    """Images uint8 (B, T, H, W, 3) of latents (B, T, h, w, Z) that follow ``before`` (B, h, w, Z)."""
    before = torch.cat([before[:, None], latents[:, :-1]], 1)
    images = vae.decode_after(latents.flatten(0, 1), before.flatten(0, 1)).unflatten(0, latents.shape[:2])
    return to_frames(images).cpu().numpy()

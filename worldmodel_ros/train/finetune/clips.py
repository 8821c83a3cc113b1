"""Chains of images as training episodes: unchanged for the autoencoder, as latents of variants for the DiT."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.train.data.episodes import Episodes
from ...model.presets import Preset
from ...model.vae import VAE, to_frames
from .augment import Light, mirror_signs, mirrored
from .recording import Chain

# Longer chains are cut, so that a long one does not pad all others to its length; the pieces overlap, so that every clip is
# whole in one of them.
PIECE_FRAMES = 240


def episodes(chains: Sequence[Chain], clip_frames: int, device: torch.device) -> Episodes:
    """Return chains as episodes to draw clips of ``clip_frames`` from. Raises ValueError if there are none."""
    pieces = [(chain.frames[k:k + PIECE_FRAMES], chain.actions[k:k + PIECE_FRAMES]) for chain in chains
              for k in range(0, max(1, len(chain) - clip_frames + 1), PIECE_FRAMES - clip_frames + 1)]
    if not pieces:
        raise ValueError('there are no consecutive images')
    longest = max(len(frames) for frames, _ in pieces)
    frames = np.zeros((len(pieces), longest, *pieces[0][0].shape[1:]), np.uint8)
    actions = np.zeros((len(pieces), longest, pieces[0][1].shape[1]), np.float32)
    for k, (some_frames, some_actions) in enumerate(pieces):
        frames[k, :len(some_frames)], actions[k, :len(some_actions)] = some_frames, some_actions
    return Episodes(torch.from_numpy(frames).to(device), torch.from_numpy(actions).to(device),
                    lengths=torch.tensor([len(f) for f, _ in pieces], device=device))


def encoded_variants(recorded: Episodes, vae: VAE, preset: Preset, count: int, mirror: bool,
                     generator: torch.Generator) -> Episodes:
    """Return ``count`` variants of each episode, encoded; the first is as it was recorded, every second one mirrored.

    Images are not kept (E * count, T, 0, 0, 3): those of an hour would take gigabytes, and the DiT needs none.
    """
    signs = mirror_signs(preset) if mirror else None
    latents, actions = [], []
    for variant in range(count):
        swap = bool(signs is not None and variant % 2)
        light = [Light(1, generator, unchanged=variant < 2) for _ in range(len(recorded))]
        frames = torch.stack([_changed(recorded, k, change, swap) for k, change in enumerate(light)])
        changed = replace(recorded, frames=frames)
        changed.encode(vae)
        latents.append(changed.latents)
        actions.append(recorded.actions * signs.to(recorded.actions) if swap else recorded.actions)
    empty = recorded.frames.new_empty(len(recorded) * count, recorded.frames.shape[1], 0, 0, 3)
    return Episodes(empty, torch.cat(actions), latents=torch.cat(latents), lengths=recorded.lengths.repeat(count))


def _changed(recorded: Episodes, row: int, light: Light, swap: bool) -> Tensor:
    """One episode's images, uint8 (T, H, W, 3), in another light, and mirrored if ``swap``."""
    length = torch.arange(recorded.frames.shape[1], device=recorded.frames.device)
    images = light(recorded.images(torch.full_like(length, row)[None], length[None]))
    if swap:
        images = mirrored(images, torch.ones(1, dtype=torch.bool, device=images.device))
    return to_frames(images[0])

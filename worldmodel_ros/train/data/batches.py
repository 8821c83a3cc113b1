"""What one step of training learns from: committed frames, and noisy chunks after them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.train.objectives.policy import PolicyDraw, draw_policy
from worldmodel_ros.train.run.options import TeacherOptions
from . import clips
from .episodes import Episodes

if TYPE_CHECKING:
    from worldmodel_ros.train.objectives.dmd import Far


@dataclass
class Chunks:
    """B clips of F committed frames, and the noise of the N frames of the chunks that begin at ``starts`` in all of
    them."""

    context: Tensor  # (B, F, h, w, Z) what is committed: true latents, with noise on them, or imagined ones
    actions: Tensor  # (B, F, A), the one that led to each frame
    starts: np.ndarray  # (chunks,)
    noise: Tensor  # (B, N, h, w, Z)
    noisy_actions: Tensor  # (B, N, A)


@dataclass
class Batch(Chunks):
    """Chunks whose true continuation is known, and what the losses draw for them."""

    clean: Tensor  # (B, F, h, w, Z) true latents
    episode: Tensor  # (B, 1)
    frame: Tensor  # (B, F)
    target: Tensor  # (B, N, h, w, Z) true latents of the noisy frames
    tau: Tensor  # (B, N) noise levels, 1 is clean
    step: Tensor  # (B, N) rows of the step embedding
    halfway: Tensor  # bool (B, N): half steps from tau 1/2 that begin where the student's own first one ends
    trust: Tensor  # (B, N) in (0, 1]: what the truth is worth as a target; 1 where the context is observed
    flow_trust: Tensor  # (B, N) the same for the flow, whose noisy latents tell more of the truth the cleaner they are
    observed: Tensor  # bool (B, F): frames that were observed
    policy: PolicyDraw
    blind: bool = False  # whether the last chunk sees no context
    far: Far | None = None  # what the distribution matching learns from

    @property
    def noisy_index(self) -> Tensor:
        """Places (N,) of the noisy frames in the clip."""
        return torch.from_numpy(self.starts[:, None] + np.arange(self.noise.shape[1] // len(self.starts))
                                ).reshape(-1).to(self.noise.device)


def draw(episodes: Episodes, preset: Preset, options: TeacherOptions, rng: np.random.Generator,
         generator: torch.Generator, contacts: Tensor | None = None) -> Batch:
    """Clips of recordings, with noise on the context of half of them; every chunk at a flow level of its own.

    contacts (N, 2): episodes and frames that ``contact_share`` of the clips hold one of; None: no such share.
    """
    around = 0 if contacts is None else round(options.contact_share * options.batch)
    episode, frame = episodes.clips(options.batch - around, options.clip_frames, generator)
    if around:
        lead = min(preset.window_frames, options.clip_frames - 1)
        others = episodes.clips_around(contacts, around, options.clip_frames, lead, generator)
        episode, frame = torch.cat([episode, others[0]]), torch.cat([frame, others[1]])
    clean = episodes.latents[episode, frame].float()
    context = noisy_context(clean, options.context_noise, generator)
    actions = episodes.actions[episode, frame]
    return noisy_chunks(preset, options, clean, context, actions, episode, frame, rng, generator)


def noisy_context(clean: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Clips (B, F, ...) with noise of a deviation up to ``most``; half of them stay exact: that is what a live session
    has."""
    def uniform() -> Tensor:
        return torch.rand(len(clean), 1, 1, 1, 1, device=clean.device, generator=generator)

    level = most * uniform() * (uniform() < 0.5)
    return clean + level * torch.randn(clean.shape, device=clean.device, generator=generator)


def noisy_chunks(preset: Preset, options: TeacherOptions, clean: Tensor, context: Tensor, actions: Tensor,
                 episode: Tensor, frame: Tensor, rng: np.random.Generator, generator: torch.Generator) -> Batch:
    """Draw chunks over clips whose context is observed; their step rows are the flow's."""
    b, f = clean.shape[:2]
    starts = clips.draw_starts(preset, f, options.chunks, rng, options.full_windows)
    index = torch.from_numpy(clips.chunk_frames(preset, starts)).to(clean.device)
    target = clean[:, index]
    tau = per_chunk(preset, torch.rand(b, options.chunks, device=clean.device, generator=generator))
    noise = torch.randn(target.shape, device=clean.device, generator=generator)
    return Batch(context, actions, starts, noise, actions[:, index], clean, episode, frame, target, tau,
                 torch.full_like(tau, FLOW, dtype=torch.long), torch.zeros_like(tau, dtype=torch.bool),
                 torch.ones_like(tau), torch.ones_like(tau), torch.ones(b, f, dtype=torch.bool, device=clean.device),
                 draw_policy(preset, b, f, clean.device, generator))


def per_chunk(preset: Preset, values: Tensor) -> Tensor:
    """One value per chunk (B, chunks) to one per frame (B, chunks * K)."""
    return values.repeat_interleave(preset.chunk_frames, 1)


def expand(level: Tensor) -> Tensor:
    """(B, N) to (B, N, 1, 1, 1)."""
    return level[..., None, None, None]


def mix(noise: Tensor, clean: Tensor, tau: Tensor) -> Tensor:
    """Latents at noise level tau (B, N)."""
    return (1 - expand(tau)) * noise + expand(tau) * clean

"""Stages `teacher` and `student`: flow matching of the DiT, then shortcut steps of length 1/2 and 1, with both heads.

Flow matching in x-prediction with the ramp weight, and shortcut forcing, follow Dreamer 4 (Hafner et al. 2025) and
shortcut models (Frans et al. 2024). The half step's target is an explicit roll of the frozen teacher instead of a
bootstrap, since only two step lengths are served.
"""
from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.presets import Preset
from ..model.steps import FLOW, HALF, WHOLE
from ..model.world_model import WorldModel
from . import clips
from .data import Episodes, command_chunks
from .log import Log
from .optim import Trainer

CLIP_FRAMES = 24
CHUNKS = 4
TEACHER_SUBSTEPS = 4
# Noise on committed latents, so that a session that continues from its own predictions stays in the trained range.
CONTEXT_NOISE = 0.25
# Share of the ground truth in the student's targets: a simulated drive is nearly deterministic, and the truth is a
# better teacher than the teacher wherever it is known.
TRUTH_WEIGHT = 0.3


@dataclass
class Batch:
    """One batch: clean latents (B, F, h, w, Z) with the actions that led to them, and noisy chunks drawn from it."""

    clean: Tensor
    context: Tensor
    actions: Tensor
    starts: np.ndarray
    target: Tensor  # (B, N, h, w, Z) clean latents of the noisy frames
    noise: Tensor
    noisy_actions: Tensor  # (B, N, A)
    episode: Tensor
    frame: Tensor


def draw(episodes: Episodes, preset: Preset, batch: int, rng: np.random.Generator, generator: torch.Generator
         ) -> Batch:
    episode, frame = episodes.clips(batch, CLIP_FRAMES, generator)
    clean = episodes.latents[episode, frame].float()
    actions = episodes.actions[episode, frame]
    starts = clips.draw_starts(preset, CLIP_FRAMES, CHUNKS, rng)
    index = torch.from_numpy(clips.chunk_frames(preset, starts)).to(clean.device)
    level = CONTEXT_NOISE * torch.rand(batch, 1, 1, 1, 1, device=clean.device, generator=generator)
    # Half of the clips keep their exact context: that is what a live session has.
    level = level * (torch.rand(batch, 1, 1, 1, 1, device=clean.device, generator=generator) < 0.5)
    context = clean + level * torch.randn_like(clean)
    target = clean[:, index]
    return Batch(clean, context, actions, starts, target, torch.randn_like(target), actions[:, index], episode, frame)


class Objective:
    """The losses of both stages over one model."""

    def __init__(self, model: WorldModel, device: torch.device):
        self.model, self.preset, self.device = model, model.preset, device
        self.clean_times = np.arange(CLIP_FRAMES)

    def forward(self, batch: Batch, z: Tensor, tau: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over clean and noisy frames; returns predicted latents and features of the noisy frames, and
        features of the clean ones."""
        f = CLIP_FRAMES
        times = np.concatenate([self.clean_times, clips.chunk_frames(self.preset, batch.starts)])
        ones = torch.ones(z.shape[0], f, device=self.device)
        x, features, _, _ = self.model.dit(
            torch.cat([batch.context, z], 1), torch.cat([ones, tau], 1), torch.cat([ones.long() * FLOW, step], 1),
            torch.cat([batch.actions, batch.noisy_actions], 1), clips.rotary(self.preset, times, self.device),
            clips.on_device(clips.sequence_bias(self.preset, f, batch.starts), self.device))
        return x[:, f:].float(), features[:, f:], features[:, :f]

    def heads(self, episodes: Episodes, batch: Batch, clean: Tensor, noisy: Tensor) -> tuple[Tensor, dict]:
        """Imitation loss of the action head on the observed frames and outcome losses on the imagined ones; without
        labels there is nothing to learn them from, and the heads stay as they are."""
        if not episodes.labelled:
            return torch.zeros((), device=self.device), {}
        preset, k = self.preset, self.preset.chunk_frames
        expert = episodes.expert[batch.episode, batch.frame]
        target, mask = command_chunks(expert, batch.actions, preset)
        frames = target.shape[1]
        plan = self.model.action_head(clean[:, :frames].flatten(0, 1)).unflatten(0, (-1, frames)).float()
        error = F.smooth_l1_loss(plan / self.model.action_head.half_range, target / self.model.action_head.half_range,
                                 reduction='none', beta=0.1).mean(-1)
        imitation = (error * mask).sum() / mask.sum()
        logits, progress = self.model.outcome_head(noisy)
        index = torch.from_numpy(clips.chunk_frames(preset, batch.starts)).to(self.device)
        collided = episodes.collided[batch.episode, batch.frame][:, index].float()
        distance = episodes.goal_distance[batch.episode, batch.frame]
        before = torch.from_numpy(np.repeat(batch.starts - 1, k)).to(self.device)
        contact = F.binary_cross_entropy_with_logits(logits.float(), collided)
        towards = F.smooth_l1_loss(progress.float() * 5.0, (distance[:, before] - distance[:, index]) * 5.0, beta=0.1)
        return imitation + 0.2 * contact + 0.2 * towards, {'imitation': imitation, 'contact': contact, 'progress': towards}

    def per_chunk(self, values: Tensor) -> Tensor:
        """(B, chunks) to (B, chunks * K)."""
        return values.repeat_interleave(self.preset.chunk_frames, 1)


def expand(level: Tensor) -> Tensor:
    return level[..., None, None, None]


class Sampler:
    """Chunks denoised over a fixed context, whose keys and values are computed once."""

    def __init__(self, model: WorldModel, batch: Batch):
        self.model, self.batch, self.preset = model, batch, model.preset
        device = batch.clean.device
        ones = torch.ones(batch.clean.shape[:2], device=device)
        _, _, self.k, self.v = model.dit(
            batch.context, ones, ones.long() * FLOW, batch.actions,
            clips.rotary(self.preset, np.arange(CLIP_FRAMES), device),
            clips.on_device(clips.clean_bias(self.preset, CLIP_FRAMES), device))
        self.rotary = clips.rotary(self.preset, clips.chunk_frames(self.preset, batch.starts), device)
        self.bias = clips.on_device(clips.noisy_bias(self.preset, CLIP_FRAMES, batch.starts), device)

    def predict(self, z: Tensor, tau: Tensor, step: Tensor) -> Tensor:
        return self.model.dit(z, tau, step, self.batch.noisy_actions, self.rotary, self.bias, self.k, self.v)[0].float()

    def euler(self, z: Tensor, tau: Tensor, length: Tensor | float, row: int, steps: int = 1) -> Tensor:
        """Moves z (B, N, ...) from level tau (B, N) by ``length``, in equal steps."""
        for _ in range(steps):
            x = self.predict(z, tau, torch.full_like(tau, row, dtype=torch.long))
            z = z + (x - z) / expand(1.0 - tau) * (length / steps)
            tau = tau + length / steps
        return z


def teacher_loss(objective: Objective, episodes: Episodes, batch: Batch, generator: torch.Generator
                 ) -> tuple[Tensor, dict]:
    b = batch.target.shape[0]
    tau = objective.per_chunk(torch.rand(b, CHUNKS, device=batch.target.device, generator=generator))
    z = (1 - expand(tau)) * batch.noise + expand(tau) * batch.target
    x, noisy, clean = objective.forward(batch, z, tau, torch.full_like(tau, FLOW, dtype=torch.long))
    flow = ((0.9 * tau + 0.1) * (x - batch.target).square().mean((2, 3, 4))).mean()
    heads, values = objective.heads(episodes, batch, clean, noisy)
    return flow + 0.5 * heads, {'flow': flow, **values}


@torch.no_grad()
def student_targets(teacher: WorldModel, averaged: WorldModel, batch: Batch, objective: Objective,
                    generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws a kind of step per chunk and makes its input and target.

    Kinds: flow (as the teacher), half step from noise, half step from half-way (from the data or from the student's own
    half-way point), whole step. Returns z, tau, step rows and the target in x (B, N, ...).
    """
    b, device = batch.target.shape[0], batch.target.device
    kind = torch.randint(4, (b, CHUNKS), device=device, generator=generator)
    tau = torch.rand(b, CHUNKS, device=device, generator=generator)
    tau = torch.where(kind == 0, tau, torch.where(kind == 2, 0.5, 0.0))
    step = torch.where(kind == 0, FLOW, torch.where(kind == 3, WHOLE, HALF))
    own = torch.rand(b, CHUNKS, device=device, generator=generator) < 0.5
    kind, tau, step, own = (objective.per_chunk(v) for v in (kind, tau, step, own))
    z = (1 - expand(tau)) * batch.noise + expand(tau) * batch.target

    student = Sampler(averaged, batch)
    zero = torch.zeros_like(tau)
    half_way = student.euler(batch.noise, zero, 0.5, HALF)
    z = torch.where(expand((kind == 2) & own), half_way, z)
    whole = student.euler(half_way, zero + 0.5, 0.5, HALF)

    start = torch.where(kind == 0, 0.0, tau)  # flow needs no target from the teacher; any level will do
    end = Sampler(teacher, batch).euler(z, start, 0.5, FLOW, TEACHER_SUBSTEPS)
    half = z + expand(1.0 - start) * (end - z) / 0.5
    # From noise, the half step's target carries the noise of z with it: blend in the truth only where x is an end.
    truth = batch.target
    half = torch.where(expand(kind == 2), (1 - TRUTH_WEIGHT) * half + TRUTH_WEIGHT * truth, half)
    whole = (1 - TRUTH_WEIGHT) * whole + TRUTH_WEIGHT * truth
    target = torch.where(expand(kind == 0), truth, torch.where(expand(kind == 3), whole, half))
    return z, tau, step, target


def student_loss(objective: Objective, episodes: Episodes, batch: Batch, drawn: tuple[Tensor, Tensor, Tensor, Tensor]
                 ) -> tuple[Tensor, dict]:
    z, tau, step, target = drawn
    x, noisy, clean = objective.forward(batch, z, tau, step)
    error = (x - target).square().mean((2, 3, 4))
    flow = step == FLOW
    weight = torch.where(flow, 0.9 * tau + 0.1, 1.0)
    heads, values = objective.heads(episodes, batch, clean, noisy)
    parts = {name: (error * rows).sum() / rows.sum().clamp_min(1)
             for name, rows in (('flow', flow), ('half', step == HALF), ('whole', step == WHOLE))}
    return (weight * error).mean() + 0.5 * heads, {**parts, **values}


def train_world(model: WorldModel, episodes: Episodes, seconds: float, log: Log, teacher: WorldModel | None = None,
                batch: int = 96, rate: float = 1e-3, compile_model: bool = True, limit: int | None = None,
                seed: int = 0) -> None:
    """Trains the DiT and the heads in place and ends with the averaged weights.

    Without ``teacher`` this is the teacher's stage; with it the student's, starting from the model as it is.
    """
    device = episodes.frames.device
    generator = torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    parts = torch.nn.ModuleList([model.dit, model.action_head, model.outcome_head])
    parameters = [p for p in parts.parameters()]
    trainer = Trainer(parameters, model, seconds, rate)
    objective = Objective(model, device)
    networks = [network.dit for network in (model, trainer.averaged, teacher) if network is not None]
    if compile_model:
        for network in networks:
            network.compile()
    for step in trainer.steps(limit):
        drawn = draw(episodes, model.preset, batch, rng, generator)
        with torch.autocast(device.type, torch.bfloat16):
            if teacher is None:
                loss, values = teacher_loss(objective, episodes, drawn, generator)
            else:
                targets = student_targets(teacher, trainer.averaged, drawn, objective, generator)
                loss, values = student_loss(objective, episodes, drawn, targets)
        trainer.update(loss)
        log.add(step, values)
    model.load_state_dict(trainer.averaged.state_dict())


def frozen_copy(model: WorldModel) -> WorldModel:
    return copy.deepcopy(model).eval().requires_grad_(False)

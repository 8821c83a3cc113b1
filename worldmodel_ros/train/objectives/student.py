"""Stage ``student``: steps of length 1/2 and 1 next to the flow (shortcut models, Frans et al. 2024).

Two step lengths are served, so the half step's target is an explicit roll of the frozen teacher instead of a bootstrap
over all lengths; the whole step's is two half steps of the averaged student.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.batches import Batch, expand, mix, per_chunk
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import StudentOptions
from .sampler import ChunkSampler
from .teacher import WorldObjective


class StudentObjective(WorldObjective):
    """Distils a frozen teacher. ``averaged``: the running average of the model's weights, which makes the targets."""

    options: StudentOptions

    def __init__(self, model: WorldModel, averaged: WorldModel, teacher: WorldModel, episodes: Episodes,
                 options: StudentOptions):
        super().__init__(model, episodes, options)
        self.averaged, self.teacher = averaged, teacher

    def models(self) -> list[WorldModel]:
        return [self.model, self.averaged, self.teacher]

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        return self.draw_steps(super().draw(rng, generator), generator)

    def draw_steps(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Draw a kind of step for each chunk: flow, half step from noise, half step from tau 1/2 (of the data, or where the
        student's own first one ends), whole step."""
        shape, device = (len(batch.clean), len(batch.starts)), batch.clean.device
        kind = per_chunk(self.preset, torch.randint(4, shape, device=device, generator=generator))
        own = per_chunk(self.preset, torch.rand(shape, device=device, generator=generator) < 0.5)
        batch.tau = torch.where(kind == 0, batch.tau, torch.where(kind == 2, 0.5, 0.0))
        batch.step = torch.where(kind == 0, FLOW, torch.where(kind == 3, WHOLE, HALF))
        batch.halfway = (kind == 2) & own
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        z, target = self.targets(batch)
        x, noisy, committed = self.forward(batch, z, batch.tau, batch.step)
        error = (x - target).square().mean((2, 3, 4))
        flow = batch.step == FLOW
        weight = torch.where(flow, self.flow_weight(batch.tau), 1.0)
        heads, values = self.head_losses(batch, committed, noisy)
        parts = {name: (error * rows).sum() / rows.sum().clamp_min(1)
                 for name, rows in (('flow', flow), ('half', batch.step == HALF), ('whole', batch.step == WHOLE))}
        return (weight * error).mean() + heads, {**parts, **values}

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the noisy latents to step from, and the clean latents (B, N, ...) that each step should predict."""
        tau, zero, flow = batch.tau, torch.zeros_like(batch.tau), batch.step == FLOW
        student = ChunkSampler(self.averaged, batch)
        half_way = student.euler(batch.noise, zero, 0.5, HALF)
        whole = student.euler(half_way, zero + 0.5, 0.5, HALF)
        z = torch.where(expand(batch.halfway), half_way, mix(batch.noise, batch.target, tau))

        start = torch.where(flow, 0.0, tau)  # the flow's own target is the truth; any level will do
        roller = student if self.options.bootstrap else ChunkSampler(self.teacher, batch)
        end = roller.euler(z, start, 0.5, FLOW, self.options.substeps)
        half = z + expand(1.0 - start) * (end - z) / 0.5
        # From noise, the half step's target carries the noise of z with it: blend in the truth only where x is the endpoint.
        options, trust = self.options, expand(batch.trust)
        share = options.truth_weight if options.half_truth_weight is None else options.half_truth_weight
        half = torch.where(expand(tau == 0.5), torch.lerp(half, batch.target, share * trust), half)
        whole = torch.lerp(whole, batch.target, options.truth_weight * trust)
        target = torch.where(expand(batch.step == WHOLE), whole, half)
        return z, torch.where(expand(flow), self.flow_target(batch, z), target)

    def flow_target(self, batch: Batch, z: Tensor) -> Tensor:
        """Return what the flow's rows should predict from z: the truth."""
        return batch.target

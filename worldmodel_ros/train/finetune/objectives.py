"""Objectives of fine-tuning: augmented recordings, with the ground truth as the target of every step."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel_ros.train.data.batches import Batch, expand, mix
from worldmodel_ros.train.objectives.objective import Objective
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.self_forcing import SelfForcingObjective
from worldmodel_ros.train.objectives.student import StudentObjective
from worldmodel_ros.train.objectives.vae import VaeObjective
from ...model.sampling import HALF
from .augment import Light, mirrored


class VariedClips(VaeObjective):
    """Reconstruction of clips, half of them mirrored, each in its own light."""

    mirror = True

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        clip, noise = super().draw(rng, generator)
        clip = Light(len(clip), generator)(clip)
        if self.mirror:
            clip = mirrored(clip, torch.rand(len(clip), device=clip.device, generator=generator) < 0.5)
        return clip, noise


class _TruthAsTarget(StudentObjective):
    """Trains all kinds of steps on the ground truth.

    A teacher that has seen half a minute of a place knows less than the recording itself, and regression to the truth
    gives the mean of the possible futures, the best that few steps can do.
    """

    @torch.no_grad()
    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        z = mix(batch.noise, batch.target, batch.tau)
        half_way = ChunkSampler(self.averaged, batch).euler(batch.noise, torch.zeros_like(batch.tau), 0.5, HALF)
        return torch.where(expand(batch.halfway), half_way, z), batch.target


class Recorded(_TruthAsTarget):
    """On recorded frames as context."""


class Imagined(_TruthAsTarget, SelfForcingObjective):
    """On context that the model itself imagined from them, a chunk or more later."""


class RecordedAndImagined(Objective):
    """Recorded context for the share ``settled`` of the training, then imagined context in every second step."""

    def __init__(self, recorded: Recorded, imagined: Imagined, settled: float) -> None:
        self.recorded, self.imagined, self.settled = recorded, imagined, settled
        self.done = 0.0  # share of the training
        self._turn = False

    def parameters(self) -> list[nn.Parameter]:
        return self.recorded.parameters()

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        self._turn = not self._turn and self.done >= self.settled
        return (self.imagined if self._turn else self.recorded).draw(rng, generator)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.recorded.loss(batch)

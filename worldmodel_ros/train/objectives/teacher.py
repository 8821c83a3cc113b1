"""Stage `teacher`: flow matching in x-prediction with the ramp weight (Dreamer 4, Hafner et al. 2025), each chunk of a
clip at a noise level of its own (diffusion forcing, Chen et al. 2024)."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.train.data.batches import Batch, mix
from .objective import Objective


class TeacherObjective(Objective):
    """Predicts the true latents of chunks from noisy ones and from what was committed before."""

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        batch = super().draw(rng, generator)
        batch.blind = bool(rng.random() < self.options.blind_share)
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, noisy, committed = self.forward(batch, mix(batch.noise, batch.target, batch.tau), batch.tau, batch.step,
                                           batch.blind)
        flow = (self.flow_weight(batch.tau) * (x - batch.target).square().mean((2, 3, 4))).mean()
        beside, values = self.beside(batch, committed, noisy)
        return flow + beside, {'flow': flow, **values}

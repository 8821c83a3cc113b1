"""What a training loop minimises."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel_ros.train.data.episodes import Episodes


class Objective:
    """
    What a stage minimises; the loop draws a batch, takes the loss's gradient by ``parameters``, and calls ``after_update``.

    All randomness comes from the two generators of ``draw``. ``done``, the share of the schedule that is over, is set by the
    loop before it draws.
    """

    done = 0.0
    episodes: Episodes | None = None

    def reading(self) -> AbstractContextManager:
        """Return a context in which none of its episodes is replaced; the loop draws a batch and takes its loss in it."""
        return nullcontext() if self.episodes is None else self.episodes.reading()

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, the same in each call."""
        raise NotImplementedError

    def networks(self) -> list[nn.Module]:
        """Return the modules worth compiling."""
        return []

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Any:
        """Return a batch."""
        raise NotImplementedError

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and the values to log by name."""
        raise NotImplementedError

    def after_update(self, step: int) -> None:
        """Called after the optimiser's step, without gradients."""

    def finish(self) -> None:
        """Called when the schedule is over and the model has its averaged weights."""

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed training needs in addition to the model: tensors by name."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""

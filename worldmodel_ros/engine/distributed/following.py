"""Passes that rank 0 has begun, run by another process: their inputs come in a message, the first thing of every
pass."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from worldmodel_ros.engine.backends.cuda_graphs import Column, Eager, Graphs
from worldmodel_ros.engine.backends.pinned_inputs import Inputs
from .orders import Pass


class Received(Inputs):
    """Inputs that nobody fills but the message."""

    def fill(self, columns: Sequence[Column]) -> None:
        pass


class ReceivingGraphs(Graphs):
    inputs_type = Received


def receiving_launcher(device: torch.device) -> Eager | Graphs:
    """What runs passes on a device."""
    return ReceivingGraphs(device) if device.type == 'cuda' else Eager(device)


def stand_ins(order: Pass, device: torch.device) -> list[Column]:
    """Inputs of the right shapes and types."""
    return [[torch.zeros(shape, dtype=dtype, device=device)] for shape, dtype in order.tensors]

"""Orders from rank 0 to the other processes, sent in the sequence in which rank 0 does the same."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.engine.backends.networks import Source
from worldmodel_ros.kernels.pages import Precision

READY = 'ready'  # sent by a process when it has built its model


@dataclass(frozen=True)
class Build:
    """The first order: read the model, say READY, join the others at a port, and take a share (``kind``)."""

    source: Source
    kind: str
    rank: int
    count: int
    port: int


@dataclass(frozen=True)
class OpenStorage:
    """Make storage ``number`` for the pages of the process's own heads."""

    number: int
    layout: TileLayout
    pages: int
    precision: Precision


@dataclass(frozen=True)
class StorageNumber:
    """Stands for a storage among the arguments of ``ChangePages``."""

    number: int


@dataclass(frozen=True)
class ChangePages:
    """Call a method of a storage."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Pass:
    """Run a pass of the network (one of ``passes.PASSES``) over storages, on tensors of these shapes and types, which rank 0
    broadcasts in it."""

    network: str
    storages: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

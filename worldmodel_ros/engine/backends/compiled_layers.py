"""torch.compile for a DiT's layers, whose many small kernels it fuses."""
from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from worldmodel_ros.model.dit import DiT

PARTS = ('forward', 'enter', 'leave')  # of a layer
SHAPES = 64  # that one of them may be compiled for; beyond, torch.compile gives up and runs it as it is


def compile_layers(dit: DiT) -> None:
    """Has every layer compiled when it first meets a shape; all layers share what is compiled, since they differ in
    their weights alone."""
    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)
    for block in dit.blocks:
        for part in PARTS:
            setattr(block, part, torch.compile(getattr(block, part), dynamic=False))


def not_compiled() -> AbstractContextManager:
    """A context in which layers run as they are, for batches of several sessions: each size would be compiled anew,
    which takes longer than starting a service may."""
    return torch.compiler.set_stance('force_eager')

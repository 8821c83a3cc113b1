"""Layers of a Wan network in FP8: weights in e4m3 by rows, activations rounded row by row on the fly.

Layers and kernels are those of the small model's network (``model.precision``). What is computed once per prompt or per chunk,
and all that is not a product, stays as it is, except the first two of the camera's three products per layer: the third
computes factors of the residual stream, and rounding it would cost as much accuracy as all others together.
"""
from __future__ import annotations

from ..precision import Fp8Linear
from .dit import WanDiT

LINEARS = ('qkv', 'proj', 'cross_q', 'cross_proj', 'ffn.0', 'ffn.2')
CAMERA = ('camera.first', 'camera.second')


def to_fp8(dit: WanDiT) -> WanDiT:
    """Replace the layers of a network with loaded weights, one by one, so that not all are in memory twice."""
    for block in dit.blocks:
        for name in LINEARS if block.camera is None else LINEARS + CAMERA:
            block.set_submodule(name, Fp8Linear(block.get_submodule(name)))
        block.fp8 = True
    return dit

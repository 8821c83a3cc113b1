"""The layers of a Wan network in FP8: weights in e4m3 by rows, activations rounded row by row on the way.

As for the small model's network (``model.precision``), whose layers and kernels these are. What is computed once a prompt or
once a chunk, and all that is not a product, stays as it is, but for the first two of the camera's four products of a layer: the
other two make factors of the residual stream, and rounding them would cost as much accuracy as all others together.
"""
from __future__ import annotations

from ..precision import Fp8Linear
from .dit import WanDiT

LINEARS = ('qkv', 'proj', 'cross_q', 'cross_proj', 'ffn.0', 'ffn.2')
CAMERA = ('camera.first', 'camera.second')


def to_fp8(dit: WanDiT) -> WanDiT:
    """Replace the layers of a network whose weights are loaded, one by one, so that not all are in memory twice."""
    for block in dit.blocks:
        for name in LINEARS if block.camera is None else LINEARS + CAMERA:
            block.set_submodule(name, Fp8Linear(block.get_submodule(name)))
        block.fp8 = True
    return dit

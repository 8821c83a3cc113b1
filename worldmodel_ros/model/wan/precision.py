"""The layers of a Wan network in FP8: weights in e4m3 by rows, activations rounded row by row on the way.

As for the small model's network (`model.precision`), but the rounding is PyTorch's own, which `WanDiT.compile` joins with what
comes before it. What is computed once a prompt or once a chunk, and all that is not a product, stays as it is.
"""
from __future__ import annotations

from torch import Tensor

from ...kernels.linear import fp8_linear
from ...kernels.rows import quantise_rows
from ..precision import Fp8Linear
from .dit import WanDiT

LINEARS = ('qkv', 'proj', 'cross_q', 'cross_proj', 'ffn.0', 'ffn.2')


class Fp8Rows(Fp8Linear):
    """An nn.Linear in e4m3 that rounds each row of its input by its own scale."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(quantise_rows(x), self.weight, self.weight_scale, self.bias, self.dtype)


def to_fp8(dit: WanDiT) -> WanDiT:
    """Replaces the layers of a network whose weights are loaded, one by one, so that not all are in memory twice."""
    for block in dit.blocks:
        for name in LINEARS:
            block.set_submodule(name, Fp8Rows(block.get_submodule(name)))
    return dit

"""One network on several processes, each with some heads and some hidden units (Megatron-LM, Shoeybi et al. 2019).

``checkpoint.tensor_share`` names what a process reads of the weights, and pages hold its heads alone. What is summed over the
processes: three products of a layer, and the mean squares that queries and keys are normalised by, since these networks
normalise over all heads of a token.
"""
from __future__ import annotations

from ..parallel.group import TensorParallel
from ..parallel.tensor_parallel import SummedProducts
from .dit import WanDiT


def join(dit: WanDiT, group: TensorParallel) -> WanDiT:
    """Make layers that have their share of the weights sum what they have parts of; in place, and after ``precision.to_fp8``.

    The network's pages are made with the same ``group``. What a pass returns is the same in all processes.
    """
    for block in dit.blocks:
        block.heads //= group.count
        block.group = group
        block.proj, block.cross_proj = SummedProducts(block.proj, group), SummedProducts(block.cross_proj, group)
        block.ffn[2] = SummedProducts(block.ffn[2], group)
    return dit

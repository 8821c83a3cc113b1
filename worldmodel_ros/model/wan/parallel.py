"""One network on several processes: by weights, or by tokens.

* By weights (Megatron-LM, Shoeybi et al. 2019): each has some heads and some hidden units, and all tokens.
  ``checkpoint.tensor_share`` names what a process reads. Summed over the processes are three products per layer, and the mean
  squares that normalise queries and keys, since these networks normalise over all heads of a token.
* By tokens (Ulysses, Jacobs et al. 2023): each has all weights, and a run of the chunk's tokens, padded to equal runs. Only
  attention to the window leaves the run: a layer exchanges its tokens of all heads for all tokens of its heads, and back.
  Products for other processes are computed first, and sent while those for own heads are computed (``ExchangedProducts``). The
  camera's scales and shifts are computed for own tokens only.

In both, pages hold own heads; they are created with the same group.
"""
from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..parallel.group import ExchangedProducts, Group, SequenceParallel, TensorParallel
from ..parallel.tensor_parallel import SummedProducts
from .dit import WanDiT


def join(dit: WanDiT, group: Group) -> WanDiT:
    """Make a network work with those of the other processes, in place, and after ``precision.to_fp8``; for a group by
    weights it has its share of them. A pass returns the same in all processes."""
    if isinstance(group, SequenceParallel):
        dit.run = Run(group)
        for block in dit.blocks:
            block.qkv = ExchangedProducts(block.qkv, group, block.head_dim)
    elif isinstance(group, TensorParallel):
        for block in dit.blocks:
            block.heads //= group.count
            block.group = group
            block.proj, block.cross_proj = SummedProducts(block.proj, group), SummedProducts(block.cross_proj, group)
            block.ffn[2] = SummedProducts(block.ffn[2], group)
    return dit


class Run:
    """This process's run of a chunk's tokens."""

    def __init__(self, group: SequenceParallel):
        self._group = group

    def own(self, rows: Tensor) -> Tensor:
        """Return its rows (n, D) of all (N, D), zero-padded if they do not divide."""
        return self._group.own(F.pad(rows, (0, 0, 0, -len(rows) % self._group.count)), 0)

    def whole(self, rows: Tensor, count: int) -> Tensor:
        """Return all (count, D), from every process's own."""
        return self._group.gather(rows, 0)[:count]

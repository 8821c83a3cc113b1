"""FlexAttention under a mask of tiles: blocks that the mask leaves out are not computed."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_compiled = torch.compile(flex_attention, dynamic=False)  # uncompiled, it computes and masks everything

BLOCK = 128  # tokens along each side of a block that is computed or left out


class FlexMask:
    """Attention where ``units`` (rows, columns), bool, says which unit of ``unit`` tokens sees which."""

    def __init__(self, units: Tensor, unit: int):
        lengths = tuple(size * unit for size in units.shape)
        if unit % BLOCK == 0:
            times = unit // BLOCK
            whole = some = units.repeat_interleave(times, 0).repeat_interleave(times, 1)
        else:
            rows, columns = (-(-size * unit // BLOCK) for size in units.shape)
            side = BLOCK // unit
            units = F.pad(units, (0, columns * side - units.shape[1], 0, rows * side - units.shape[0]))
            cells = units.view(rows, side, columns, side)
            whole, some = cells.all(3).all(1), cells.any(3).any(1)
        self.mask = BlockMask.from_kv_blocks(*_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK,
                                             mask_mod=_seen(units, unit), seq_lengths=lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q (B, H, L, d) to k and v (B, H, S, d), for the mask's lengths L and S; return (B, H, L, d)."""
        flex = _compiled if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=self.mask)


def _seen(units: Tensor, unit: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return units[q // unit, kv // unit]
    return mask


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, int32 (1, 1, rows), and which, listed first, int32 (1, 1, rows, columns)."""
    order = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

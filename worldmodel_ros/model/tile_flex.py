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
        rows, columns = (-(-length // BLOCK) for length in lengths)
        # Beyond the last token, nothing is seen.
        end_row, end_column = ((count * BLOCK - 1) // unit + 1 for count in (rows, columns))
        units = F.pad(units, (0, end_column - units.shape[1], 0, end_row - units.shape[0]))
        (top, bottom), (left, right) = (_units_of_blocks(count, unit, units.device) for count in (rows, columns))
        sums = F.pad(units.int().cumsum(0).cumsum(1), (1, 0, 1, 0))
        strips = sums[bottom] - sums[top]
        seen = strips[:, right] - strips[:, left]
        some, whole = seen > 0, seen == (bottom - top)[:, None] * (right - left)
        self.mask = BlockMask.from_kv_blocks(*_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK,
                                             mask_mod=_seen(units, unit), seq_lengths=lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q (B, H, L, d) to k and v (B, H, S, d), for the mask's lengths L and S; return (B, H, L, d)."""
        flex = _compiled if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=self.mask)


def _units_of_blocks(count: int, unit: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for ``count`` blocks, the first unit that each has tokens of, and the first one behind it."""
    first = torch.arange(count, device=device) * BLOCK
    return first // unit, (first + BLOCK - 1) // unit + 1


def _seen(units: Tensor, unit: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return units[q // unit, kv // unit]
    return mask


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, int32 (1, 1, rows), and which, listed first, int32 (1, 1, rows, columns)."""
    order = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

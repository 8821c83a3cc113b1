"""``splits.merge`` in one launch: each part is read once."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast


def merge_triton(parts: Tensor, lse: Tensor, splits: int, tokens: int) -> Tensor:
    """As ``splits.merge``, for parts and lse contiguous."""
    rows, heads, dim = parts.shape
    if not parts.is_contiguous() or not lse.is_contiguous() or lse.shape != (heads, rows) or rows % splits:
        raise ValueError(f'parts {tuple(parts.shape)} and lse {tuple(lse.shape)} must be contiguous, of {splits} times as '
                         f'many rows')
    width = heads * dim
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    block = min(2048, triton.next_power_of_2(width))
    _merge[(tokens, triton.cdiv(width, block))](parts, lse, out, rows, rows // splits, SPLITS=splits, WIDTH=width, D=dim,
                                                BLOCK=block, num_warps=4)
    return out


@triton.jit
def _merge(parts, lse, out, rows, each, SPLITS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < WIDTH
    sums = lse + (d // D).to(tl.int64) * rows + row
    top = tl.load(sums, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(sums + part * each, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(sums + part * each, mask=inside, other=0.0) - top)
        total += weight
        whole += weight * tl.load(parts + (row + part * each) * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + d, cast(whole / total, out.dtype.element_ty), mask=inside)

"""``splits.merge`` in one launch: each part is read once."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import native_e4m3
from .pools_triton import as_bytes
from .quantise import FP8_MAX
from .rows import Rounded
from .rows_triton import blocks, results, store_row, warps
from .splits import check


def merge_triton(parts: Tensor, lse: Tensor, splits: int, tokens: int, fp8: bool = False, first: int = 0,
                 out: Tensor | None = None) -> Tensor | Rounded:
    """As ``splits.merge``, for parts and lse contiguous, and ``out`` with contiguous rows."""
    rows, heads, dim = parts.shape
    width = heads * dim
    check(parts, lse, splits, tokens, fp8, first, out)
    if not parts.is_contiguous() or not lse.is_contiguous() or (out is not None and out.stride(1) != 1):
        raise ValueError('parts, lse and the rows of out must be contiguous')
    scales = None
    if out is None:
        out, scales = results(parts.view(rows, width)[:tokens], fp8)
    _merge[(tokens,)](parts, lse, as_bytes(out), scales, rows, rows // splits, first, out.stride(0), SPLITS=splits,
                      WIDTH=width, D=dim, **blocks(width), LIMIT=FP8_MAX, NATIVE=native_e4m3(parts.device),
                      num_warps=warps(width))
    return (out, scales) if fp8 else out


@triton.jit
def _merge(parts, lse, out, scales, rows, each, first, out_stride, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
           D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    merged, largest, fault = (), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):
        d = block * BLOCK + tl.arange(0, BLOCK)
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
        whole /= total
        merged = merged + (whole,)
        largest = tl.maximum(largest, tl.abs(whole))
        fault += whole * 0.0
    out += place * (out_stride - WIDTH)  # to which a row's place times its width is added
    store_row(merged, out, scales, None, 0, tl.max(largest, 0) + tl.sum(fault, 0), place, WIDTH, BLOCK, LIMIT, NATIVE)

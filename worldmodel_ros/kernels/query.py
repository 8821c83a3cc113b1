"""Queries in FP8, with a scale for each token and head, as the product with FP8 keys takes them."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import largest_magnitude, native_e4m3, scale_for, to_e4m3
from .pools_triton import as_bytes
from .quantise import FP8_MAX


@triton.jit
def _quantise(q, out, scales, rows, D: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr,
              NATIVE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = row < rows
    x = tl.load(q + at, mask=inside[:, None], other=0.0).to(tl.float32)
    scale, inverse = scale_for(largest_magnitude(x, 1), LIMIT)
    tl.store(out + at, to_e4m3(x * inverse[:, None], NATIVE), mask=inside[:, None])
    tl.store(scales + row, scale, mask=inside)


def quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise q (tokens, H, D), contiguous, to e4m3 of the same shape and float32 scales (tokens, H)."""
    out = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    scales = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = scales.numel()
    block = 32
    _quantise[(triton.cdiv(rows, block),)](q, as_bytes(out), scales, rows, D=q.shape[-1], ROWS=block, LIMIT=FP8_MAX,
                                           NATIVE=native_e4m3(q.device))
    return out, scales

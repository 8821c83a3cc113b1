"""Queries in FP8, with a scale for each token and head: the product with FP8 keys takes them so."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantise import FP8_MAX


@triton.jit
def _kernel(q, out, scales, rows, D: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = row < rows
    x = tl.load(q + at, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / LIMIT
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(out + at, (x / scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(scales + row, scale, mask=inside)


def quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """q (tokens, H, D) contiguous, to e4m3 of the same shape and float32 scales (tokens, H)."""
    out = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    scales = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = scales.numel()
    block = 32
    _kernel[(triton.cdiv(rows, block),)](q, out, scales, rows, D=q.shape[-1], ROWS=block, LIMIT=FP8_MAX)
    return out, scales

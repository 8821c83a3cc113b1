"""``cross_attention.cross_attention`` in two launches: one for RMSNorm's factors, one for all else."""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import INTERPRETED, cast, native_e4m3, to_e4m3
from .pools_triton import as_bytes
from .rows import Rounded
from .rows_triton import inverse_rms, results

# Queries per program, keys per step; so few keys that the registers have room for two programs at a time.
BLOCK_M, BLOCK_N, WARPS, STAGES = 128, 32, 8, 2


def cross_attention_triton(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, eps: float, static: Tensor | None = None,
                           rms: Tensor | None = None) -> Tensor | Rounded:
    """As ``cross_attention.cross_attention``, for D a power of two, all contiguous. Queries are multiplied as they are:
    RMSNorm's factors are applied to their logits."""
    heads, count, dim = keys.shape
    if q.shape[1] != heads * dim or dim & (dim - 1) or not all(
            x.is_contiguous() for x in (q, keys, values, bias)) or keys.shape != values.shape:
        raise ValueError(f'q {tuple(q.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} must be contiguous, '
                         f'heads of a power of two')
    rms = inverse_rms(q[:, None], eps) if rms is None else rms
    out, scales = results(q, static is not None)
    exact = INTERPRETED.value or q.dtype is torch.float32  # the interpreter computes wrongly in bfloat16
    _attend[(triton.cdiv(len(q), BLOCK_M), heads)](
        q, rms, keys, values, bias, as_bytes(out), scales, static, len(q), count,
        math.log2(math.e) / math.sqrt(dim), math.log2(math.e), H=heads, D=dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        TYPE=tl.float32 if exact else tl.bfloat16, NATIVE=native_e4m3(q.device), num_warps=WARPS, num_stages=STAGES)
    return out if static is None else (out, scales)


@triton.jit
def _attend(q, rms, keys, values, bias, out, scales, static, tokens, count, scale_log2, log2_e, H: tl.constexpr,
            D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    there = row < tokens
    at = row.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    queries = tl.load(q + at, mask=there[:, None], other=0.0).to(TYPE)
    factor = (tl.load(rms + row, mask=there, other=0.0) * scale_log2)[:, None]
    m = tl.full([BLOCK_M], -float('inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        some = key < count
        place = head * count * D + key[:, None] * D + d[None, :]
        k = tl.load(keys + place, mask=some[:, None], other=0.0).to(TYPE)
        v = tl.load(values + place, mask=some[:, None], other=0.0).to(TYPE)
        s = tl.dot(queries, tl.trans(k), input_precision='ieee') * factor
        s += tl.load(bias + key, mask=some, other=-float('inf')).to(tl.float32)[None, :] * log2_e
        top = tl.maximum(m, tl.max(s, 1))  # finite from the first block on: its first key is one of the text
        p = tl.exp2(s - top[:, None])
        decay = tl.exp2(m - top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(cast(p, TYPE), v, acc * decay[:, None], input_precision='ieee')
        m = top
    if scales is None:
        tl.store(out + at, cast(acc / total[:, None], out.dtype.element_ty), mask=there[:, None])
    else:
        scale = tl.load(static)
        acc *= (1.0 / (total * scale))[:, None]
        tl.store(out + at, to_e4m3(acc, NATIVE), mask=there[:, None])
        # All heads write the same; non-finite results show in the values, as NaN.
        tl.store(scales + row, tl.zeros([BLOCK_M], tl.float32) + scale, mask=there)

"""Paged attention in Triton, for any CUDA GPU from compute capability 8.0 on: ``reference.paged_attention``, compiled.

A program holds a block of queries of one tile and head, visits the pages in the tile's lists, pool by pool, and keeps one
online softmax over all of them (FlashAttention-2, Dao 2023). Quantised pages are decoded in registers to the type of the matrix
products, which is exact; a page's scales are multiplied into its logits and probabilities.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast, from_e2m1, from_e4m3, native_e4m3, token_order
from .pages import Pool, TileLists
from .pools_triton import FP4, FP8, PLAIN, arguments_by_kind, check_queries, product_type


def paged_attention_triton(q: Tensor, pools: list[Pool], lists: list[TileLists], scale: float | None = None,
                           out: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
    """As ``reference.paged_attention``, in one launch, with at most one FP8, one FP4 and one other pool.

    q (query tiles * N, H, D), bfloat16 or float32, tile after tile, D contiguous; N a multiple of 16, D a power of two from 16
    to 128. Writes to ``out``, of q's shape and type, and returns it. ``lse`` (H, query tiles * N), float32, if given, receives
    the base-2 logarithm of the sum of the exponentiated scaled logits, as needed to merge two results; -inf for a tile that
    lists nothing. The matrix products are in bfloat16, or in float32 if q or a pool is.
    """
    (heads, dim), tokens, tiles = q.shape[1:], pools[0].page_tokens, max(1, lists[0].query_tiles)
    for pool, table in zip(pools, lists, strict=True):
        page = (pool.heads, pool.page_tokens, pool.head_dim)
        if page != (heads, tokens, dim) or table.query_tiles != lists[0].query_tiles or len(q) % (16 * tiles):
            raise ValueError(f'q {tuple(q.shape)} does not fit {table.query_tiles} query tiles and '
                             f'{pool.precision.value} pages of (heads, tokens, width) {page}')
    check_queries(q)
    arguments = arguments_by_kind(pools, [(table.starts, table.pages, table.lengths, table.full) for table in lists])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f'out must be contiguous {q.dtype} {tuple(q.shape)}, like q, not {out.dtype} '
                         f'{tuple(out.shape)}')
    if lse is not None and (lse.shape != (heads, len(q)) or lse.dtype != torch.float32 or not lse.is_contiguous()):
        raise ValueError(f'lse must be contiguous float32 {(heads, len(q))}, not {lse.dtype} {tuple(lse.shape)}')
    if not len(q):
        return out
    product = product_type(q, pools)
    queries = len(q) // tiles
    block_m, block_n, warps, stages = _blocks(math.gcd(tokens, queries), dim, product, q.device)
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    _attention[(len(q) // block_m, heads)](
        q, out, lse, *arguments, q.stride(0), q.stride(1), len(q), scale * math.log2(math.e), Q=queries, T=tokens,
        H=heads, D=dim, BLOCK_M=block_m, BLOCK_N=block_n, TYPE=product, NATIVE=native_e4m3(q.device), STAGES=stages,
        num_warps=warps)
    return out


def _blocks(tokens: int, dim: int, product: tl.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """Return queries per program, keys per step, warps, and pipeline stages. Blocks are powers of two that divide
    ``tokens``, as large as registers and, on the smallest GPUs, 99 KiB of shared memory allow."""
    divisor = tokens & -tokens
    if product == tl.float32:
        return min(divisor, 32), min(divisor, 32), 8, 1
    if device.type == 'cuda' and torch.cuda.get_device_capability(device) < (9, 0):
        return min(divisor, 64), min(divisor, 32), 4, 2
    block_m = min(divisor, 128)
    return block_m, min(divisor, 64), 8 if block_m * dim >= 128 * 64 else 4, 3


@triton.jit
def _attention(q, out, lse, plain, fp8, fp4, q_token, q_head, tokens, scale_log2, Q: tl.constexpr, T: tl.constexpr,
               H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr,
               NATIVE: tl.constexpr, STAGES: tl.constexpr):
    head = tl.program_id(1)
    tile = tl.program_id(0) * BLOCK_M // Q
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    queries = tl.load(q + row.to(tl.int64)[:, None] * q_token + head * q_head + d[None, :]).to(TYPE)
    m = tl.full([BLOCK_M], -float('inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    if plain is not None:
        acc, m, total = _pool(acc, m, total, queries, plain, tile, head, scale_log2, PLAIN, T, H, D, BLOCK_N, TYPE,
                              NATIVE, STAGES)
    if fp8 is not None:
        acc, m, total = _pool(acc, m, total, queries, fp8, tile, head, scale_log2, FP8, T, H, D, BLOCK_N, TYPE, NATIVE,
                              STAGES)
    if fp4 is not None:
        acc, m, total = _pool(acc, m, total, queries, fp4, tile, head, scale_log2, FP4, T, H, D, BLOCK_N, TYPE, NATIVE,
                              STAGES)
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc / total[:, None]
    at = (row.to(tl.int64)[:, None] * H + head) * D + d[None, :]
    tl.store(out + at, cast(acc, out.dtype.element_ty))
    if lse is not None:
        tl.store(lse + head * tokens + row, m + tl.log2(total))


@triton.jit
def _pool(acc, m, total, queries, pool, tile, head, scale_log2, KIND: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
          D: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr):
    """Visit a tile's row of one pool: the full pages without a mask, then the others."""
    begin = tl.load(pool[0] + tile)
    end = tl.load(pool[0] + tile + 1)
    whole = begin + tl.load(pool[3] + tile)
    acc, m, total = _pages(acc, m, total, queries, pool, begin, whole, head, scale_log2, False, KIND, T, H, D, BLOCK_N,
                           TYPE, NATIVE, STAGES)
    return _pages(acc, m, total, queries, pool, whole, end, head, scale_log2, True, KIND, T, H, D, BLOCK_N, TYPE,
                  NATIVE, STAGES)


@triton.jit
def _pages(acc, m, total, queries, pool, begin, end, head, scale_log2, MASKED: tl.constexpr, KIND: tl.constexpr,
           T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr,
           NATIVE: tl.constexpr, STAGES: tl.constexpr):
    """Run one step of the online softmax for each block of each page of a part of a list."""
    pages, lengths, k, v = pool[1], pool[2], pool[4], pool[5]
    STEPS: tl.constexpr = T // BLOCK_N
    d = tl.arange(0, D)
    # Columns of logits and probabilities are in the page's order of v; k's rows follow it.
    place = tl.arange(0, BLOCK_N)
    within = place
    if KIND != PLAIN:
        within = token_order(place)
    for step in tl.range(begin * STEPS, end * STEPS, num_stages=STAGES):
        entry, first = step // STEPS, step % STEPS * BLOCK_N
        unit = tl.load(pages + entry).to(tl.int64) * H + head
        k_row = unit * T + first + within[:, None]
        logit_scale = scale_log2
        if KIND == PLAIN:
            keys = tl.load(k + k_row * D + d[None, :]).to(TYPE)
            values = tl.load(v + (unit * T + first + place[:, None]) * D + d[None, :]).to(TYPE)
        else:
            logit_scale *= tl.load(pool[6] + unit)
            v_row = unit * D + d[:, None]
            if KIND == FP8:
                keys = from_e4m3(tl.load(k + k_row * D + d[None, :]), TYPE, NATIVE)
                values = from_e4m3(tl.load(v + v_row * T + first + place[None, :]), TYPE, NATIVE)
            else:
                pair = tl.arange(0, D // 2)
                block = tl.arange(0, D // 16)
                keys = cast(from_e2m1(tl.load(k + k_row * (D // 2) + pair[None, :]),
                                      tl.load(pool[8] + k_row * (D // 16) + block[None, :]), BLOCK_N, D), TYPE)
                pair = first // 2 + tl.arange(0, BLOCK_N // 2)
                block = first // 16 + tl.arange(0, BLOCK_N // 16)
                values = cast(from_e2m1(tl.load(v + v_row * (T // 2) + pair[None, :]),
                                        tl.load(pool[9] + v_row * (T // 16) + block[None, :]), D, BLOCK_N), TYPE)
            values = tl.trans(values)
        s = tl.dot(queries, tl.trans(keys), input_precision='ieee') * logit_scale
        if MASKED:
            s = tl.where(first + within[None, :] < tl.load(lengths + entry), s, -float('inf'))
        top = tl.maximum(m, tl.max(s, 1))
        if MASKED:
            # Where nothing was valid so far, -inf - -inf would be NaN.
            base = tl.where(top == -float('inf'), 0.0, top)
        else:
            base = top
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(m - base)
        total = total * decay + tl.sum(p, 1)
        if KIND != PLAIN:
            p = p * tl.load(pool[7] + unit)
        acc = tl.dot(cast(p, TYPE), values, acc * decay[:, None], input_precision='ieee')
        m = top
    return acc, m, total

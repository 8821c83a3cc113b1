"""`page_write.write_qkv` in one launch: what the projection wrote is read, and each result written, once from memory.

A program has the queries, the keys or the values of one tile and head. Keys and values of a quantised page are gone
through twice, for the page's scale and then for its values; the second time they come from the cache.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import (
    LIMITS, cast, largest_magnitude, native_e4m3, scale_for, store_quantised, to_e4m3, token_order)
from .page_write import check
from .pages import Pool
from .pools_triton import as_bytes
from .quantise import FP8_MAX


def write_qkv_triton(pool: Pool, pages: Tensor, counts: Tensor, qkv: Tensor, rotary: Tensor, q_weight: Tensor,
                     k_weight: Tensor, offsets: Tensor | None = None, quantise_q: bool = False, eps: float = 1e-6,
                     by_frame: tuple[int, int] | None = None) -> tuple[Tensor, Tensor | None]:
    """As `page_write.write_qkv`, for D a power of two and rotary and weights contiguous."""
    check(pool, pages, qkv, rotary, offsets, by_frame)
    heads, dim = pool.heads, pool.head_dim
    if dim & (dim - 1) or qkv.stride(3) != 1:
        raise ValueError(f'qkv {tuple(qkv.shape)} with strides {qkv.stride()}: the last axis must be contiguous and '
                         f'its size a power of two')
    q = torch.empty((len(qkv), heads, dim), dtype=torch.float8_e4m3fn if quantise_q else qkv.dtype, device=qkv.device)
    q_scale = torch.empty((len(qkv), heads), dtype=torch.float32, device=qkv.device) if quantise_q else None
    tokens = len(qkv) // len(pages)
    frames, of_frame = by_frame or (1, 1)
    _write[(len(pages), heads, 3)](
        qkv, rotary, q_weight, k_weight, as_bytes(q), q_scale, *map(as_bytes, (pool.k, pool.v)), pool.k_scale,
        pool.v_scale, pool.k_exponent, pool.v_exponent, pages, counts, offsets, *qkv.stride()[:3], len(qkv), eps,
        N=tokens, RUN=tokens // frames, TILES=of_frame, T=pool.page_tokens, H=heads, D=dim,
        BLOCK=min(4096 // dim, pool.page_tokens & -pool.page_tokens), LIMIT=LIMITS.get(pool.precision),
        QUERY_LIMIT=FP8_MAX, NATIVE=native_e4m3(qkv.device), num_warps=8)
    return q, q_scale


@triton.jit
def _write(qkv, rotary, q_weight, k_weight, q, q_scale, k, v, k_scale, v_scale, k_exponent, v_exponent, pages, counts,
           offsets, token_stride, part_stride, head_stride, tokens, eps, N: tl.constexpr, RUN: tl.constexpr,
           TILES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
           LIMIT: tl.constexpr, QUERY_LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    tile, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first = tile // TILES * (TILES * N) + tile % TILES * RUN  # row of the tile's first token
    source = qkv + first * token_stride + part * part_stride + head * head_stride
    angles = rotary + first * (D // 2)
    sines = tokens * (D // 2)
    count = tl.load(counts + tile)
    unit = tl.load(pages + tile).to(tl.int64) * H + head
    offset = 0
    if offsets is not None:
        offset = tl.load(offsets + tile)
    if part == 0:
        _queries(source, angles, sines, q_weight, q, q_scale, tile, head, count, token_stride, eps, N, RUN, TILES, H, D,
                 BLOCK, QUERY_LIMIT, NATIVE)
    elif part == 1:
        if LIMIT is None:
            _plain(source, angles, sines, k_weight, k, unit, count, offset, token_stride, eps, RUN, TILES, T, D, BLOCK,
                   True)
        else:
            _keys(source, angles, sines, k_weight, k, k_scale, k_exponent, unit, count, token_stride, eps, RUN, TILES,
                  T, D, BLOCK, LIMIT, NATIVE)
    else:
        if LIMIT is None:
            _plain(source, angles, sines, k_weight, v, unit, count, offset, token_stride, eps, RUN, TILES, T, D, BLOCK,
                   False)
        else:
            _values(source, v, v_scale, v_exponent, unit, count, token_stride, RUN, TILES, T, D, BLOCK, LIMIT, NATIVE)


@triton.jit
def _row(token, RUN: tl.constexpr, TILES: tl.constexpr):
    """Rows of a tile's tokens behind its first one's: ``RUN`` tokens of every tile of a frame follow one another."""
    return token // RUN * (TILES * RUN) + token % RUN


@triton.jit
def normalised(source, angles, sines, weight, token, there, token_stride, eps, D: tl.constexpr):
    """Tokens (BLOCK,) of queries or keys, normalised and rotated, float32 (BLOCK, D); zero where not ``there``."""
    HALF: tl.constexpr = D // 2
    BLOCK: tl.constexpr = token.shape[0]
    d = tl.arange(0, HALF)[None, :]
    mask = there[:, None]
    row = source + token.to(tl.int64)[:, None] * token_stride + d
    a = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    a *= norm * tl.load(weight + d).to(tl.float32)
    b *= norm * tl.load(weight + HALF + d).to(tl.float32)
    angle = angles + token[:, None] * HALF + d
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + sines, mask=mask, other=0.0)
    # Selected once more at the end, lest zero become -0.
    a, b = tl.where(mask, a * cos - b * sin, 0.0), tl.where(mask, a * sin + b * cos, 0.0)
    return tl.join(a, b).permute(0, 2, 1).reshape(BLOCK, D)


@triton.jit
def _raw(source, token, there, token_stride, D: tl.constexpr):
    at = source + token.to(tl.int64)[:, None] * token_stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)


@triton.jit
def _queries(source, angles, sines, weight, q, q_scale, tile, head, count, token_stride, eps, N: tl.constexpr,
             RUN: tl.constexpr, TILES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
             LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    for first in range(0, N, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = normalised(source, angles, sines, weight, _row(token, RUN, TILES), token < count, token_stride, eps, D)
        row = (tile * N + token) * H + head
        at = row[:, None] * D + tl.arange(0, D)[None, :]
        inside = token < N
        if q_scale is None:
            tl.store(q + at, cast(x, q.dtype.element_ty), mask=inside[:, None])
        else:
            scale, inverse = scale_for(largest_magnitude(x, 1), LIMIT)
            tl.store(q + at, to_e4m3(x * inverse[:, None], NATIVE), mask=inside[:, None])
            tl.store(q_scale + row, scale, mask=inside)


@triton.jit
def _plain(source, angles, sines, weight, out, unit, count, offset, token_stride, eps, RUN: tl.constexpr,
           TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Keys or values to an unquantised page, from a place on."""
    for first in range(0, T, BLOCK):
        place = first + tl.arange(0, BLOCK)
        token = place - offset
        there = (token >= 0) & (token < count)
        if KEYS:
            x = normalised(source, angles, sines, weight, _row(token, RUN, TILES), there, token_stride, eps, D)
        else:
            x = _raw(source, _row(token, RUN, TILES), there, token_stride, D)
        at = (unit * T + place)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(out + at, cast(x, out.dtype.element_ty), mask=(token >= 0)[:, None])


@triton.jit
def _keys(source, angles, sines, weight, k, k_scale, k_exponent, unit, count, token_stride, eps, RUN: tl.constexpr,
          TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
          NATIVE: tl.constexpr):
    largest = tl.zeros([D], tl.float32)
    for first in range(0, count, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = normalised(source, angles, sines, weight, _row(token, RUN, TILES), token < count, token_stride, eps, D)
        largest = tl.maximum(largest, largest_magnitude(x, 0), propagate_nan=tl.PropagateNan.ALL)
    scale, inverse = scale_for(largest_magnitude(largest, 0), LIMIT)
    tl.store(k_scale + unit, scale)
    for first in range(0, T, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = normalised(source, angles, sines, weight, _row(token, RUN, TILES), token < count, token_stride, eps, D)
        store_quantised(x * inverse, k, k_exponent, unit * T + token, 0, BLOCK, D, D, NATIVE)


@triton.jit
def _values(source, v, v_scale, v_exponent, unit, count, token_stride, RUN: tl.constexpr, TILES: tl.constexpr,
            T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    largest = tl.zeros([D], tl.float32)
    for first in range(0, count, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _raw(source, _row(token, RUN, TILES), token < count, token_stride, D)
        largest = tl.maximum(largest, largest_magnitude(x, 0), propagate_nan=tl.PropagateNan.ALL)
    scale, inverse = scale_for(largest_magnitude(largest, 0), LIMIT)
    tl.store(v_scale + unit, scale)
    for first in range(0, T, BLOCK):
        token = token_order(first + tl.arange(0, BLOCK))
        x = tl.trans(_raw(source, _row(token, RUN, TILES), token < count, token_stride, D))
        store_quantised(x * inverse, v, v_exponent, unit * D + tl.arange(0, D), first, D, BLOCK, T, NATIVE)

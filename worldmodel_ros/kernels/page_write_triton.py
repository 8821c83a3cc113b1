"""``page_write.write_qkv``: the projection's output is read from memory once, and each result written once.

A program has some queries, keys or values of one tile and head; of a quantised page it holds all keys or values in its
registers, since the page's scale is known only after the last. Queries are written separately, by programs of which many are in
flight on a processor.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import (
    LIMITS, cast, from_e4m3, largest_magnitude, native_e4m3, scale_for, store_quantised, to_e4m3, token_order)
from .page_write import check
from .pages import Pool, Precision
from .pools_triton import as_bytes
from .quantise import FP8_MAX

# Values per program that streams, and per thread of it; and per thread of one that holds a page.
STREAM, STREAM_VALUES, PAGE_VALUES = 4096, 16, {Precision.FP8: 64, Precision.FP4: 32}


def write_qkv_triton(pool: Pool, pages: Tensor, counts: Tensor, qkv: Tensor, rotary: Tensor, q_weight: Tensor,
                     k_weight: Tensor, offsets: Tensor | None = None, quantise_q: bool = False, eps: float = 1e-6,
                     by_frame: tuple[int, int] | None = None, scale: Tensor | None = None,
                     dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """As ``page_write.write_qkv``, for D a power of two, and scale, weights and each half of rotary contiguous."""
    check(pool, pages, qkv, rotary, offsets, by_frame, scale, dtype)
    heads, dim = pool.heads, pool.head_dim
    if dim & (dim - 1) or qkv.stride(3) != 1:
        raise ValueError(f'qkv {tuple(qkv.shape)} with strides {qkv.stride()}: the last axis must be contiguous and '
                         f'its size a power of two')
    if not rotary[0].is_contiguous() or not (scale is None or scale.is_contiguous()):
        raise ValueError(f'rotary with strides {rotary.stride()}, and scale: scale must be contiguous, and each half of rotary')
    dtype = torch.float8_e4m3fn if quantise_q else dtype or qkv.dtype
    q = torch.empty((len(qkv), heads, dim), dtype=dtype, device=qkv.device)
    q_scale = torch.empty((len(qkv), heads), dtype=torch.float32, device=qkv.device) if quantise_q else None
    tokens = len(qkv) // len(pages)
    frames, of_frame = by_frame or (1, 1)
    places = triton.next_power_of_2(pool.page_tokens)

    def launch(first: int, parts: int, block: int, values: int) -> None:
        pieces = triton.cdiv(places, block)
        _write[(heads, parts, len(pages) * pieces)](
            as_bytes(qkv), scale, rotary, q_weight, k_weight, as_bytes(q), q_scale, *map(as_bytes, (pool.k, pool.v)),
            pool.k_scale, pool.v_scale, pool.k_exponent, pool.v_exponent, pages, counts, offsets, *qkv.stride()[:3],
            rotary.stride(0), eps, PART=first, PIECES=pieces, BLOCK=block, N=tokens, RUN=tokens // frames, TILES=of_frame,
            T=pool.page_tokens, H=heads, D=dim, LIMIT=LIMITS.get(pool.precision), QUERY_LIMIT=FP8_MAX,
            NATIVE=native_e4m3(qkv.device), num_warps=warps(block * dim, values))
    stream = min(STREAM // dim, places)
    if not pool.precision.quantised:
        launch(0, 3, stream, STREAM_VALUES)
    else:
        launch(0, 1, stream, STREAM_VALUES)
        launch(1, 2, places, PAGE_VALUES[pool.precision])
    return q, q_scale


def warps(total: int, each: int) -> int:
    """Return the warps of a program with ``total`` values, ``each`` per thread."""
    return min(max(total // (32 * each), 1), 32)


@triton.jit
def _write(qkv, scale, rotary, q_weight, k_weight, q, q_scale, k, v, k_scale, v_scale, k_exponent, v_exponent, pages, counts,
           offsets, token_stride, part_stride, head_stride, sines, eps, N: tl.constexpr, RUN: tl.constexpr,
           TILES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
           PIECES: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, QUERY_LIMIT: tl.constexpr,
           NATIVE: tl.constexpr):
    head, part, piece = tl.program_id(0), PART + tl.program_id(1), tl.program_id(2)
    tile, piece = (piece // PIECES).to(tl.int64), piece % PIECES
    first = tile // TILES * (TILES * N) + tile % TILES * RUN  # row of the tile's first token
    source = qkv + first * token_stride + part * part_stride + head * head_stride
    angles = rotary + first * (D // 2)
    if scale is not None:
        scale += first * (3 * H) + part * H + head
    count = tl.load(counts + tile)
    unit = tl.load(pages + tile).to(tl.int64) * H + head
    offset = 0
    if offsets is not None:
        offset = tl.load(offsets + tile)
    place = piece * BLOCK + tl.arange(0, BLOCK)
    token = place - offset
    inside = (token >= 0) & (token < N)
    if part == 0:
        x = normalised(source, angles, sines, q_weight, _row(place, RUN, TILES), place < N, place < count, token_stride,
                       eps, D, scale, 3 * H, NATIVE)
        _store_queries(x, q, q_scale, (tile * N + place) * H + head, place < N, QUERY_LIMIT, NATIVE)
    elif part == 1:
        x = normalised(source, angles, sines, k_weight, _row(token, RUN, TILES), inside, token < count, token_stride,
                       eps, D, scale, 3 * H, NATIVE)
        if LIMIT is None:
            _store_plain(x, k, unit * T + place, (token >= 0) & (place < T))
        else:
            x *= store_scale(x, k_scale + unit, LIMIT)
            store_quantised(x, k, k_exponent, unit * T + place, 0, BLOCK, D, D, NATIVE, place < T)
    elif LIMIT is None:
        x = _raw(source, _row(token, RUN, TILES), inside, token < count, token_stride, D, scale, 3 * H, NATIVE)
        _store_plain(x, v, unit * T + place, (token >= 0) & (place < T))
    else:
        _values(source, scale, v, v_scale, v_exponent, unit, count, token_stride, 3 * H, N, RUN, TILES, T, D, BLOCK, LIMIT,
                NATIVE)


@triton.jit
def _row(token, RUN: tl.constexpr, TILES: tl.constexpr):
    """Return the rows of a tile's tokens after its first one's: ``RUN`` tokens of every tile of a frame follow one another."""
    return token // RUN * (TILES * RUN) + token % RUN


@triton.jit
def normalised(source, angles, sines, weight, token, inside, there, token_stride, eps, D: tl.constexpr, scale=None,
               scale_stride=0, NATIVE: tl.constexpr = True):
    """Load tokens (BLOCK,) of queries or keys, normalised and rotated, float32 (BLOCK, D); zero where not ``there``. ``scale``:
    of tokens in e4m3.

    All tokens ``inside`` memory are read, so that the loads do not wait for what ``there`` is computed from.
    """
    HALF: tl.constexpr = D // 2
    BLOCK: tl.constexpr = token.shape[0]
    d = tl.arange(0, HALF)[None, :]
    mask = inside[:, None]
    row = source + token.to(tl.int64)[:, None] * token_stride + d
    a, b = _loaded(row, mask, scale is not None, NATIVE), _loaded(row + HALF, mask, scale is not None, NATIVE)
    if scale is not None:
        each = tl.load(scale + token.to(tl.int64) * scale_stride, mask=inside, other=0.0)[:, None]
        a *= each
        b *= each
    norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    a *= norm * tl.load(weight + d).to(tl.float32)
    b *= norm * tl.load(weight + HALF + d).to(tl.float32)
    angle = angles + token[:, None] * HALF + d
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + sines, mask=mask, other=0.0)
    mask = (inside & there)[:, None]
    a, b = tl.where(mask, a * cos - b * sin, 0.0), tl.where(mask, a * sin + b * cos, 0.0)
    return tl.join(a, b).permute(0, 2, 1).reshape(BLOCK, D)


@triton.jit
def _loaded(pointer, mask, ROUNDED: tl.constexpr, NATIVE: tl.constexpr):
    """Load values in float32, zero where not ``mask``: of e4m3, if ``ROUNDED``, without their scale."""
    if ROUNDED:
        return from_e4m3(tl.load(pointer, mask=mask, other=0), tl.float32, NATIVE)
    else:
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _raw(source, token, inside, there, token_stride, D: tl.constexpr, scale, scale_stride, NATIVE: tl.constexpr):
    """Load values of tokens, of any shape, float32 (*shape, D); read and zero as in ``normalised``."""
    at = tl.expand_dims(token.to(tl.int64) * token_stride, -1) + tl.arange(0, D)
    x = _loaded(source + at, tl.expand_dims(inside, -1), scale is not None, NATIVE)
    if scale is not None:
        x *= tl.expand_dims(tl.load(scale + token.to(tl.int64) * scale_stride, mask=inside, other=0.0), -1)
    return tl.where(tl.expand_dims(there, -1), x, tl.zeros_like(x))  # x is zero where not inside


@triton.jit
def _store_queries(x, q, q_scale, row, inside, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """Store queries (PLACES, D) to rows (PLACES,), as they are or, if there are scales, in e4m3."""
    at = row[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    if q_scale is None:
        tl.store(q + at, cast(x, q.dtype.element_ty), mask=inside[:, None])
    else:
        scale, inverse = scale_for(largest_magnitude(x, 1), LIMIT)
        tl.store(q + at, to_e4m3(x * inverse[:, None], NATIVE), mask=inside[:, None])
        tl.store(q_scale + row, scale, mask=inside)


@triton.jit
def _store_plain(x, out, row, inside):
    """Store keys or values (PLACES, D) to rows (PLACES,) of an unquantised page."""
    at = row[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    tl.store(out + at, cast(x, out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def store_scale(x, out, LIMIT: tl.constexpr):
    """Store the scale of a page of keys or values x, of any shape; return its reciprocal."""
    scale, inverse = scale_for(largest_magnitude(tl.reshape(x, [x.numel], can_reorder=True), 0), LIMIT)
    tl.store(out, scale)
    return inverse


@triton.jit
def _values(source, scale, v, v_scale, v_exponent, unit, count, token_stride, scale_stride, N: tl.constexpr,
            RUN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PLACES: tl.constexpr,
            LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """Write values to a quantised page, which has a row of T tokens for each of D."""
    # Shaped so that a thread gets four neighbours of a row: they go to the threads that store as one word.
    token = token_order(tl.arange(0, 4)[:, None] + tl.arange(0, PLACES // 4)[None, :] * 4)
    x = _raw(source, _row(token, RUN, TILES), token < N, token < count, token_stride, D, scale, scale_stride, NATIVE)
    x *= store_scale(x, v_scale + unit, LIMIT)
    x = x.permute(2, 1, 0).reshape(D, PLACES)
    store_quantised(x, v, v_exponent, unit * D + tl.arange(0, D), 0, D, PLACES, T, NATIVE)

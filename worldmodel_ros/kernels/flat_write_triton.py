"""``flat_write.write_flat``: the projection's output is read from memory once, and each result written once.

Programs as in ``page_write_triton``: queries in blocks of which many are in flight, and for a quantised page all keys or values
in the registers of one program.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .flat_write import check, padded
from .formats_triton import LIMITS, cast, largest_magnitude, native_e4m3, scale_for, store_quantised, to_e4m3, token_order
from .page_write_triton import PAGE_VALUES, STREAM, STREAM_VALUES, store_scale, warps
from .pages import Pool
from .pools_triton import as_bytes
from .quantise import FP8_MAX


def write_flat_triton(pool: Pool, pages: Tensor, slabs: int, qkv: Tensor, rms: Tensor | Callable[[], Tensor], rotary: Tensor,
                      q_weight: Tensor, k_weight: Tensor, quantise_q: bool = False) -> tuple[Tensor, Tensor | None]:
    """As ``flat_write.write_flat``, for D and T powers of two, D and all but qkv contiguous."""
    later = rms if callable(rms) else None
    rms = None if later else rms
    check(pool, pages, slabs, qkv, rms, rotary)
    heads, dim, tokens = pool.heads, pool.head_dim, pool.page_tokens
    if dim & (dim - 1) or tokens & (tokens - 1) or qkv.stride(3) != 1 or not all(
            x.is_contiguous() for x in (rotary, q_weight, k_weight)):
        raise ValueError(f'qkv {tuple(qkv.shape)} with strides {qkv.stride()} and pages of {tokens} tokens: head width and '
                         f'page must be powers of two, and all else contiguous')
    rows = padded(len(qkv))
    q = torch.empty((rows, heads, dim), dtype=torch.float8_e4m3fn if quantise_q else qkv.dtype, device=qkv.device)
    q_scale = torch.empty((rows, heads), dtype=torch.float32, device=qkv.device) if quantise_q else None
    native, block = native_e4m3(qkv.device), min(STREAM // dim, tokens)
    limit = LIMITS.get(pool.precision)
    values = STREAM_VALUES if limit is None else PAGE_VALUES[pool.precision]
    page_block = block if limit is None else tokens

    def write_pages(rms: Tensor, first: int, parts: int) -> None:
        _pages[(heads, parts, len(pages) * (tokens // page_block))](
            qkv, rotary, rms, k_weight, *map(as_bytes, (pool.k, pool.v)), pool.k_scale, pool.v_scale, pages,
            *qkv.stride()[:3], len(qkv), len(qkv) // slabs, len(pages) // slabs, FIRST=first, T=tokens, H=heads, D=dim,
            BLOCK=page_block, LIMIT=limit, NATIVE=native, num_warps=warps(page_block * dim, values))
    if later:
        write_pages(rotary, 1, 1)  # reads no factors
        rms = later()
        check(pool, pages, slabs, qkv, rms, rotary)
    if not rms.is_contiguous():
        raise ValueError(f'rms {tuple(rms.shape)} with strides {rms.stride()} must be contiguous')
    _queries[(heads, triton.cdiv(rows, block))](
        qkv, rotary, rms, q_weight, as_bytes(q), q_scale, *qkv.stride()[::2], len(qkv), rows, H=heads, D=dim, BLOCK=block,
        LIMIT=FP8_MAX, NATIVE=native, num_warps=warps(block * dim, STREAM_VALUES))
    write_pages(rms, 0, 1 if later else 2)
    return q, q_scale


@triton.jit
def _queries(qkv, rotary, rms, weight, q, q_scale, token_stride, head_stride, tokens, rows, H: tl.constexpr, D: tl.constexpr,
             BLOCK: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _turned(qkv + head * head_stride, rotary, rms, weight + head * D, row, row < tokens, tokens, token_stride, D)
    at = (row * H + head).to(tl.int64)
    place = at[:, None] * D + tl.arange(0, D)[None, :]
    inside = row < rows
    if q_scale is None:
        tl.store(q + place, cast(x, q.dtype.element_ty), mask=inside[:, None])
    else:
        scale, inverse = scale_for(largest_magnitude(x, 1), LIMIT)
        tl.store(q + place, to_e4m3(x * inverse[:, None], NATIVE), mask=inside[:, None])
        tl.store(q_scale + at, scale, mask=inside)


@triton.jit
def _pages(qkv, rotary, rms, weight, k, v, k_scale, v_scale, pages, token_stride, part_stride, head_stride, tokens, slab_tokens,
           slab_pages, FIRST: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
           LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    head, part = tl.program_id(0), tl.program_id(1) + FIRST  # 0: keys, 1: values
    PIECES: tl.constexpr = T // BLOCK
    index, first = tl.program_id(2) // PIECES, tl.program_id(2) % PIECES * BLOCK
    unit = tl.load(pages + index).to(tl.int64) * H + head
    begin = index % slab_pages * T + first  # in the slab
    slab = index // slab_pages * slab_tokens
    source = qkv + (part + 1) * part_stride + head * head_stride
    place = tl.arange(0, BLOCK)
    if part == 0:
        x = _turned(source, rotary, rms + tokens, weight + head * D, slab + begin + place, begin + place < slab_tokens, tokens,
                    token_stride, D)
        row = unit * T + first + place
        if LIMIT is None:
            tl.store(k + row[:, None] * D + tl.arange(0, D)[None, :], cast(x, k.dtype.element_ty))
        else:
            x *= store_scale(x, k_scale + unit, LIMIT)
            store_quantised(x, k, None, row, 0, BLOCK, D, D, NATIVE)
    elif LIMIT is None:
        x = _values(source, slab + begin + place, begin + place < slab_tokens, token_stride, D)
        row = unit * T + first + place
        tl.store(v + row[:, None] * D + tl.arange(0, D)[None, :], cast(x, v.dtype.element_ty))
    else:
        # Shaped so that a thread gets four neighbours of a row of the page: they go to memory as one word.
        token = begin + token_order(tl.arange(0, 4)[:, None] + tl.arange(0, BLOCK // 4)[None, :] * 4)
        x = _values(source, slab + token, token < slab_tokens, token_stride, D)
        x *= store_scale(x, v_scale + unit, LIMIT)
        x = x.permute(2, 1, 0).reshape(D, BLOCK)
        store_quantised(x, v, None, unit * D + tl.arange(0, D), 0, D, BLOCK, T, NATIVE)


@triton.jit
def _turned(source, rotary, rms, weight, row, inside, tokens, token_stride, D: tl.constexpr):
    """Load tokens (BLOCK,) of a head's queries or keys, normalised and rotated, float32 (BLOCK, D); zero where not
    ``inside``."""
    HALF: tl.constexpr = D // 2
    BLOCK: tl.constexpr = row.shape[0]
    d = tl.arange(0, HALF)[None, :]
    mask = inside[:, None]
    at = source + row.to(tl.int64)[:, None] * token_stride + d
    norm = tl.load(rms + row, mask=inside, other=0.0)[:, None]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32) * (norm * tl.load(weight + d).to(tl.float32))
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32) * (norm * tl.load(weight + HALF + d).to(tl.float32))
    angle = rotary + row[:, None] * HALF + d
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + tokens * HALF, mask=mask, other=0.0)
    return tl.join(a * cos - b * sin, a * sin + b * cos).permute(0, 2, 1).reshape(BLOCK, D)


@triton.jit
def _values(source, row, inside, token_stride, D: tl.constexpr):
    """Load values of tokens, of any shape, float32 (*shape, D); zero where not ``inside``."""
    at = tl.expand_dims(row.to(tl.int64) * token_stride, -1) + tl.arange(0, D)
    return tl.load(source + at, mask=tl.expand_dims(inside, -1), other=0.0).to(tl.float32)

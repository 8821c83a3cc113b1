"""``requantise.requantise`` in one launch, to the same numbers: a page is read twice, the second time from the cache."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import (
    LIMITS, from_e4m3, largest_magnitude, native_e4m3, scale_for, store_quantised, token_order)
from .pages import Pool, Precision
from .pools_triton import as_bytes
from .requantise import check


def supports(source: Pool, target: Pool) -> bool:
    """Return whether ``requantise_triton`` takes these pools."""
    return target.precision.quantised and source.precision not in (Precision.FP4, target.precision)


def requantise_triton(source: Pool, source_pages: Tensor, target: Pool, target_pages: Tensor) -> None:
    """As ``requantise.requantise``, from FP32, BF16 or FP8 to FP4, or from FP32 or BF16 to FP8; pages int32 or int64."""
    check(source, source_pages, target, target_pages)
    if not supports(source, target):
        raise ValueError(f'not from {source.precision.value} to {target.precision.value}: `requantise` does that')
    heads, tokens, dim = source.heads, source.page_tokens, source.head_dim
    if not len(source_pages):
        return
    _requantise[(len(source_pages), heads, 2)](
        *map(as_bytes, (source.k, source.v)), source.k_scale, source.v_scale, *map(as_bytes, (target.k, target.v)),
        target.k_scale, target.v_scale, target.k_exponent, target.v_exponent, source_pages, target_pages,
        T=tokens, H=heads, D=dim, BLOCK=min(4096 // dim, tokens & -tokens), LIMIT=LIMITS[target.precision],
        NATIVE=native_e4m3(source.k.device), num_warps=8)


@triton.jit
def _requantise(k, v, k_scale, v_scale, new_k, new_v, new_k_scale, new_v_scale, k_exponent, v_exponent, source_pages,
                target_pages, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
                LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    head = tl.program_id(1)
    unit = tl.load(source_pages + tl.program_id(0)).to(tl.int64) * H + head
    new_unit = tl.load(target_pages + tl.program_id(0)).to(tl.int64) * H + head
    if tl.program_id(2) == 0:
        _convert(k, k_scale, new_k, new_k_scale, k_exponent, unit, new_unit, False, T, D, BLOCK, LIMIT, NATIVE)
    else:
        _convert(v, v_scale, new_v, new_v_scale, v_exponent, unit, new_unit, True, T, D, BLOCK, LIMIT, NATIVE)


@triton.jit
def _convert(old, old_scale, new, new_scale, exponent, unit, new_unit, VALUES: tl.constexpr, T: tl.constexpr,
             D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, T, BLOCK):
        x = largest_magnitude(_block(old, old_scale, unit, first, VALUES, T, D, BLOCK, NATIVE), 0 if VALUES else 1)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    scale, inverse = scale_for(largest_magnitude(largest, 0), LIMIT)
    tl.store(new_scale + new_unit, scale)
    for first in range(0, T, BLOCK):
        x = _block(old, old_scale, unit, first, VALUES, T, D, BLOCK, NATIVE) * inverse
        if VALUES:
            store_quantised(x, new, exponent, new_unit * D + tl.arange(0, D), first, D, BLOCK, T, NATIVE)
        else:
            store_quantised(x, new, exponent, new_unit * T + first + tl.arange(0, BLOCK), 0, BLOCK, D, D, NATIVE)


@triton.jit
def _block(old, old_scale, unit, first, VALUES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
           NATIVE: tl.constexpr):
    """Load places from ``first`` on as in a quantised page: keys (BLOCK, D), values (D, BLOCK)."""
    place = first + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    if old_scale is None:
        if VALUES:
            token = token_order(place)
            return tl.trans(tl.load(old + (unit * T + token)[:, None] * D + d[None, :]).to(tl.float32))
        else:
            return tl.load(old + (unit * T + place)[:, None] * D + d[None, :]).to(tl.float32)
    else:
        if VALUES:
            at = (unit * D + d)[:, None] * T + place[None, :]
        else:
            at = (unit * T + place)[:, None] * D + d[None, :]
        return from_e4m3(tl.load(old + at), tl.float32, NATIVE) * tl.load(old_scale + unit)

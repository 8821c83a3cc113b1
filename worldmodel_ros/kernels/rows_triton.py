"""The functions of ``rows`` with what follows or precedes them in one launch: each row is read once and written once.

A program has one row. Many of them are in flight on a processor at a time, most of one frame, whose modulation
they find in its first-level cache; rows in a loop would keep the modulation in registers, and so only half as many
loads in flight.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import INTERPRETED, cast, largest_magnitude, native_e4m3, scale_for, to_e4m3
from .pools_triton import as_bytes
from .quantise import FP8_MAX
from .rows import Rounded, frame_length


def quantise_rows(x: Tensor, static: Tensor | None = None) -> Rounded:
    """As in ``rows``, for x contiguous, as all here is checked to be."""
    return _each_row(x, True, static, gelu=False)


def modulate_rows(x: Tensor, shift: Tensor, scale: Tensor, added: tuple[Tensor, Tensor] | None = None,
                  fp8: bool = True, static: Tensor | None = None, eps: float = 1e-6, bound: Tensor | None = None,
                  film: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype | None = None
                  ) -> tuple[Tensor, Rounded | Tensor, Tensor | None]:
    """As in ``rows``, for x, y and ``film`` contiguous, and shift, scale and gate with rows that are."""
    rows, width = x.shape
    y, gate = (None, None) if added is None else added
    film_scale, film_shift = (None, None) if film is None else film
    _check((x, y, film_scale, film_shift), (shift, scale, gate))
    total = x if y is None and film is None else torch.empty_like(x)
    out, scales = _results(x, fp8, dtype)
    ahead = None if bound is None else torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _modulate[(rows,)](
        x, y, gate, film_scale, film_shift, shift, scale, total, as_bytes(out), scales, static, _stride(static), bound,
        ahead, 0 if gate is None else gate.stride(0), shift.stride(0), scale.stride(0), frame_length(x, shift), eps, D=width,
        BLOCK=triton.next_power_of_2(width), LIMIT=FP8_MAX, NATIVE=native_e4m3(x.device), num_warps=_warps(width))
    return total, (out, scales) if fp8 else out, ahead


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As in ``rows``, for the last axis contiguous."""
    rows, parts, width = x.shape
    if x.stride(2) != 1:
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()}: its last axis must be contiguous')
    out = torch.empty((parts, rows), dtype=torch.float32, device=x.device)
    _inverse_rms[(rows, parts)](x, out, x.stride(0), x.stride(1), rows, eps, D=width,
                                BLOCK=triton.next_power_of_2(width), num_warps=_warps(width))
    return out


def gelu_rows(x: Tensor, fp8: bool = True, static: Tensor | None = None) -> Rounded | Tensor:
    """As in ``rows``, for x contiguous."""
    return _each_row(x, fp8, static, gelu=True)


def _each_row(x: Tensor, fp8: bool, static: Tensor | None, gelu: bool) -> Rounded | Tensor:
    _check((x,))
    out, scales = _results(x, fp8)
    rows, width = x.shape
    _each[(rows,)](x, as_bytes(out), scales, static, _stride(static), K=width, GELU=gelu,
                   BLOCK=triton.next_power_of_2(width), LIMIT=FP8_MAX, NATIVE=native_e4m3(x.device),
                   num_warps=_warps(width))
    return (out, scales) if fp8 else out


def _check(whole: Sequence[Tensor | None], by_rows: Sequence[Tensor | None] = ()) -> None:
    """Raise ValueError for what the kernels would read at wrong places."""
    for x in (*whole, *by_rows):
        if x is not None and (x.stride(-1) != 1 or (any(x is each for each in whole) and not x.is_contiguous())):
            raise ValueError(f'{tuple(x.shape)} with strides {x.stride()}: activations must be contiguous, and the '
                             f'rows of a modulation')


def _results(x: Tensor, fp8: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    if not fp8:
        return torch.empty_like(x, dtype=dtype), None
    return (torch.empty_like(x, dtype=torch.float8_e4m3fn),
            torch.empty((len(x), 1), dtype=torch.float32, device=x.device))


def _stride(static: Tensor | None) -> int:
    """From one row's given scale to the next one's."""
    return 0 if static is None or static.dim() == 0 else static.stride(0)


def _warps(width: int) -> int:
    """64 values to a thread: many more rows are in flight then than of few values (on an H200 6 % faster than 16)."""
    return max(1, min(8, triton.next_power_of_2(width) // 2048))


@triton.jit
def gelu(x):
    """GELU in its tanh form, by the GPU's own tanh, whose error of 2^-11 is small compared with the rounding that follows."""
    u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    if INTERPRETED:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
    else:
        tanh = tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [u], dtype=tl.float32, is_pure=True, pack=1)
    half = 0.5 * x
    return half + half * tanh


@triton.jit
def _store(x, out, scales, static, static_stride, largest, row, d, inside, D: tl.constexpr, LIMIT: tl.constexpr,
           NATIVE: tl.constexpr):
    """One row (BLOCK,), zero beyond its D values, in the type of what it is to be. ``largest``: its magnitude."""
    if scales is None:
        tl.store(out + row * D + d, cast(x, out.dtype.element_ty), mask=inside)
    else:
        if static is None:
            scale, inverse = scale_for(largest, LIMIT)
        else:
            scale = tl.load(static + row * static_stride)
            inverse = tl.math.div_rn(1.0, scale)
            scale += tl.sum(x * 0.0, 0)  # NaN where the row is not finite
        tl.store(out + row * D + d, to_e4m3(x * inverse, NATIVE), mask=inside)
        tl.store(scales + row, scale)


@triton.jit
def _inverse_rms(x, out, row_stride, part_stride, rows, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_stride + part * part_stride + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + part * rows + row, tl.rsqrt(tl.sum(value * value, 0) / D + eps))


@triton.jit
def _modulate(x, y, gate, film_scale, film_shift, shift, scale, total, out, scales, static, static_stride, bound, ahead,
              gate_stride, shift_stride, scale_stride, each, eps, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
              NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    frame = row // each
    d = tl.arange(0, BLOCK)
    inside = d < D
    value = tl.load(x + row * D + d, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        value = _plus(value, y, gate, row, frame * gate_stride, d, inside, D)
    if film_scale is not None:
        if y is not None:
            value = cast(value, total.dtype.element_ty).to(tl.float32)
        factor = tl.load(film_scale + row * D + d, mask=inside, other=0.0).to(tl.float32)
        value = (1.0 + factor) * value
        value += tl.load(film_shift + row * D + d, mask=inside, other=0.0).to(tl.float32)
    if y is not None or film_scale is not None:
        value = cast(value, total.dtype.element_ty)
        tl.store(total + row * D + d, value, mask=inside)
        value = value.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / D, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    factor = 1.0 + tl.load(scale + frame * scale_stride + d, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + frame * shift_stride + d, mask=inside, other=0.0).to(tl.float32)
    modulated = normal * factor + offset
    # Together, since warps wait for each other in every reduction: length, largest, and NaN where not all is finite.
    squares, largest, fault = tl.reduce((modulated * modulated, tl.abs(modulated), modulated * 0.0), 0, _gathered)
    if bound is not None:
        limit = tl.sqrt_rn(squares) * tl.load(bound) + tl.load(bound + 1)
        tl.store(ahead + row, tl.maximum(limit * (1.0 / LIMIT), 2.0 ** -120))
    _store(modulated, out, scales, static, static_stride, largest + fault, row, d, inside, D, LIMIT, NATIVE)


@triton.jit
def _gathered(squares, largest, fault, other_squares, other_largest, other_fault):
    return squares + other_squares, tl.maximum(largest, other_largest), fault + other_fault


@triton.jit
def _plus(value, y, gate, row, frame_offset, d, inside, D: tl.constexpr):
    weight = tl.load(gate + frame_offset + d, mask=inside, other=0.0).to(tl.float32)
    return value + weight * tl.load(y + row * D + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _each(x, out, scales, static, static_stride, K: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
          LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < K
    value = tl.load(x + row * K + d, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        value = gelu(value)
    _store(value, out, scales, static, static_stride, largest_magnitude(value, 0), row, d, inside, K, LIMIT, NATIVE)

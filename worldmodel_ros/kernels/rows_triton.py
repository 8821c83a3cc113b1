"""The functions of ``rows``, fused with what follows or precedes them: each row is read once and written once.

Each program has one row. Many are in flight on a processor at a time, mostly of one frame, whose modulation they find in its
first-level cache; a loop over rows would keep the modulation in registers, and so halve the loads in flight. Triton's blocks
are powers of two: a row is several of them (``blocks``), since one that is large enough for 5,120 values would compute as many
as 8,192.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import INTERPRETED, cast, native_e4m3, scale_for, to_e4m3
from .pools_triton import as_bytes
from .quantise import FP8_MAX
from .rows import Rounded, frame_length


def quantise_rows(x: Tensor, static: Tensor | None = None) -> Rounded:
    """As in ``rows``, for x contiguous, which is checked throughout this module."""
    return _each_row(x, True, static, gelu=False)


def modulate_rows(x: Tensor, shift: Tensor, scale: Tensor, added: tuple[Tensor, Tensor] | None = None,
                  fp8: bool = True, static: Tensor | None = None, eps: float = 1e-6, bound: Tensor | None = None,
                  film: Tensor | None = None, dtype: torch.dtype | None = None
                  ) -> tuple[Tensor, Rounded | Tensor, Tensor | None]:
    """As in ``rows``, for contiguous x, y and ``film``, and shift, scale and gate with contiguous rows."""
    rows, width = x.shape
    y, gate = (None, None) if added is None else added
    _check((x, y, film), (shift, scale, gate))
    if film is not None and film.shape != (rows, 2 * width):
        raise ValueError(f'film {tuple(film.shape)} must be {(rows, 2 * width)}: a factor and an addend for each of x')
    total = x if y is None and film is None else torch.empty_like(x)
    out, scales = results(x, fp8, dtype)
    ahead = None if bound is None else torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _modulate[(rows,)](
        x, y, gate, film, shift, scale, total, as_bytes(out), scales, static, _stride(static), bound,
        ahead, 0 if gate is None else gate.stride(0), shift.stride(0), scale.stride(0), frame_length(x, shift), eps, D=width,
        **blocks(width), LIMIT=FP8_MAX, NATIVE=native_e4m3(x.device), num_warps=warps(width))
    return total, (out, scales) if fp8 else out, ahead


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As in ``rows``, for the last axis contiguous."""
    return _squares(x, eps, 1, inverse=True)


def mean_squares(x: Tensor, eps: float = 1e-6, count: int = 1) -> Tensor:
    """As in ``rows``, for the last axis contiguous."""
    return _squares(x, eps, count, inverse=False)


def _squares(x: Tensor, eps: float, count: int, inverse: bool) -> Tensor:
    rows, parts, width = x.shape
    if x.stride(2) != 1:
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()}: its last axis must be contiguous')
    out = torch.empty((parts, rows), dtype=torch.float32, device=x.device)
    _mean_squares[(rows, parts)](x, out, x.stride(0), x.stride(1), rows, eps, 1.0 / count, D=width, INVERSE=inverse,
                                 **blocks(width), num_warps=warps(width))
    return out


def gelu_rows(x: Tensor, fp8: bool = True, static: Tensor | None = None) -> Rounded | Tensor:
    """As in ``rows``, for x contiguous."""
    return _each_row(x, fp8, static, gelu=True)


def _each_row(x: Tensor, fp8: bool, static: Tensor | None, gelu: bool) -> Rounded | Tensor:
    _check((x,))
    out, scales = results(x, fp8)
    rows, width = x.shape
    _each[(rows,)](x, as_bytes(out), scales, static, _stride(static), K=width, GELU=gelu, **blocks(width), LIMIT=FP8_MAX,
                   NATIVE=native_e4m3(x.device), num_warps=warps(width))
    return (out, scales) if fp8 else out


def _check(whole: Sequence[Tensor | None], by_rows: Sequence[Tensor | None] = ()) -> None:
    """Raise ValueError for what the kernels would read at wrong addresses."""
    for x in (*whole, *by_rows):
        if x is not None and (x.stride(-1) != 1 or (any(x is each for each in whole) and not x.is_contiguous())):
            raise ValueError(f'{tuple(x.shape)} with strides {x.stride()}: activations must be contiguous, and the '
                             f'rows of a modulation')


def results(x: Tensor, fp8: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Allocate rows like x, in e4m3 with their scales if ``fp8``."""
    if not fp8:
        return torch.empty_like(x, dtype=dtype), None
    return (torch.empty_like(x, dtype=torch.float8_e4m3fn),
            torch.empty((len(x), 1), dtype=torch.float32, device=x.device))


def _stride(static: Tensor | None) -> int:
    """Return the stride from one row's given scale to the next one's."""
    return 0 if static is None or static.dim() == 0 else static.stride(0)


def warps(width: int) -> int:
    """Return the warps of a row's program: 64 values per thread keep many more rows in flight than few values do (on an H200
    6 % faster than 16)."""
    return max(1, min(8, triton.next_power_of_2(width) // 2048))


def blocks(width: int) -> dict[str, int]:
    """Return how a row is cut: in blocks of four values a thread."""
    block = 128 * warps(width)
    return {'BLOCK': block, 'BLOCKS': triton.cdiv(width, block)}


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
def store_row(parts, out, scales, static, static_stride, largest, row, D: tl.constexpr, BLOCK: tl.constexpr,
              LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """Store one row, as blocks that are zero beyond its D values, in the output's type. ``largest``: its largest magnitude."""
    d = tl.arange(0, BLOCK)
    inverse = 1.0
    if scales is not None:
        if static is None:
            scale, inverse = scale_for(largest, LIMIT)
        else:
            scale = tl.load(static + row * static_stride)
            inverse = tl.math.div_rn(1.0, scale)
            scale += largest * 0.0  # NaN where the row is not finite
        tl.store(scales + row, scale)
    for part in tl.static_range(len(parts)):
        at = part * BLOCK + d
        if scales is None:
            tl.store(out + row * D + at, cast(parts[part], out.dtype.element_ty), mask=at < D)
        else:
            tl.store(out + row * D + at, to_e4m3(parts[part] * inverse, NATIVE), mask=at < D)


@triton.jit
def _mean_squares(x, out, row_stride, part_stride, rows, eps, share, D: tl.constexpr, INVERSE: tl.constexpr,
                  BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):
        at = block * BLOCK + d
        value = tl.load(x + row * row_stride + part * part_stride + at, mask=at < D, other=0.0).to(tl.float32)
        squares += value * value
    mean = tl.sum(squares, 0) / D + eps
    tl.store(out + part * rows + row, tl.rsqrt(mean) if INVERSE else mean * share)


@triton.jit
def _modulate(x, y, gate, film, shift, scale, total, out, scales, static, static_stride, bound, ahead,
              gate_stride, shift_stride, scale_stride, each, eps, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
              LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    frame = row // each
    d = tl.arange(0, BLOCK)
    # All loads first: stores go through a barrier, which no load is moved across.
    loaded = ()
    for part in tl.static_range(BLOCKS):
        loaded = loaded + (tl.load(x + row * D + part * BLOCK + d, mask=part * BLOCK + d < D, other=0.0).to(tl.float32),)
    if y is not None:
        values = ()
        for part in tl.static_range(BLOCKS):
            at = part * BLOCK + d
            weight = tl.load(gate + frame * gate_stride + at, mask=at < D, other=0.0).to(tl.float32)
            values = values + (loaded[part] + weight * tl.load(y + row * D + at, mask=at < D, other=0.0).to(tl.float32),)
        loaded = values
    if film is not None:
        values = ()
        for part in tl.static_range(BLOCKS):
            at = part * BLOCK + d
            value = loaded[part]
            if y is not None:
                value = cast(value, total.dtype.element_ty).to(tl.float32)
            factor = tl.load(film + row * 2 * D + at, mask=at < D, other=0.0).to(tl.float32)
            offset = tl.load(film + row * 2 * D + D + at, mask=at < D, other=0.0).to(tl.float32)
            values = values + ((1.0 + factor) * value + offset,)
        loaded = values
    values, sums = (), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(BLOCKS):
        value = loaded[part]
        if y is not None or film is not None:
            value = cast(value, total.dtype.element_ty)
            tl.store(total + row * D + part * BLOCK + d, value, mask=part * BLOCK + d < D)
            value = value.to(tl.float32)
        values = values + (value,)
        sums += value
    mean = tl.sum(sums, 0) / D
    centred, sums = (), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(BLOCKS):
        value = values[part] - mean
        if D % BLOCK:
            value = tl.where(part * BLOCK + d < D, value, 0.0)
        centred = centred + (value,)
        sums += value * value
    factor = tl.rsqrt(tl.sum(sums, 0) / D + eps)
    modulated = ()
    squares, largest, fault = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(BLOCKS):
        at = part * BLOCK + d
        slope = 1.0 + tl.load(scale + frame * scale_stride + at, mask=at < D, other=0.0).to(tl.float32)
        offset = tl.load(shift + frame * shift_stride + at, mask=at < D, other=0.0).to(tl.float32)
        value = centred[part] * factor * slope + offset
        modulated = modulated + (value,)
        squares += value * value
        largest = tl.maximum(largest, tl.abs(value))
        fault += value * 0.0
    # In one reduction, since warps wait for each other in each: length, largest, and NaN if not all is finite.
    if bound is not None:
        length, largest, fault = tl.reduce((squares, largest, fault), 0, _gathered)
        limit = tl.sqrt_rn(length) * tl.load(bound) + tl.load(bound + 1)
        tl.store(ahead + row, tl.maximum(limit * (1.0 / LIMIT), 2.0 ** -120))
    else:
        largest, fault = tl.reduce((largest, fault), 0, _gathered_largest)
    store_row(modulated, out, scales, static, static_stride, largest + fault, row, D, BLOCK, LIMIT, NATIVE)


@triton.jit
def _gathered(squares, largest, fault, other_squares, other_largest, other_fault):
    return squares + other_squares, tl.maximum(largest, other_largest), fault + other_fault


@triton.jit
def _gathered_largest(largest, fault, other_largest, other_fault):
    return tl.maximum(largest, other_largest), fault + other_fault


@triton.jit
def _each(x, out, scales, static, static_stride, K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
          GELU: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    values, largest, fault = (), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(BLOCKS):
        at = part * BLOCK + d
        value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        if GELU:
            value = gelu(value)
        values = values + (value,)
        largest = tl.maximum(largest, tl.abs(value))
        fault += value * 0.0
    largest, fault = tl.reduce((largest, fault), 0, _gathered_largest)
    store_row(values, out, scales, static, static_stride, largest + fault, row, K, BLOCK, LIMIT, NATIVE)

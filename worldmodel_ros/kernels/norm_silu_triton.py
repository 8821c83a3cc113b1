"""RMSNorm over channels and SiLU of a video's features in one launch, for either memory order; sums of features, a bias and a
residual, and of a convolution's taps; and the shuffles of upsampling, in time and in space, with a bias."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast

VALUES = 8192  # of a program
BLOCK = 256  # positions of a program that adds taps
ROW_VALUES = 2048  # of a program that puts a row's features elsewhere


def norm_silu_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, before: int = 0, edge: int = 0) -> Tensor:
    """Return silu(y / ||y|| * sqrt(C) * weight) over the channels of y = x + bias, x (1, C, T, h, w), contiguous or channels
    last; weight and bias have C numbers. Computed in float32, rounded once. ``before``: number of unwritten frames in front
    of the result, and ``edge``: of unwritten rows above and below it; for channels last only."""
    batch, channels = x.shape[:2]
    positions = x[0, 0].numel()
    last = x.is_contiguous(memory_format=torch.channels_last_3d) and channels > 1
    if batch != 1 or not (last or x.is_contiguous()):
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()} must be one video, contiguous or with the channels '
                         f'last')
    if (before or edge) and not last:
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()}: only where channels are last can frames be before, or '
                         f'rows around')
    frames, rows, columns = x.shape[2:]
    shape = (1, channels, before + frames, rows + 2 * edge, columns)
    out = torch.empty(shape, dtype=x.dtype, device=x.device,
                      memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    wide = triton.next_power_of_2(channels)
    block = max(16, VALUES // wide)
    _norm_silu[(triton.cdiv(positions, block),)](
        x, weight, bias, out[:, :, before:, edge:], positions, 1 if last else positions, channels if last else 1,
        rows * columns, 2 * edge * columns, channels ** 0.5, C=channels, WIDE=wide, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _norm_silu(x, weight, bias, out, positions, channel_stride, position_stride, frame, between, root, C: tl.constexpr,
               WIDE: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDE)
    at = position[:, None] * position_stride + channel[None, :] * channel_stride
    inside = (position < positions)[:, None] & (channel < C)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    length = tl.maximum(tl.sqrt_rn(tl.sum(value * value, 1)), 1e-12)
    factor = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)
    normal = value * (root / length)[:, None] * factor[None, :]
    at += (position // frame * between)[:, None] * position_stride  # ``between`` positions lie between the result's frames
    tl.store(out + at, cast(normal / (1.0 + tl.exp(-normal)), out.dtype.element_ty), mask=inside)


def add_triton(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Return x + bias + residual for x and residual (1, C, T, h, w), both channels last, and C numbers; rounded once."""
    form = torch.channels_last_3d  # checked by is_contiguous: strides of axes of one element may be anything
    if x.shape != residual.shape or not (x.is_contiguous(memory_format=form) and residual.is_contiguous(memory_format=form)):
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()} and residual {tuple(residual.shape)} with strides '
                         f'{residual.stride()} must be alike, with the channels last')
    out = torch.empty_like(x, memory_format=form)
    block = VALUES // 4
    _add[(triton.cdiv(x.numel(), block),)](x, bias, residual, out, x.numel(), C=x.shape[1], BLOCK=block, num_warps=4)
    return out


@triton.jit
def _add(x, bias, residual, out, count, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(bias + at % C, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, cast(total, out.dtype.element_ty), mask=inside)


def doubled_frames_triton(x: Tensor, bias: Tensor, edge: int = 0) -> Tensor:
    """``vae_layers.doubled_frames`` in one launch, for x with the channels last. Above and below each result, there are
    ``edge`` rows still to be written."""
    count, twice, rows, columns = x.shape
    out = _images(x, 2 * count, twice // 2, rows + 2 * edge, columns)
    width = columns * (twice // 2)
    _doubled_frames[(2 * count * rows, triton.cdiv(width, ROW_VALUES))](
        x, bias, out[:, :, edge:], rows, (rows + 2 * edge) * width, width, C=twice // 2, BLOCK=ROW_VALUES, num_warps=4)
    return out


@triton.jit
def _doubled_frames(x, bias, out, rows, frame, width, C: tl.constexpr, BLOCK: tl.constexpr):
    index, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    channel = at % C + index % 2 * C
    line = (index // 2 * rows + row).to(tl.int64) * (2 * width)
    value = tl.load(x + line + at // C * (2 * C) + channel, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index.to(tl.int64) * frame + row * width + at, cast(value, out.dtype.element_ty), mask=inside)


def interleaved_triton(y: Tensor, bias: Tensor) -> Tensor:
    """``vae_layers.interleaved`` in one launch, for y with the channels last."""
    count, channels, rows, columns = y.shape[0], y.shape[1] // 4, y.shape[2] - 1, y.shape[3] - 1
    out = _images(y, count, channels, 2 * rows, 2 * columns)
    width = 2 * columns * channels
    _interleaved[(count * 2 * rows, triton.cdiv(width, ROW_VALUES))](y, bias, out, 2 * rows, columns + 1, width, C=channels,
                                                                     BLOCK=ROW_VALUES, num_warps=4)
    return out


@triton.jit
def _interleaved(y, bias, out, rows, columns, width, C: tl.constexpr, BLOCK: tl.constexpr):
    index, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    column = at // C
    channel = at % C + (row % 2 * 2 + column % 2) * C
    line = (index * (rows // 2 + 1) + row // 2 + row % 2).to(tl.int64) * columns * (4 * C)
    value = tl.load(y + line + (column // 2 + column % 2) * (4 * C) + channel, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * width + at, cast(value, out.dtype.element_ty), mask=inside)


def _images(x: Tensor, *shape: int) -> Tensor:
    """Return room for images made of x, with the channels last, as they must be in x."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f'features {tuple(x.shape)} with strides {x.stride()}: their channels must come last')
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def add_taps_triton(taps: Tensor, bias: Tensor) -> Tensor:
    """``vae_layers.add_taps`` in one launch, for taps with the channels last."""
    channels, frames, rows, columns = len(bias), *taps.shape[2:]
    if len(taps) != 1 or taps.shape[1] < 9 * channels or not taps.is_contiguous(memory_format=torch.channels_last_3d):
        raise ValueError(f'taps {tuple(taps.shape)} with strides {taps.stride()} must be one video of {9 * channels} channels '
                         f'at least, which come last')
    out = torch.empty((1, channels, frames, rows - 2, columns - 2), dtype=taps.dtype, device=taps.device)
    positions = out[0, 0].numel()
    _add_taps[(triton.cdiv(positions, BLOCK),)](taps, bias, out, positions, rows - 2, columns - 2, N=taps.shape[1], C=channels,
                                                BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _add_taps(taps, bias, out, positions, rows, columns, N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < positions
    first = (position // columns + position // columns // rows * 2) * (columns + 2) + position % columns
    for channel in tl.static_range(C):
        total = tl.zeros([BLOCK], tl.float32) + tl.load(bias + channel).to(tl.float32)
        for tap in tl.static_range(9):
            at = (first + tap // 3 * (columns + 2) + tap % 3) * N + tap * C + channel
            total += tl.load(taps + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + channel * positions + position, cast(total, out.dtype.element_ty), mask=inside)

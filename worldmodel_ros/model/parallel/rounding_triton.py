"""``rounding`` in one kernel launch per call: every value is read once and written once, at its place in the message."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worldmodel_ros.kernels.formats_triton import cast, from_e4m3, largest_magnitude, native_e4m3, scale_for, to_e4m3
from worldmodel_ros.kernels.quantise import FP8_MAX
from .rounding import row_bytes

ROWS = 32  # of a program
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _encode(x, values, scales, rows, F, R, C, row_bytes, D: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr,
            NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of x (F, R, C)
    inside = row < rows
    f, r, c = row // (R * C), row // C % R, row % C
    column = tl.arange(0, D)[None, :]
    part = tl.load(x + row[:, None] * D + column, mask=inside[:, None], other=0.0).to(tl.float32)
    scale, inverse = scale_for(largest_magnitude(part, 1), LIMIT)
    place = f * C + c
    at = values + (r * row_bytes + place * D)[:, None] + column
    tl.store(at, to_e4m3(part * inverse[:, None], NATIVE), mask=inside[:, None])
    tl.store(scales + r * (row_bytes // 4) + F * C * D // 4 + place, scale, mask=inside)


@triton.jit
def _decode(values, scales, out, rows, G, R, C, row_bytes, stride, D: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr,
            NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # of out (G, R, C)
    inside = row < rows
    g, r, c = row // (R * C), row // C % R, row % C
    column = tl.arange(0, D)[None, :]
    place = g * C + c
    bits = tl.load(values + (r * row_bytes + place * D)[:, None] + column, mask=inside[:, None], other=0)
    scale = tl.load(scales + r * (row_bytes // 4) + G * C * D // 4 + place, mask=inside, other=0.0)
    part = from_e4m3(bits, tl.float32, NATIVE) * scale[:, None]
    tl.store(out + (g * stride + (r * C + c) * D)[:, None] + column, cast(part, TYPE), mask=inside[:, None])


def encode(x: Tensor) -> Tensor:
    """As in ``rounding``, for d a power of two."""
    f, r, c, d = x.shape
    x = x.contiguous()
    message = torch.empty(r, row_bytes(f * c, d), dtype=torch.uint8, device=x.device)
    _encode[(triton.cdiv(f * r * c, ROWS),)](x, message, message.view(torch.float32), f * r * c, f, r, c,
                                             message.shape[1], D=d, ROWS=ROWS, LIMIT=FP8_MAX,
                                             NATIVE=native_e4m3(x.device))
    return message


def decode(message: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """As in ``rounding``, for d a power of two."""
    (g, c, d), r = shape, len(message)
    out = torch.empty(g, r, c, d, dtype=dtype, device=message.device) if out is None else out
    if out.shape != (g, r, c, d) or out.dtype != dtype or not out[0].is_contiguous():
        raise ValueError(f'{out.dtype} {tuple(out.shape)} with strides {out.stride()} must be {dtype} {(g, r, c, d)}, each of '
                         f'the first axis contiguous')
    _decode[(triton.cdiv(g * r * c, ROWS),)](message, message.view(torch.float32), out, g * r * c, g, r, c,
                                             message.shape[1], out.stride(0), D=d, ROWS=ROWS, TYPE=TYPES[dtype],
                                             NATIVE=native_e4m3(message.device))
    return out

"""RMSNorm over channels and SiLU of a video's features, in one launch; for either order of the axes in memory."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast

VALUES = 8192  # of a program


def norm_silu_triton(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x / ||x|| * sqrt(C) * weight) over the channels of x (1, C, T, h, w), contiguous or with the channels last;
    weight has C numbers. Computed in float32, rounded once."""
    batch, channels = x.shape[:2]
    positions = x[0, 0].numel()
    last = x.is_contiguous(memory_format=torch.channels_last_3d) and channels > 1
    if batch != 1 or not (last or x.is_contiguous()):
        raise ValueError(f'x {tuple(x.shape)} with strides {x.stride()} must be one video, contiguous or with the channels '
                         f'last')
    out = torch.empty_like(x)
    wide = triton.next_power_of_2(channels)
    block = max(16, VALUES // wide)
    _norm_silu[(triton.cdiv(positions, block),)](
        x, weight, out, positions, 1 if last else positions, channels if last else 1, channels ** 0.5, C=channels, WIDE=wide,
        BLOCK=block, num_warps=8)
    return out


@triton.jit
def _norm_silu(x, weight, out, positions, channel_stride, position_stride, root, C: tl.constexpr, WIDE: tl.constexpr,
               BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDE)
    at = position[:, None] * position_stride + channel[None, :] * channel_stride
    inside = (position < positions)[:, None] & (channel < C)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt_rn(tl.sum(value * value, 1)), 1e-12)
    factor = tl.load(weight + channel, mask=channel < C, other=0.0).to(tl.float32)
    normal = value * (root / length)[:, None] * factor[None, :]
    tl.store(out + at, cast(normal / (1.0 + tl.exp(-normal)), out.dtype.element_ty), mask=inside)

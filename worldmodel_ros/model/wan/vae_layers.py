"""Layers that take the place of those of diffusers' Wan decoder on a GPU: the same numbers with fewer passes over memory.

Norm and SiLU are one kernel; convolutions pad rows and columns themselves, so that only the frames before are put in front; and
nearest neighbours are repeated in their own type, not in float32. Weights keep their names.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NormSilu(nn.Module):
    """In place of a norm that SiLU follows."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gamma, self._scale = norm.gamma, norm.scale

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return F.silu(F.normalize(x.float(), dim=1).to(x.dtype) * self._scale * self.gamma)
        from ...kernels.norm_silu_triton import norm_silu_triton
        if not x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last_3d):
            x = x.contiguous()
        return norm_silu_triton(x, self.gamma.flatten())


class CausalConv(nn.Module):
    """In place of a causal convolution."""

    def __init__(self, conv: nn.Conv3d):
        super().__init__()
        self.weight, self.bias, self._stride = conv.weight, conv.bias, conv.stride
        self._columns, _, self._rows, _, self._frames, _ = conv._padding

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        missing = self._frames
        if cache_x is not None and missing:
            x = torch.cat([cache_x, x], 2)
            missing -= cache_x.shape[2]
        if missing:
            x = F.pad(x, (0, 0, 0, 0, missing, 0))
        return F.conv3d(x, self.weight, self.bias, self._stride, (0, self._rows, self._columns))


class Upsample(nn.Module):
    """In place of the upsampling by nearest neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=(2.0, 2.0), mode='nearest-exact')


def fuse(decoder: nn.Module, channels_last: bool = False) -> None:
    """Put these layers into a decoder; with ``channels_last``, weights in the order that tensor cores read."""
    for owner in list(decoder.modules()):
        for name, layer in list(owner.named_children()):
            kind = type(layer).__name__
            if kind == 'WanCausalConv3d':
                setattr(owner, name, CausalConv(layer))
            elif kind == 'WanUpsample':
                owner.register_module(name, Upsample())
            elif kind == 'SiLU' and name == 'nonlinearity':
                setattr(owner, name, nn.Identity())
            elif kind == 'WanRMS_norm' and name in ('norm1', 'norm2', 'norm_out'):
                setattr(owner, name, NormSilu(layer))
    if channels_last:
        for layer in decoder.modules():
            if isinstance(layer, nn.Conv2d | CausalConv):
                form = torch.channels_last if isinstance(layer, nn.Conv2d) else torch.channels_last_3d
                layer.weight.data = layer.weight.data.contiguous(memory_format=form)

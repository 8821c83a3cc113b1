"""Layers that take the place of those of diffusers' Wan decoder on a GPU: the same numbers with fewer passes over memory.

Norm and SiLU are one kernel; convolutions pad rows and columns themselves, so that only the frames before are put in front; and
nearest neighbours are repeated in their own type, not in float32. Weights keep their names.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KEPT = 2  # frames before, of a convolution over three


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

    def behind(self, x: Tensor, bias: Tensor | None, kept: Tensor | None) -> Tensor:
        """Of x + bias, behind the frames that were ``kept``, of which two are needed: zeros, where there are none."""
        x = x.contiguous(memory_format=torch.channels_last_3d)
        if x.is_cuda:
            from ...kernels.norm_silu_triton import norm_silu_triton
            out = norm_silu_triton(x, self.gamma.flatten(), bias, KEPT)
        else:
            normal = self(x if bias is None else x + bias.view(-1, 1, 1, 1))
            out = F.pad(normal, (0, 0, 0, 0, KEPT, 0)).contiguous(memory_format=torch.channels_last_3d)
        count = 0 if kept is None else kept.shape[2]
        out[:, :, :KEPT - count] = 0.0
        if count:
            out[:, :, KEPT - count:KEPT] = kept
        return out


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
        n, c, h, w = x.shape
        if not x.is_cuda or not x.is_contiguous(memory_format=torch.channels_last):
            return F.interpolate(x, scale_factor=(2.0, 2.0), mode='nearest-exact')
        x = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)  # copied at a fourth of what the above takes
        return x.reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """In place of a residual block, for features with the channels last: what a convolution reads is written where the frames
    before lie in front of it, and its bias is added by what reads its result."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2 = block.norm1, block.conv1, block.norm2, block.conv2
        self.conv_shortcut = block.conv_shortcut

    def forward(self, x: Tensor, feat_cache: list, feat_idx: list[int]) -> Tensor:
        h, bias = x, None
        for norm, conv in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            at = feat_idx[0]
            padded = norm.behind(h, bias, feat_cache[at])
            feat_cache[at] = padded[:, :, -KEPT:].clone()
            feat_idx[0] += 1
            h, bias = F.conv3d(padded, conv.weight, None, 1, (0, 1, 1)), conv.bias
        shortcut = self.conv_shortcut(x)
        if not h.is_cuda:
            return h + bias.view(-1, 1, 1, 1) + shortcut
        from ...kernels.norm_silu_triton import add_triton
        h, shortcut = (part.contiguous(memory_format=torch.channels_last_3d) for part in (h, shortcut))
        return add_triton(h, bias, shortcut)


def fuse(decoder: nn.Module, channels_last: bool = False, blocks: bool = False) -> None:
    """Put these layers into a decoder; with ``channels_last``, weights in the order that tensor cores read, and with ``blocks``
    residual blocks, too."""
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
    for owner in list(decoder.modules()) if blocks else ():
        for name, layer in list(owner.named_children()):
            if type(layer).__name__ == 'WanResidualBlock':
                setattr(owner, name, ResidualBlock(layer))
    if channels_last:
        for layer in decoder.modules():
            if isinstance(layer, nn.Conv2d | CausalConv):
                form = torch.channels_last if isinstance(layer, nn.Conv2d) else torch.channels_last_3d
                layer.weight.data = layer.weight.data.contiguous(memory_format=form)

"""Replacements for layers of diffusers' Wan decoder on a GPU: the same results with fewer passes over memory.

Norm and SiLU are one kernel; convolutions pad rows and columns themselves, so that only previous frames are prepended; and
nearest neighbours are repeated in their own type, not in float32. Weights keep their names.

If processes divide the images among them (``Rows``), each has the same rows of all features, and convolutions get the rows
above and below from the processes that have them.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel.group import Group

ALIGNED = 8  # tensor cores need a number of channels that is a multiple of this
KEPT = 2  # previous frames that a convolution over three needs
LARGE = 1 << 20  # bytes of a frame from which it is copied by itself
FIRST = 'Rep'  # diffusers' mark in place of previous frames: one frame was seen, which was not doubled


class Rows:
    """This process's rows of images and features (..., rows, columns), divided equally among the processes of a group, in
    their order from the top on."""

    def __init__(self, group: Group):
        self._group = group

    def own(self, x: Tensor) -> Tensor:
        """Return own rows of x, which every process has whole."""
        return self._group.own(x, -2)

    def whole(self, x: Tensor) -> Tensor:
        """Gather the rows of x of all processes, in each of them."""
        return self._group.gather(x, -2)

    def between_neighbours(self, x: Tensor) -> Tensor:
        """Return images x (T, C, h, w) with the row above and the row below; zeros where the image ends."""
        form = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        out = torch.empty((*x.shape[:2], x.shape[2] + 2, x.shape[3]), dtype=x.dtype, device=x.device, memory_format=form)
        out[:, :, 1:-1] = x
        self.fill_edges(out)
        return out

    def video_between_neighbours(self, x: Tensor, kept: Tensor | None, missing: int) -> Tensor:
        """Return a video x (1, C, T, h, w) behind ``missing`` frames of zeros and the ``kept`` ones, with rows as in
        ``between_neighbours``."""
        form = torch.channels_last_3d if x.is_contiguous(memory_format=torch.channels_last_3d) else torch.contiguous_format
        first = missing + (0 if kept is None else kept.shape[2])
        out = torch.empty((*x.shape[:2], first + x.shape[2], x.shape[3] + 2, x.shape[4]), dtype=x.dtype, device=x.device,
                          memory_format=form)
        inner = out[..., 1:-1, :]
        fill_previous(inner[:, :, :first], kept)
        copy_frames(inner[:, :, first:], x)
        self.fill_edges(out)
        return out

    def fill_edges(self, x: Tensor) -> None:
        """Write the first and the last row of x: the last but one of the process above and the second of the one below; zeros
        where the image ends."""
        rank, last = self._group.rank, self._group.count - 1
        edges = self._group.link.all_gather(torch.stack([x[..., 1, :], x[..., -2, :]]))
        x[..., 0, :] = edges[rank - 1, 1] if rank else 0.0
        x[..., -1, :] = edges[rank + 1, 0] if rank < last else 0.0


def copy_frames(out: Tensor, x: Tensor) -> None:
    """Copy x (1, C, T, h, w) to ``out``, large ones frame by frame: with channels last, a frame lies in one piece in both,
    which a GPU's copy engines move at the speed of its memory."""
    if x[0, :, 0].nbytes < LARGE:
        out.copy_(x)
        return
    for frame in range(x.shape[2]):
        out[:, :, frame].copy_(x[:, :, frame])


def fill_previous(out: Tensor, kept: Tensor | None) -> None:
    """Write the ``kept`` frames to the end of ``out``, both (1, C, T, h, w), and zeros before them."""
    count = 0 if kept is None else kept.shape[2]
    missing = out.shape[2] - count
    out[:, :, :missing] = 0.0
    if count:
        copy_frames(out[:, :, missing:], kept)


class NormSilu(nn.Module):
    """Replaces a norm followed by SiLU."""

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

    def behind(self, x: Tensor, bias: Tensor | None, kept: Tensor | None, edge: int = 0) -> Tensor:
        """Return the result for x + bias, behind the ``kept`` previous frames; of the two needed, missing ones are zeros. Above
        and below, there are ``edge`` rows still to be written."""
        x = x.contiguous(memory_format=torch.channels_last_3d)
        if x.is_cuda:
            from ...kernels.norm_silu_triton import norm_silu_triton
            out = norm_silu_triton(x, self.gamma.flatten(), bias, KEPT, edge)
        else:
            normal = self(x if bias is None else x + bias.view(-1, 1, 1, 1))
            out = F.pad(normal, (0, 0, edge, edge, KEPT, 0)).contiguous(memory_format=torch.channels_last_3d)
        fill_previous(out[:, :, :KEPT, edge:out.shape[-2] - edge], kept)
        return out


class CausalConv(nn.Module):
    """A convolution over previous frames, rows and columns: ``weight`` (O, C, T, H, W). ``padding``: frames before the
    first, rows and columns on each side. ``divided``: rows of images that processes divide."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, stride: tuple[int, int, int],
                 padding: tuple[int, int, int], divided: Rows | None = None):
        super().__init__()
        self.weight, self.bias, self.divided = weight, bias, divided
        self._stride, (self._frames, self._rows, self._columns) = stride, padding

    @classmethod
    def of(cls, conv: nn.Conv3d, divided: Rows | None = None) -> CausalConv:
        """Return the replacement of diffusers' causal convolution."""
        columns, _, rows, _, frames, _ = conv._padding
        return cls(conv.weight, conv.bias, conv.stride, (frames, rows, columns), divided)

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        return self.convolved(x, cache_x, self.bias)

    def convolved(self, x: Tensor, cache_x: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the result with ``bias`` instead of the layer's own."""
        kept, rows = cache_x if self._frames else None, self._rows
        missing = self._frames - (0 if kept is None else kept.shape[2])
        if self.divided is not None and rows:
            x, rows = self.divided.video_between_neighbours(x, kept, missing), 0
        else:
            x = x if kept is None else torch.cat([kept, x], 2)
            x = F.pad(x, (0, 0, 0, 0, missing, 0)) if missing else x
        return F.conv3d(x, self.weight, bias, self._stride, (0, rows, self._columns))


class ImagesConv(nn.Module):
    """Replaces a causal 3x3x3 convolution to few channels, on a GPU, whose products are at least 64 channels wide: each of
    the nine places of rows and columns has its own channels of a convolution over frames alone, which are then added up
    where they belong."""

    def __init__(self, conv: CausalConv):
        super().__init__()
        apart = conv.weight.permute(3, 4, 0, 1, 2).flatten(0, 2)[..., None, None]  # (9 * O, C, 3, 1, 1)
        filled = F.pad(apart, (0, 0) * 4 + (0, -len(apart) % ALIGNED))
        self.taps = CausalConv(nn.Parameter(filled, requires_grad=False), None, (1, 1, 1), (2, 1, 1), conv.divided)
        self.bias = conv.bias

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        taps = self.taps(x, cache_x).contiguous(memory_format=torch.channels_last_3d)
        if not taps.is_cuda:
            return add_taps(taps, self.bias)
        from ...kernels.norm_silu_triton import add_taps_triton
        return add_taps_triton(taps, self.bias)


def add_taps(taps: Tensor, bias: Tensor) -> Tensor:
    """Return the result (1, C, T, h, w) of a 3x3 convolution, from taps (1, N, T, h + 2, w + 2): the first 9 * C of N
    channels are C for each place."""
    channels, rows, columns = len(bias), taps.shape[3] - 2, taps.shape[4] - 2
    total = bias.float().view(-1, 1, 1, 1)
    for tap in range(9):
        y, x = divmod(tap, 3)
        total = total + taps[:, tap * channels:(tap + 1) * channels, :, y:y + rows, x:x + columns].float()
    return total.to(taps.dtype)


def doubled_frames(x: Tensor, bias: Tensor, edge: int = 0) -> Tensor:
    """Return twice as many images (2 * T, C, h + 2 * edge, w) of x + bias, x (T, 2 * C, h, w): the first half of the channels
    comes before the second. Zeros are above and below."""
    x = (x + bias[:, None, None]).unflatten(1, (2, -1)).flatten(0, 1)
    return F.pad(x, (0, 0, edge, edge))


def interleaved(y: Tensor, bias: Tensor) -> Tensor:
    """Return images (T, C, 2 * h, 2 * w) of y + bias, y (T, 4 * C, h + 1, w + 1): the quarters of its channels, in turn, are
    even rows and columns, even rows and odd columns, odd and even, odd and odd. Odd ones begin a place further on in y."""
    y = (y + bias[:, None, None]).unflatten(1, (2, 2, -1))
    rows, columns = y.shape[-2] - 1, y.shape[-1] - 1
    parts = [[y[:, row, column, :, row:row + rows, column:column + columns] for column in (0, 1)] for row in (0, 1)]
    return torch.stack([torch.stack(part, -1) for part in parts], -3).flatten(-2).flatten(-3, -2)


class DividedConv(nn.Module):
    """Replaces a convolution over rows and columns of images that processes divide."""

    def __init__(self, conv: nn.Conv2d, rows: Rows):
        super().__init__()
        self.weight, self.bias, self._padding, self._divided = conv.weight, conv.bias, conv.padding, rows

    def forward(self, x: Tensor) -> Tensor:
        rows = self._padding[0]  # at most one
        if rows:
            x, rows = self._divided.between_neighbours(x), 0
        return F.conv2d(x, self.weight, self.bias, padding=(rows, self._padding[1]))


class WholeImages(nn.Module):
    """A layer in which every row sees all others, computed by every process for all rows: it is the smallest part."""

    def __init__(self, layer: nn.Module, rows: Rows):
        super().__init__()
        self.layer, self._divided = layer, rows

    def forward(self, x: Tensor) -> Tensor:
        return self._divided.own(self.layer(self._divided.whole(x)))


class Upsample(nn.Module):
    """Replaces nearest-neighbour upsampling."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        if not x.is_cuda or not x.is_contiguous(memory_format=torch.channels_last):
            return F.interpolate(x, scale_factor=(2.0, 2.0), mode='nearest-exact')
        x = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)  # copied at a fourth of the cost of the above
        return x.reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """Replaces a residual block, for channels-last features: the input of a convolution is written directly behind the
    previous frames, and its bias is added by what reads its result."""

    def __init__(self, block: nn.Module, rows: Rows | None = None):
        super().__init__()
        self._divided = rows
        self.norm1, self.conv1, self.norm2, self.conv2 = block.norm1, block.conv1, block.norm2, block.conv2
        self.conv_shortcut = block.conv_shortcut

    def forward(self, x: Tensor, feat_cache: list, feat_idx: list[int]) -> Tensor:
        h, bias, edge = x, None, 0 if self._divided is None else 1
        for norm, conv in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            at = feat_idx[0]
            padded = norm.behind(h, bias, feat_cache[at], edge)
            feat_cache[at] = padded[:, :, -KEPT:, edge:padded.shape[-2] - edge].clone(memory_format=torch.channels_last_3d)
            feat_idx[0] += 1
            if edge:
                self._divided.fill_edges(padded)
            h, bias = F.conv3d(padded, conv.weight, None, 1, (0, 1 - edge, 1)), conv.bias
        shortcut = self.conv_shortcut(x)
        if not h.is_cuda:
            return h + bias.view(-1, 1, 1, 1) + shortcut
        from ...kernels.norm_silu_triton import add_triton
        h, shortcut = (part.contiguous(memory_format=torch.channels_last_3d) for part in (h, shortcut))
        return add_triton(h, bias, shortcut)


class Upsampling(nn.Module):
    """Replaces the upsampling of rows, columns and, if it has a convolution for that, frames; for channels-last features.

    A 3x3 convolution of doubled nearest neighbours sees only 2x2 different positions, depending on the parity of row and
    column. So it is four 2x2 convolutions of the features before doubling, whose weights are sums: four ninths of the products,
    and nothing is doubled in memory.
    """

    def __init__(self, layer: nn.Module, rows: Rows | None = None):
        super().__init__()
        self._divided, conv = rows, layer.resample[1]
        self.time_conv = getattr(layer, 'time_conv', None)
        self.weight = nn.Parameter(phases(conv.weight).contiguous(memory_format=torch.channels_last), requires_grad=False)
        self.bias = nn.Parameter(conv.bias.repeat(4), requires_grad=False)

    def forward(self, x: Tensor, feat_cache: list, feat_idx: list[int]) -> Tensor:
        frames = x.shape[2]
        if self.time_conv is not None:
            at = feat_idx[0]
            feat_idx[0] += 1
            if feat_cache[at] is None:
                feat_cache[at] = FIRST
            else:
                before = feat_cache[at] if isinstance(feat_cache[at], Tensor) else None
                feat_cache[at] = newest(x, before)
                x, frames = self.time_conv.convolved(x, before, None), 2 * frames
        double, interleave = doubled_frames, interleaved
        if x.is_cuda:
            from ...kernels.norm_silu_triton import doubled_frames_triton as double, interleaved_triton as interleave
        x, edge = x.transpose(1, 2)[0].contiguous(memory_format=torch.channels_last), 0 if self._divided is None else 1
        if frames > len(x):
            x = double(x, self.time_conv.bias, edge)
            if edge:
                self._divided.fill_edges(x)
        elif edge:
            x = self._divided.between_neighbours(x)
        y = F.conv2d(x, self.weight, padding=(1 - edge, 1)).contiguous(memory_format=torch.channels_last)
        return interleave(y, self.bias).transpose(0, 1)[None]


def phases(weight: Tensor) -> Tensor:
    """Convert (O, C, 3, 3) of a convolution of doubled features to (4 * O, C, 2, 2) of one of the features before: for the
    result's even rows and columns, its even rows and odd columns, odd and even, odd and odd; computed in float32."""
    def even_and_odd(weight: Tensor, axis: int) -> Tensor:
        first, middle, last = weight.unbind(axis)
        return torch.stack([torch.stack([first, middle + last], axis), torch.stack([first + middle, last], axis)])
    return even_and_odd(even_and_odd(weight.float(), -2), -1).transpose(0, 1).flatten(0, 2).to(weight.dtype)


def newest(x: Tensor, before: Tensor | None) -> Tensor:
    """Return the two newest frames, of ``before``, or zeros, and x."""
    kept = x[:, :, -KEPT:]
    if kept.shape[2] < KEPT:
        kept = torch.cat([torch.zeros_like(kept) if before is None else before[:, :, -1:], kept], 2)
    return kept.clone()


def fuse(decoder: nn.Module, channels_last: bool = False, blocks: bool = False, rows: Rows | None = None) -> None:
    """Put these layers into a decoder; with ``channels_last``, weights in the order that tensor cores read, and with
    ``blocks``, residual blocks, upsampling and the last convolution, too. ``rows``: those of its images, if processes divide
    them."""
    for owner in list(decoder.modules()):
        for name, layer in list(owner.named_children()):
            kind = type(layer).__name__
            if kind == 'WanCausalConv3d':
                setattr(owner, name, CausalConv.of(layer, rows))
            elif kind == 'WanUpsample':
                owner.register_module(name, Upsample())
            elif kind == 'SiLU' and name == 'nonlinearity':
                setattr(owner, name, nn.Identity())
            elif kind == 'WanRMS_norm' and name in ('norm1', 'norm2', 'norm_out'):
                setattr(owner, name, NormSilu(layer))
            elif rows is not None and kind == 'WanResample':
                layer.resample[1] = DividedConv(layer.resample[1], rows)
            elif rows is not None and kind == 'WanAttentionBlock':
                owner.register_module(name, WholeImages(layer, rows))
    for owner in list(decoder.modules()) if blocks else ():
        for name, layer in list(owner.named_children()):
            if type(layer).__name__ == 'WanResidualBlock':
                setattr(owner, name, ResidualBlock(layer, rows))
            elif type(layer).__name__ == 'WanResample' and layer.mode.startswith('upsample'):
                setattr(owner, name, Upsampling(layer, rows))
    if blocks:
        decoder.conv_out = ImagesConv(decoder.conv_out)
    if channels_last:
        for layer in decoder.modules():
            if isinstance(layer, nn.Conv2d | CausalConv | DividedConv):
                form = torch.channels_last if layer.weight.dim() == 4 else torch.channels_last_3d
                layer.weight.data = layer.weight.data.contiguous(memory_format=form)

"""The Wan diffusion transformer (Wan et al. 2025), one chunk of one sequence at a time, with LingBot-World's camera control.

Everything that is the same in all passes of a chunk is computed once and passed in: modulation (a table by timestep), the
camera's scales and shifts, and the prompt's keys and values. ``SelfAttention`` knows where keys and values of earlier chunks
lie, and how positions rotate them.

The residual stream is float32; the layers may be in bfloat16, or in FP8 (``precision``). On a GPU, one kernel between two
products of a layer (``kernels.rows``) adds the output of the previous product to the stream, and normalises for the next.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.flat_attention import cross_attention
from ...kernels.linear import linear_gelu
from ...kernels.quantise import FP8_MAX, SCALE_MIN
from ...kernels.rows import Rounded, row_kernels
from ..parallel.group import ArrivingProducts, TensorParallel
from .config import PATCH, WanConfig
from .norms import inverse_rms

KEY_MULTIPLE = 8  # of a prompt's keys, so that attention under a bias needs no copy


Attended = Tensor | Rounded | ArrivingProducts


class Run(Protocol):
    """This process's run of the tokens: ``parallel.Run``."""

    def own(self, rows: Tensor) -> Tensor: ...

    def whole(self, rows: Tensor, count: int) -> Tensor: ...


class SelfAttention(Protocol):
    """Attention of one pass to the window and to the chunk itself."""

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, fp8: bool = False) -> Attended:
        """Map a layer's products (N, 3, H, d) for a chunk's tokens, queries and keys neither normalised
        (by the weights (H * d,)) nor rotated, to (N, H * d), with ``fp8`` rounded where that costs nothing; keep keys and
        values for later passes. If processes have runs of the tokens, map all tokens and own heads to own tokens and all
        heads."""

    def keep(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        """Keep keys and values only."""


@dataclass(frozen=True)
class Modulation:
    """The effect of a timestep: on each layer, float32 (L, 9, D), and on the output, (2, D).

    Per layer: shift, scale (less one) and gate of attention, of the MLP, and of cross-attention, where they are the same at all
    times: the norm's bias and weight, and one.
    """

    blocks: Tensor
    head: Tensor


@dataclass(frozen=True)
class Prompt:
    """A text as the layers see it: keys and values (L, H, S, d), and the logarithm of how often each row counts, (S,).

    ``scales``, float32 (L,): round the attention to the values, for a product in FP8.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    scales: Tensor


CameraControl = Sequence[Tensor]  # per layer: scales and shifts (N, 2 * D)


@dataclass(frozen=True)
class Unsummed:
    """The residual stream x, float32 (N, D), with gate (1, D) * y (N, D) still to be added by the next kernel that reads x."""

    x: Tensor
    y: Tensor | None = None
    gate: Tensor | None = None

    @property
    def added(self) -> tuple[Tensor, Tensor] | None:
        return None if self.y is None else (self.y, self.gate)


class WanBlock(nn.Module):
    """One layer, in three stages: ``enter``, the attention, where tokens meet, and ``leave``."""

    def __init__(self, config: WanConfig):
        super().__init__()
        d = config.width
        self.heads, self.head_dim, self.eps = config.heads, config.head_dim, config.eps
        self.modulation = nn.Parameter(torch.empty(6, d))
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_norm, self.k_norm = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.cross_norm = nn.LayerNorm(d, config.eps)
        self.cross_q, self.cross_kv, self.cross_proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.cross_q_norm, self.cross_k_norm = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.ffn = nn.Sequential(nn.Linear(d, config.ffn), nn.GELU(approximate='tanh'), nn.Linear(config.ffn, d))
        self.camera = nn.ModuleDict({'first': nn.Linear(d, d), 'second': nn.Linear(d, d), 'film': nn.Linear(d, 2 * d)}) \
            if config.camera_width else None
        self.fp8 = False  # set by ``precision.to_fp8``
        self.group: TensorParallel | None = None  # set by ``parallel.join``

    def enter(self, stream: Unsummed, modulation: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values (N, 3, H, d), as the linear layer returns them, and the stream (N, D), under
        modulation (9, D). If processes have runs of the tokens, the stream is of own tokens, and queries, keys and values
        are those of all tokens for own heads."""
        shift, scale = modulation[:1], modulation[1:2]
        x, rows, _ = row_kernels(stream.x).modulate_rows(stream.x, shift, scale, stream.added, self.fp8, eps=self.eps,
                                                         dtype=self.dtype)
        return self.qkv(rows).flatten(0, -2).unflatten(-1, (3, -1, self.head_dim)), x

    def leave(self, x: Tensor, attended: Attended, modulation: Tensor, camera: Tensor | None,
              keys: Tensor, values: Tensor, bias: Tensor, scale: Tensor) -> Unsummed:
        """Return the stream after the layer; attended (N, D), the camera's scales and shifts (N, 2 * D), the prompt's keys and
        values (H, S, d), bias (S,) and scale ()."""
        kernels, parts, options = row_kernels(x), modulation.split(1), {'eps': self.eps, 'dtype': self.dtype}
        if isinstance(attended, ArrivingProducts):
            y = attended.through(self.proj)
        else:
            y = self.proj(attended.to(self.dtype) if isinstance(attended, Tensor) else attended)
        x, rows, _ = kernels.modulate_rows(x, parts[6], parts[7], (y, parts[2]), self.fp8, film=camera, **options)
        q = self.cross_q(rows)
        rms = None if self.group is None else inverse_rms(q[:, None], self.eps, self.group)[0]
        y = self.cross_proj(cross_attention(q, keys, values, bias, self.eps, scale if self.fp8 else None, rms))
        first, second = self.ffn[0], self.ffn[2]
        x, rows, ahead = kernels.modulate_rows(x, parts[3], parts[4], (y, parts[8]), self.fp8,
                                               bound=first.bound if self.fp8 else None, **options)
        hidden = first(rows, ahead) if self.fp8 else linear_gelu(
            rows, first.weight, first.bias, rows.is_cuda and torch.cuda.get_device_capability(rows.device) == (9, 0))
        return Unsummed(x, second(hidden), parts[5])

    def prompt(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (H, S, d) of embedded text (S, D). The weights of the queries' norm are folded into the
        keys."""
        k, v = self.cross_kv(rows).chunk(2, -1)
        rms = inverse_rms(k[:, None], self.eps, self.group)[0]
        k = (k.float() * rms[:, None] * (self.cross_k_norm.float() * self.cross_q_norm.float())).to(v.dtype)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(0, 1).contiguous() for part in (k, v))

    def control(self, embedded: Tensor) -> Tensor:
        """Return scales and shifts (N, 2 * D) of embedded rays (N, D)."""
        hidden = self.camera['second'](F.silu(self.camera['first'](embedded))) + embedded
        return self.camera['film'](hidden)

    def cross_modulation(self) -> Tensor:
        """Return the norm before cross-attention as shift, scale and gate, float32 (3, D)."""
        weight, bias = self.cross_norm.weight.float(), self.cross_norm.bias.float()
        return torch.stack([bias, weight - 1.0, torch.ones_like(bias)])

    @property
    def dtype(self) -> torch.dtype:
        return self.cross_kv.weight.dtype  # never in FP8


class WanDiT(nn.Module):
    """The network. ``empty``: parameters have shapes and no memory yet, for ``checkpoint.build`` to fill in."""

    def __init__(self, config: WanConfig, empty: bool = False):
        super().__init__()
        self.config = config
        d = config.width
        with torch.device('meta') if empty else nullcontext():
            self.patch = nn.Linear(config.in_channels * PATCH ** 2, d)
            self.text = nn.Sequential(nn.Linear(config.text_width, d), nn.GELU(approximate='tanh'), nn.Linear(d, d))
            self.time = nn.Sequential(nn.Linear(config.time_width, d), nn.SiLU(), nn.Linear(d, d))
            self.time_projection = nn.Linear(d, 6 * d)
            self.camera = nn.ModuleDict({'rays': nn.Linear(config.camera_width, d), 'first': nn.Linear(d, d),
                                         'second': nn.Linear(d, d)}) if config.camera_width else None
            self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.layers))
            self.head_modulation = nn.Parameter(torch.empty(2, d))
            self.head = nn.Linear(d, config.out_channels * PATCH ** 2)
        self.run: Run | None = None  # of the tokens, if processes share them (``parallel``)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def modulation(self, timestep: float) -> Modulation:
        """Return the modulation of a timestep, the same for all tokens; in float32, from phases in float64."""
        half = self.config.time_width // 2
        phase = timestep * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        embedding = torch.cat([phase.cos(), phase.sin()]).float().to(self.device)
        embedding = self.time(embedding)
        rows = self.time_projection(F.silu(embedding)).view(6, -1)
        return Modulation(torch.stack([torch.cat([block.modulation.float() + rows, block.cross_modulation()])
                                       for block in self.blocks]), self.head_modulation.float() + embedding)

    def prompt(self, text: Tensor) -> Prompt:
        """Prepare a text (n, text_width), n at most ``config.text_tokens``, for all layers, once per prompt.

        The published networks pad it with zeros and attend to them: since all rows of padding are alike, one row counts for all
        here.
        """
        count, missing = len(text), self.config.text_tokens - len(text)
        if text.shape[1:] != (self.config.text_width,) or missing < 0:
            raise ValueError(f'text {tuple(text.shape)} must be (at most {self.config.text_tokens}, {self.config.text_width})')
        rows = F.pad(text, (0, 0, 0, 1 if missing else 0))
        filler = -len(rows) % KEY_MULTIPLE
        bias = torch.zeros(len(rows) + filler)
        if missing:
            bias[count] = torch.tensor(float(missing)).log()
        bias[len(rows):] = -torch.inf
        dtype = self.blocks[0].dtype
        embedded = self.text(F.pad(rows, (0, 0, 0, filler)).to(self.device, dtype))
        keys, values = zip(*(block.prompt(embedded) for block in self.blocks))
        values = torch.stack(values)
        scales = (values.flatten(1).abs().amax(1).float() * (1.0 / FP8_MAX)).clamp_min(SCALE_MIN)
        return Prompt(torch.stack(keys), values, bias.to(self.device), scales)

    def camera_control(self, rays: Tensor) -> CameraControl:
        """Return each layer's scales and shifts for a chunk's rays (N, camera_width), as from ``camera.ray_tokens``; they do
        not depend on the timestep."""
        if self.camera is None:
            raise ValueError('this network has no camera control')
        rays = rays if self.run is None else self.run.own(rays)
        embedded = self.camera['rays'](rays.to(self.device, self.blocks[0].dtype))
        embedded = embedded + self.camera['second'](F.silu(self.camera['first'](embedded)))
        return [block.control(embedded) for block in self.blocks]

    def forward(self, latents: Tensor, modulation: Modulation, prompt: Prompt, camera: CameraControl | None,
                attention: SelfAttention) -> Tensor:
        """Return the velocity (noise minus clean), float32 (out_channels, F, h, w), of latents (in_channels, F, h, w)."""
        _, frames, height, width = latents.shape
        stream = self._layers(latents, modulation, prompt, camera, attention)
        shift, scale = modulation.head.split(1)
        _, rows, _ = row_kernels(stream.x).modulate_rows(stream.x, shift, scale, stream.added, False, eps=self.config.eps)
        tokens = self.head(rows)
        if self.run is not None:
            tokens = self.run.whole(tokens, frames * height * width // PATCH ** 2)
        return unpatchify(tokens, frames, height // PATCH, width // PATCH)

    def keep(self, latents: Tensor, modulation: Modulation, prompt: Prompt, camera: CameraControl | None,
             attention: SelfAttention) -> None:
        """Run ``forward`` up to the last layer's keys and values."""
        self._layers(latents, modulation, prompt, camera, attention, whole=False)

    def _layers(self, latents: Tensor, modulation: Modulation, prompt: Prompt, camera: CameraControl | None,
                attention: SelfAttention, whole: bool = True) -> Unsummed | None:
        channels, _, height, width = latents.shape
        if channels != self.config.in_channels or height % PATCH or width % PATCH:
            raise ValueError(f'latents {tuple(latents.shape)} must be ({self.config.in_channels}, frames, even, even)')
        tokens = patchify(latents.to(self.device, torch.float32))
        stream = Unsummed(self.patch(tokens if self.run is None else self.run.own(tokens)))
        for layer, block in enumerate(self.blocks):
            rows = modulation.blocks[layer]
            qkv, x = block.enter(stream, rows)
            if not whole and layer == len(self.blocks) - 1:
                attention.keep(layer, qkv, block.q_norm, block.k_norm)
                return None
            attended = attention.attend(layer, qkv, block.q_norm, block.k_norm, block.fp8)
            stream = block.leave(x, attended, rows, None if camera is None else camera[layer], prompt.keys[layer],
                                 prompt.values[layer], prompt.bias, prompt.scales[layer])
        return stream


def patchify(latents: Tensor) -> Tensor:
    """Split (C, F, h, w) into tokens (F * h * w / 4, C * 4), row by row."""
    c, f, h, w = latents.shape
    x = latents.reshape(c, f, h // PATCH, PATCH, w // PATCH, PATCH).permute(1, 2, 4, 0, 3, 5)
    return x.reshape(f * h * w // PATCH ** 2, -1)


def unpatchify(tokens: Tensor, frames: int, rows: int, columns: int) -> Tensor:
    """Assemble tokens (F * rows * columns, 4 * C) to (C, F, 2 * rows, 2 * columns); the channel varies fastest in a token."""
    x = tokens.view(frames, rows, columns, PATCH, PATCH, -1).permute(5, 0, 1, 3, 2, 4)
    return x.reshape(x.shape[0], frames, rows * PATCH, columns * PATCH)

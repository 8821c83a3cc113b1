"""The Wan diffusion transformer (Wan et al. 2025), one chunk of one sequence at a time, with LingBot-World's camera control.

Everything that is the same in all passes of a chunk is computed once and handed in: modulation (a table by timestep), the
camera's scales and shifts, and the prompt's keys and values. Where keys and values of earlier chunks lie, and how positions
rotate them, is the attention's business (`SelfAttention`).

The residual stream is float32; the layers may be in bfloat16, or in FP8 (`precision`).
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import PATCH, WanConfig
from .rotary import rotate

KEY_MULTIPLE = 8  # keys of a prompt: what attention under a bias takes without a copy


class SelfAttention(Protocol):
    """Attention of one pass to the window and to the chunk itself."""

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        """From a layer's products (N, 3, H, d) for the tokens of a chunk, queries and keys neither normalised (by the
        weights (H * d,)) nor rotated, to (N, H * d); keeps keys and values for the passes to come."""


@dataclass(frozen=True)
class Modulation:
    """What a timestep does: to each layer, float32 (L, 6, D), and to the output, (2, D)."""

    blocks: Tensor
    head: Tensor


@dataclass(frozen=True)
class Prompt:
    """A text as the layers see it: keys and values (L, 1, H, S, d), and the logarithm of how often each row counts, (S,)."""

    keys: Tensor
    values: Tensor
    bias: Tensor


CameraControl = Sequence[tuple[Tensor, Tensor]]  # of each layer: scale and shift (N, D)


def normalise(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, H, d), float32, of products (N, 3, H, d): RMSNorm over all heads of a token, in which the
    Wan family differs from most."""
    q, k, v = qkv.float().unbind(1)
    shape = q.shape
    q, k = (F.rms_norm(x.flatten(1), (x[0].numel(),), weight.float(), eps).view(shape)
            for x, weight in ((q, q_weight), (k, k_weight)))
    return q, k, v


def normalise_and_rotate(qkv: Tensor, rotary: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
                         ) -> tuple[Tensor, Tensor, Tensor]:
    """`normalise`, then rotated by rotary (2, N, d / 2)."""
    q, k, v = normalise(qkv, q_weight, k_weight, eps)
    cos, sin = rotary[:, :, None]
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class WanBlock(nn.Module):
    """One layer, in the three stages between which tokens meet: `enter`, the attention, `leave`."""

    def __init__(self, config: WanConfig):
        super().__init__()
        d = config.width
        self.heads, self.eps = config.heads, config.eps
        self.modulation = nn.Parameter(torch.empty(6, d))
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_norm, self.k_norm = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.cross_norm = nn.LayerNorm(d, config.eps)
        self.cross_q, self.cross_kv, self.cross_proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.cross_q_norm, self.cross_k_norm = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.ffn = nn.Sequential(nn.Linear(d, config.ffn), nn.GELU(approximate='tanh'), nn.Linear(config.ffn, d))
        self.camera = nn.ModuleDict({name: nn.Linear(d, d) for name in ('first', 'second', 'scale', 'shift')}) \
            if config.camera_width else None

    def enter(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x (N, D) float32 and modulation (6, D) to queries, keys and values (N, 3, H, d), as the linear layer gives them."""
        rows = self._modulated(x, modulation[0], modulation[1])
        return self.qkv(rows).unflatten(-1, (3, self.heads, -1))

    def leave(self, x: Tensor, attended: Tensor, modulation: Tensor, camera: tuple[Tensor, Tensor] | None, keys: Tensor,
              values: Tensor, bias: Tensor) -> Tensor:
        """x after the layer; attended (N, D), the camera's scale and shift (N, D), the prompt's keys and values
        (1, H, S, d) and bias (S,)."""
        x = x + modulation[2] * self.proj(attended.to(self.dtype)).float()
        if camera is not None:  # on the residual stream itself
            x = (1.0 + camera[0].float()) * x + camera[1].float()
        x = x + self._cross(x, keys, values, bias).float()
        rows = self._modulated(x, modulation[3], modulation[4])
        return x + modulation[5] * self.ffn(rows).float()

    def prompt(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (1, H, S, d) of embedded text (S, D)."""
        k, v = self.cross_kv(rows).chunk(2, -1)
        k = F.rms_norm(k.float(), k.shape[-1:], self.cross_k_norm.float(), self.eps).to(v.dtype)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None].contiguous() for part in (k, v))

    def control(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift (N, D) of embedded rays (N, D)."""
        hidden = self.camera['second'](F.silu(self.camera['first'](embedded))) + embedded
        return self.camera['scale'](hidden), self.camera['shift'](hidden)

    @property
    def dtype(self) -> torch.dtype:
        return self.cross_kv.weight.dtype  # which is never in FP8

    def _modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return (F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1.0 + scale) + shift).to(self.dtype)

    def _cross(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        rows = F.layer_norm(x, x.shape[-1:], self.cross_norm.weight.float(), self.cross_norm.bias.float(), self.eps)
        q = self.cross_q(rows.to(self.dtype))
        q = F.rms_norm(q.float(), q.shape[-1:], self.cross_q_norm.float(), self.eps).to(self.dtype)
        q = q.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]
        mask = bias.to(q.dtype).expand(q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.cross_proj(out[0].transpose(0, 1).flatten(1))


class WanDiT(nn.Module):
    """The network. ``empty``: parameters have shapes and no memory yet, for `checkpoint.build` to fill in."""

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

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def compile(self) -> None:
        """Has torch compile what works on each token by itself; the attention stays as it is."""
        for block in self.blocks:  # one code for all layers, since they differ in their weights alone
            block.enter, block.leave = (torch.compile(part, dynamic=False) for part in (block.enter, block.leave))

    def modulation(self, timestep: float) -> Modulation:
        """What a timestep does, the same for all tokens; in float32, from phases in float64."""
        half = self.config.time_width // 2
        phase = timestep * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        embedding = torch.cat([phase.cos(), phase.sin()]).float().to(self.device)
        embedding = self.time(embedding)
        rows = self.time_projection(F.silu(embedding)).view(6, -1)
        return Modulation(torch.stack([block.modulation.float() + rows for block in self.blocks]),
                          self.head_modulation.float() + embedding)

    def prompt(self, text: Tensor) -> Prompt:
        """A text (n, text_width), n at most ``config.text_tokens``, for all layers, once a prompt.

        The published networks pad it with zeros and attend to them: as the rows of the padding are all alike, they are one
        row here that counts for all.
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
        return Prompt(torch.stack(keys), torch.stack(values), bias.to(self.device))

    def camera_control(self, rays: Tensor) -> CameraControl:
        """Scales and shifts of each layer for a chunk's rays (N, camera_width), as `camera.ray_tokens` gives them; nothing in
        them depends on the timestep."""
        if self.camera is None:
            raise ValueError('this network has no camera control')
        embedded = self.camera['rays'](rays.to(self.device, self.blocks[0].dtype))
        embedded = embedded + self.camera['second'](F.silu(self.camera['first'](embedded)))
        return [block.control(embedded) for block in self.blocks]

    def forward(self, latents: Tensor, modulation: Modulation, prompt: Prompt, camera: CameraControl | None,
                attention: SelfAttention) -> Tensor:
        """Velocity (noise minus clean), float32 (out_channels, F, h, w), of latents (in_channels, F, h, w)."""
        channels, frames, height, width = latents.shape
        if channels != self.config.in_channels or height % PATCH or width % PATCH:
            raise ValueError(f'latents {tuple(latents.shape)} must be ({self.config.in_channels}, frames, even, even)')
        x = self.patch(patchify(latents.to(self.device, torch.float32)))
        for layer, block in enumerate(self.blocks):
            rows = modulation.blocks[layer]
            attended = attention.attend(layer, block.enter(x, rows), block.q_norm, block.k_norm)
            x = block.leave(x, attended, rows, None if camera is None else camera[layer], prompt.keys[layer],
                            prompt.values[layer], prompt.bias)
        shift, scale = modulation.head
        x = F.layer_norm(x, x.shape[-1:], eps=self.config.eps) * (1.0 + scale) + shift
        return unpatchify(self.head(x), frames, height // PATCH, width // PATCH)


def patchify(latents: Tensor) -> Tensor:
    """(C, F, h, w) to tokens (F * h * w / 4, C * 4), row by row."""
    c, f, h, w = latents.shape
    x = latents.reshape(c, f, h // PATCH, PATCH, w // PATCH, PATCH).permute(1, 2, 4, 0, 3, 5)
    return x.reshape(f * h * w // PATCH ** 2, -1)


def unpatchify(tokens: Tensor, frames: int, rows: int, columns: int) -> Tensor:
    """Tokens (F * rows * columns, 4 * C) to (C, F, 2 * rows, 2 * columns); the channel is the last of a token's numbers."""
    x = tokens.view(frames, rows, columns, PATCH, PATCH, -1).permute(5, 0, 1, 3, 2, 4)
    return x.reshape(x.shape[0], frames, rows * PATCH, columns * PATCH)

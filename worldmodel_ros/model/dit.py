"""Causal video DiT: predicts clean latents of a block of frames from noisy ones, the window and the actions.

One forward serves every use: committing an observed frame (clean, one frame), denoising a chunk (noisy, bidirectional among its
frames) and training (clean and noisy frames side by side under one mask between frames). A session's window is read from pages.
The layers follow DiT (Peebles and Xie 2023) with adaLN-Zero per frame and QK-norm.

Layers are of two kinds: cache layers attend to window and block; the others attend within each frame, with frames as a batch.
Presets with tiles order the tokens of a frame tile by tile, so that a page's share of a frame is contiguous, and so is the
frame, within which most layers attend.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.attention import rotate_qk
from ..kernels.linear import linear_gelu
from .presets import Preset
from .rotary import token_order
from .tile_attention import TileAttention
from .tile_mask import TileMask

State = tuple[Tensor, ...]  # passed from ``Block.enter`` to ``Block.leave``


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate x (B, H, N, head_dim) by rotary (2, N, head_dim / 2); pairs are formed by halves, not by neighbours."""
    a, b = x.chunk(2, -1)
    cos, sin = rotary[0], rotary[1]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def frame_bias_to_tokens(bias: Tensor, tokens: int) -> Tensor:
    """Expand an additive mask between frames (T, S) to one between their tokens (T * P, S * P)."""
    t, s = bias.shape
    return bias[:, None, :, None].expand(t, tokens, s, tokens).reshape(t * tokens, s * tokens)


def gather_pages(rows: Tensor, index: Tensor) -> Tensor:
    """Gather a layer's keys or values (B, H, n * page_tokens, d) from rows (R, page_tokens, d) of a pool at index (B, H, n)."""
    return rows.index_select(0, index.flatten()).reshape(*index.shape[:2], -1, rows.shape[-1])


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | TileMask | None) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v for q (B, H, N, d), k and v (B, H, S, d), bias (N, S) or (B, 1, N, S).

    Faster without a bias; a ``TileMask`` in its place computes the same in its own way.
    """
    if isinstance(bias, TileMask):
        return bias.attend(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))


class Conditioning(nn.Module):
    """Embeds what a frame is conditioned on: noise level, step length and the action that leads to it.

    Maps (B, T) noise levels in [0, 1] (1 is clean), (B, T) step rows and (B, T, A) actions to (B, T, D).
    """

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        half = 64
        self.register_buffer('frequency', torch.exp(torch.linspace(0.0, math.log(1000.0), half)), persistent=False)
        self.level = nn.Sequential(nn.Linear(2 * half, d), nn.SiLU(), nn.Linear(d, d))
        self.step = nn.Embedding(3, d)
        self.action = nn.Sequential(nn.Linear(preset.actions, d), nn.SiLU(), nn.Linear(d, d))
        low, high = torch.tensor(preset.action_low), torch.tensor(preset.action_high)
        self.register_buffer('action_scale', 1.0 / torch.maximum(low.abs(), high.abs()), persistent=False)

    def forward(self, tau: Tensor, step: Tensor, action: Tensor) -> Tensor:
        if tau.is_cuda and tau.stride(-1) == 0 and step.stride(-1) == 0:  # the same for all frames: one row's product
            tau, step = tau[..., :1], step[..., :1]
        phase = tau[..., None] * self.frequency
        level = _few_rows(self.level, torch.cat([phase.cos(), phase.sin()], -1))
        return F.silu(level + self.step(step) + _few_rows(self.action, action * self.action_scale))


def _few_rows(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Return ``layers`` of few rows x (..., K). On a GPU, products are bound by reading weights in float32, which cuBLAS does
    twice as fast if they are the first operand."""
    if not x.is_cuda:
        return layers(x)
    first, activation, second = layers
    hidden = activation(first(x))
    return (second.weight @ hidden.flatten(0, -2).t()).t().unflatten(0, x.shape[:-1]) + second.bias


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1.0 + scale) + shift


class FinalNorm(nn.LayerNorm):
    """Normalises and modulates the last layer's output: x (B, T, P, D), shift and scale (B, T, D)."""

    def __init__(self, width: int):
        super().__init__(width, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return modulate(super().forward(x), shift[:, :, None], scale[:, :, None])


class Block(nn.Module):
    """One layer: attention, then an MLP, each under adaLN-Zero.

    ``enter`` and ``leave`` are the per-token parts before and after the attention. Faster variants of a layer
    (FP8, a part of the weights) replace these; ``forward`` stays the definition.
    """

    gelu_in_product = False  # whether the product computes GELU as well, which has no gradient

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        self.heads, self.head_dim = preset.heads, preset.head_dim
        self.norm1 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(d, 3 * d)
        self.q_norm = nn.RMSNorm(preset.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(preset.head_dim, eps=1e-6)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate='tanh'), nn.Linear(4 * d, d))
        self.modulation = nn.Linear(d, 6 * d)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def enter(self, x: Tensor, cond: Tensor, rotary: Tensor | None = None, modulation: Tensor | None = None
              ) -> tuple[Tensor, State]:
        """Return queries, keys and values (B, T, P, 3, H, d) of x (B, T, P, D) and cond (B, T, D), and the state for ``leave``.

        They are normalised and rotated if rotary (2, B * T * P, d / 2) is given. With ``SentProducts`` they are
        ``ArrivingProducts``, of own heads. ``modulation``: this layer's of cond, if already computed.
        """
        modulation = self.modulation(cond) if modulation is None else modulation
        shift1, scale1, *state = modulation[:, :, None].chunk(6, -1)
        qkv = self.qkv(modulate(self.norm1(x), shift1, scale1))
        if isinstance(qkv, Tensor):
            qkv = qkv.unflatten(-1, (3, -1, self.head_dim))
        if rotary is not None:
            rotate_qk(qkv.view(-1, *qkv.shape[3:]), rotary, self.q_norm.weight, self.k_norm.weight)
        return qkv, tuple(state)

    def leave(self, x: Tensor, attended: Tensor, state: State) -> Tensor:
        """Return x after the layer; attended (B, T, P, H * d)."""
        gate1, shift2, scale2, gate2 = state
        x = x + gate1 * self.proj(attended)
        return x + gate2 * self._mlp(modulate(self.norm2(x), shift2, scale2))

    def leave_and_enter(self, x: Tensor, attended: Tensor, state: State, following: Block, cond: Tensor,
                        rotary: Tensor | None = None, modulation: Tensor | None = None) -> tuple[Tensor, Tensor, State]:
        """``leave``, then ``enter`` the ``following`` layer; return x, queries, keys and values, and the state. Compiled
        together, the last addition of the one and the norm of the other are fused."""
        x = self.leave(x, attended, state)
        return x, *following.enter(x, cond, rotary, modulation)

    def _mlp(self, x: Tensor) -> Tensor:
        first, second = self.mlp[0], self.mlp[2]
        # Under autocast x is in float32, which this product, unlike others, would not convert.
        if not self.gelu_in_product or x.dtype is not first.weight.dtype:
            return self.mlp(x)
        hidden = linear_gelu(x.flatten(0, -2), first.weight, first.bias, in_product=True)
        return second(hidden.unflatten(0, x.shape[:-1]))

    def forward(self, x: Tensor, cond: Tensor, rotary: Tensor, bias: Tensor | TileMask | None,
                window: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer on x (B, T, P, D) with cond (B, T, D), rotary (2, T * P, d / 2), bias (T * P, S + T * P) or a mask
        of as many frames, window k and v (B, H, S, d) each. Return x and the block's own keys (rotated) and values,
        (B, H, T * P, d)."""
        qkv, state = self.enter(x, cond)
        q, k, v = qkv.flatten(1, 2).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (rotate(part, rotary).to(v.dtype) for part in (self.q_norm(q), self.k_norm(k)))
        keys, values = (k, v) if window is None else (torch.cat([window[0], k], 2), torch.cat([window[1], v], 2))
        out = attend(q, keys, values, bias).transpose(1, 2).reshape(x.shape[:3] + (-1,))
        return self.leave(x, out, state), k, v


@dataclass(frozen=True)
class Modulated:
    """The condition of a pass's frames (1, T, D), and each layer's modulation (1, T, 6 * D), which follow from noise level,
    step and actions alone; of own frames, if processes share a pass."""

    cond: Tensor
    layers: Sequence[Tensor]


class DiT(nn.Module):
    """The network. ``empty_layers``: the layers' parameters have shapes and no memory yet."""

    def __init__(self, preset: Preset, empty_layers: bool = False):
        super().__init__()
        self.preset = preset
        d = preset.width
        self.conditioning = Conditioning(preset)
        self.kinds = tuple(layer in preset.cache_layers for layer in range(preset.depth))
        order = token_order(preset)
        self.register_buffer('order', None if order is None else torch.from_numpy(order), persistent=False)
        self.register_buffer('places', None if order is None else torch.from_numpy(np.argsort(order)), persistent=False)
        self.embed = nn.Linear(preset.token_dim, d)
        with torch.device('meta') if empty_layers else nullcontext():
            self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.depth))
        self.norm = FinalNorm(d)
        self.modulation = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, preset.token_dim)
        for layer in (self.modulation, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def patchify(self, latents: Tensor) -> Tensor:
        """Split latents (B, T, h, w, Z) into tokens (B, T, P, Z * patch^2), in the order of ``token_order``."""
        b, t, h, w, z = latents.shape
        p = self.preset.patch
        x = latents.reshape(b, t, h // p, p, w // p, p, z).permute(0, 1, 2, 4, 3, 5, 6)
        x = x.reshape(b, t, (h // p) * (w // p), p * p * z)
        return x if self.order is None else x.index_select(2, self.order)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Assemble tokens (B, T, P, Z * patch^2) to latents (B, T, h, w, Z)."""
        b, t = tokens.shape[:2]
        p, z, (rows, columns) = self.preset.patch, self.preset.latent_channels, self.preset.grid
        tokens = tokens if self.places is None else tokens.index_select(2, self.places)
        x = tokens.reshape(b, t, rows, columns, p, p, z).permute(0, 1, 2, 4, 3, 5, 6)
        return x.reshape(b, t, rows * p, columns * p, z)

    def forward(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor,
                mask: Tensor | Sequence[TileMask], window_k: Tensor | None = None, window_v: Tensor | None = None
                ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run one pass over a block of T frames.

        latents (B, T, h, w, Z); tau (B, T), 0 is noise and 1 is clean; step (B, T) rows of the step embedding; action (B, T, A)
        in SI units, the one executed over the period before each frame; rotary (2, T, P, d / 2), or (2, B, T, P, d / 2); mask
        (T, W + T), additive, between frames, or for a preset with tiles the mask of each cache layer's pattern; window_k and
        window_v (L, B, H, W * P, d) or None.

        Returns the predicted clean latents (B, T, h, w, Z), the features that the heads read (B, T, P, D), and the block's keys
        and values in the cache layers (L, B, H, T * P, d), keys rotated to their absolute time.
        """
        windows = [None] * len(self.preset.cache_layers) if window_k is None else zip(window_k, window_v)
        rotary = rotary[:, None] if rotary.ndim == 4 else rotary
        if self.preset.tile is None:
            return self._layers(latents, tau, step, action, rotary,
                                repeat(frame_bias_to_tokens(mask, self.preset.tokens)), windows)
        if isinstance(mask, Tensor):
            raise ValueError(f'preset {self.preset.name!r} attends to tiles, which a mask between frames does not '
                             f'describe: give masks of tiles, or use over_tiles')
        return self._layers(latents, tau, step, action, rotary, mask, windows)

    def over_pages(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor,
                   key_bias: Tensor | None, rows_k: Tensor, rows_v: Tensor, index: Tensor
                   ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the pass of ``forward`` for B sessions, each with its own frames and steps, whose windows are in pages of one
        pool.

        rotary (2, B, T, P, d / 2); key_bias (B, T, n * page_tokens + T * P), additive, from a frame to each token of the n
        pages, then of the block, (B, 1, ...) if it is the same for all frames, or None if everything is visible; rows_k and
        rows_v (R, page_tokens, d), the pool; index (L, B, H, n), the pool rows of each window.
        """
        bias = None
        if key_bias is not None:
            b, rows, keys = key_bias.shape
            queries = latents.shape[1] * self.preset.tokens
            bias = key_bias[:, None, :, None].expand(-1, -1, -1, queries // rows, -1).reshape(b, 1, queries, keys)
        windows = ((gather_pages(rows_k, layer), gather_pages(rows_v, layer))
                   for layer in index.unbind())
        return self._layers(latents, tau, step, action, rotary, repeat(bias), windows)

    def modulated(self, conditions: Sequence[Tensor]) -> list[Modulated]:
        """Return each layer's modulation for the conditions (1, T, D) of several passes; weights are read once for all."""
        together = torch.cat(list(conditions), 1)
        layers = zip(*(block.modulation(together).chunk(len(conditions), 1) for block in self.blocks))
        return [Modulated(cond, each) for cond, each in zip(conditions, layers)]

    def over_modulated_tiles(self, latents: Tensor, modulated: Modulated, attention: TileAttention) -> tuple[Tensor, Tensor]:
        """Run the pass of ``over_tiles`` whose condition and modulations are known."""
        x = self.layers_over_tiles(self.tokens(latents), modulated.cond, attention, modulated.layers)
        return self.finish(x, modulated.cond)

    def over_tiles(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, attention: TileAttention,
                   stream: Any = None) -> tuple[Tensor, Tensor]:
        """Run the pass of a preset with tiles: arguments as in ``forward``, with times, window and pages in ``attention``.
        Return predicted clean latents and features, the latter in the layers' type. ``stream``: CUDA stream for condition
        and modulations."""
        if stream:
            cond, modulations = self._next_to_layers(stream, tau, step, action)
            x = self.tokens(latents)
        else:
            (cond, x), modulations = self.enter(latents, tau, step, action), None
        return self.finish(self.layers_over_tiles(x, cond, attention, modulations), cond)

    def layers_over_tiles(self, x: Tensor, cond: Tensor | Sequence[Tensor], attention: TileAttention,
                          modulations: Iterable[Tensor] | None = None) -> Tensor:
        """Return x (B, T, P, D) after all layers; cond (B, T, D) for all of them, or one per layer."""
        cache_layers = iter(range(len(self.blocks)))
        conditions = repeat(cond) if isinstance(cond, Tensor) else cond
        left, qkv, state, attended = None, None, (), None
        for block, is_cache, told, modulation in zip(self.blocks, self.kinds, conditions, modulations or repeat(None)):
            told = told, None if is_cache else attention.rotary, modulation
            if left is None:
                qkv, state = block.enter(x, *told)
            else:
                x, qkv, state = left.leave_and_enter(x, attended, state, block, *told)
            attended = attention.over_tiles(next(cache_layers), block, qkv) if is_cache else attention.within_frames(qkv)
            left = block
        return left.leave(x, attended, state)

    def _next_to_layers(self, stream: Any, tau: Tensor, step: Tensor, action: Tensor) -> tuple[Tensor, Iterator[Tensor]]:
        """Compute the condition and each layer's modulation on ``stream``, ahead of their use: these products of few rows,
        bound by reading their weights, would hold up tokens and layers. The condition may be read once a layer has its
        modulation."""
        layers = torch.cuda.current_stream(tau.device)
        stream.wait_stream(layers)
        with torch.cuda.stream(stream):
            cond = self.condition(tau, step, action)
            queued = [(block.modulation(cond), stream.record_event()) for block in self.blocks]

        def waited_for() -> Iterator[Tensor]:
            for modulation, done in queued:
                layers.wait_event(done)
                yield modulation
        return cond, waited_for()

    def enter(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layers' inputs: condition (B, T, D) and tokens (B, T, P, D)."""
        return self.condition(tau, step, action), self.tokens(latents)

    def condition(self, tau: Tensor, step: Tensor, action: Tensor) -> Tensor:
        # The layers may be in bfloat16; noise levels need more precision.
        return self.conditioning(tau, step, action).to(self.embed.weight.dtype)

    def tokens(self, latents: Tensor) -> Tensor:
        return self.embed(self.patchify(latents).to(self.embed.weight.dtype))

    def finish(self, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted clean latents (B, T, h, w, Z) and features (B, T, P, D) from the last layer's output."""
        features = self.features(x, cond)
        return self.clean(features), features

    def features(self, x: Tensor, cond: Tensor) -> Tensor:
        return self.norm(x, *self.modulation(cond).chunk(2, -1))

    def clean(self, features: Tensor) -> Tensor:
        return self.unpatchify(self.out(features))

    def _layers(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor,
                biases: Iterable[Tensor | TileMask | None], windows: Iterable[tuple[Tensor, Tensor] | None]
                ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the pass: rotary (2, B or 1, T, P, d / 2); for each cache layer its bias (..., T * P, S + T * P) between
        tokens, or mask, and its window."""
        cond, x = self.enter(latents, tau, step, action)
        biases, windows, keys, values = iter(biases), iter(windows), [], []
        of_tokens = rotary.flatten(2, 3)[:, :, None]
        of_frame = rotary[:, :1, None, 0]  # time is constant within a frame, so any will do
        for block, is_cache in zip(self.blocks, self.kinds):
            if is_cache:
                x, k, v = block(x, cond, of_tokens, next(biases), next(windows))
                keys.append(k)
                values.append(v)
            else:  # frames as a batch
                x = block(x.flatten(0, 1)[:, None], cond.flatten(0, 1)[:, None], of_frame, None, None)[0].view_as(x)
        return *self.finish(x, cond), torch.stack(keys), torch.stack(values)

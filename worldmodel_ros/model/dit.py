"""Causal video DiT: predicts clean latents of a block of frames from noisy ones, its window and the actions.

One forward serves every use: committing an observed frame (clean, one frame), denoising a chunk (noisy, bidirectional
among its frames) and training (clean and noisy frames side by side under one mask between frames). A session's window
is read from pages. The layers follow DiT (Peebles and Xie 2023) with adaLN-Zero per frame and QK-norm.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .attention import attend, frame_bias_to_tokens, gather_pages, rotate
from .conditioning import Conditioning
from .presets import Preset


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1.0 + scale) + shift


class Block(nn.Module):
    """One layer: attention to the window and the block itself, then an MLP, each under adaLN-Zero."""

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

    def forward(self, x: Tensor, cond: Tensor, rotary: Tensor, bias: Tensor | None,
                window: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, P, D), cond (B, T, D), rotary (2, T * P, d / 2), bias (T * P, S + T * P), window k and v
        (B, H, S, d) each. Returns x and the block's own keys (rotated) and values, (B, H, T * P, d)."""
        b, t, p, d = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(cond)[:, :, None].chunk(6, -1)
        qkv = self.qkv(modulate(self.norm1(x), shift1, scale1))
        q, k, v = qkv.reshape(b, t * p, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (rotate(part, rotary).to(v.dtype) for part in (self.q_norm(q), self.k_norm(k)))
        keys, values = (k, v) if window is None else (torch.cat([window[0], k], 2), torch.cat([window[1], v], 2))
        out = attend(q, keys, values, bias).transpose(1, 2).reshape(b, t, p, d)
        x = x + gate1 * self.proj(out)
        x = x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x, k, v


class DiT(nn.Module):
    def __init__(self, preset: Preset):
        super().__init__()
        self.preset = preset
        d = preset.width
        self.conditioning = Conditioning(preset)
        self.embed = nn.Linear(preset.token_dim, d)
        self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.depth))
        self.norm = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, preset.token_dim)
        for layer in (self.modulation, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def patchify(self, latents: Tensor) -> Tensor:
        """(B, T, h, w, Z) to tokens (B, T, P, Z * patch^2)."""
        b, t, h, w, z = latents.shape
        p = self.preset.patch
        x = latents.reshape(b, t, h // p, p, w // p, p, z).permute(0, 1, 2, 4, 3, 5, 6)
        return x.reshape(b, t, (h // p) * (w // p), p * p * z)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, P, Z * patch^2) to (B, T, h, w, Z)."""
        b, t = tokens.shape[:2]
        p, z, (rows, columns) = self.preset.patch, self.preset.latent_channels, self.preset.grid
        x = tokens.reshape(b, t, rows, columns, p, p, z).permute(0, 1, 2, 4, 3, 5, 6)
        return x.reshape(b, t, rows * p, columns * p, z)

    def forward(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor, frame_bias: Tensor,
                window_k: Tensor | None = None, window_v: Tensor | None = None
                ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One pass over a block of T frames.

        latents (B, T, h, w, Z); tau (B, T), 0 is noise and 1 is clean; step (B, T) rows of the step embedding;
        action (B, T, A) in SI units, the one executed over the period before each frame; rotary (2, T, P, d / 2);
        frame_bias (T, W + T), additive, between frames; window_k and window_v (L, B, H, W * P, d) or None.

        Returns the predicted clean latents (B, T, h, w, Z), the features that the heads read (B, T, P, D), and the
        block's keys and values (L, B, H, T * P, d), keys rotated to their absolute time.
        """
        windows = [None] * len(self.blocks) if window_k is None else zip(window_k, window_v)
        bias = frame_bias_to_tokens(frame_bias, self.preset.tokens)
        return self._layers(latents, tau, step, action, rotary.flatten(1, 2), bias, windows)

    def over_pages(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor,
                   key_bias: Tensor | None, rows_k: Tensor, rows_v: Tensor, index: Tensor
                   ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pass of `forward` for B sessions, each with frames and steps of its own, whose windows lie in the pages
        of one pool.

        rotary (2, B, T, P, d / 2); key_bias (B, T, n * page_tokens + T * P), additive, from a frame to each token of
        the n pages, then of the block, (B, 1, ...) where it is the same for all frames, or None where all is seen;
        rows_k and rows_v (R, page_tokens, d), the pool; index (L, B, H, n), which of its rows are each window's.
        """
        bias = None
        if key_bias is not None:
            b, rows, keys = key_bias.shape
            queries = latents.shape[1] * self.preset.tokens
            bias = key_bias[:, None, :, None].expand(-1, -1, -1, queries // rows, -1).reshape(b, 1, queries, keys)
        windows = ((gather_pages(rows_k, index[layer]), gather_pages(rows_v, index[layer]))
                   for layer in range(len(self.blocks)))
        return self._layers(latents, tau, step, action, rotary.flatten(2, 3)[:, :, None], bias, windows)

    def _layers(self, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor, rotary: Tensor, bias: Tensor | None,
                windows: Iterable[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pass itself; rotary (2, ..., T * P, d / 2), bias (..., T * P, S + T * P) between tokens, and each layer's
        window."""
        # The layers may be in bfloat16; noise levels need more.
        dtype = self.embed.weight.dtype
        cond = self.conditioning(tau, step, action).to(dtype)
        x = self.embed(self.patchify(latents).to(dtype))
        keys, values = [], []
        for block, window in zip(self.blocks, windows):
            x, k, v = block(x, cond, rotary, bias, window)
            keys.append(k)
            values.append(v)
        shift, scale = self.modulation(cond)[:, :, None].chunk(2, -1)
        features = modulate(self.norm(x), shift, scale)
        return self.unpatchify(self.out(features)), features, torch.stack(keys), torch.stack(values)

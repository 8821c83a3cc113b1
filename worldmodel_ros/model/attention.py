"""Attention of a block of frames to its window and itself, under a mask."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates x (B, H, N, head_dim) by rotary (2, N, head_dim / 2); halves, not neighbours, form the pairs."""
    a, b = x.chunk(2, -1)
    cos, sin = rotary[0], rotary[1]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def frame_bias_to_tokens(bias: Tensor, tokens: int) -> Tensor:
    """Additive mask between frames (T, S) to one between their tokens (T * P, S * P)."""
    t, s = bias.shape
    return bias[:, None, :, None].expand(t, tokens, s, tokens).reshape(t * tokens, s * tokens)


def gather_pages(rows: Tensor, index: Tensor) -> Tensor:
    """Keys or values (B, H, n * page_tokens, d) of a layer, from rows (R, page_tokens, d) of a pool at index
    (B, H, n)."""
    return rows.index_select(0, index.flatten()).reshape(*index.shape[:2], -1, rows.shape[-1])


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v for q (B, H, N, d), k and v (B, H, S, d), bias (N, S) or (B, 1, N, S);
    faster without one."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))

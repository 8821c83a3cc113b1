"""From a layer's qkv projection to rotated queries and written pages, for flat slabs: the definition, in plain PyTorch.

As ``page_write``, for networks that normalise queries and keys over all heads of a token: RMSNorm's factors are computed first
(``rows.inverse_rms``), and weights are a number for each channel of each head.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .pages import Pool
from .quantise import to_e4m3, write_pages

QUERY_BLOCK = 128  # the attention kernels take blocks of queries


def write_flat(pool: Pool, pages: Tensor, slabs: int, qkv: Tensor, rms: Tensor | Callable[[], Tensor], rotary: Tensor,
               q_weight: Tensor, k_weight: Tensor, quantise_q: bool = False) -> tuple[Tensor, Tensor | None]:
    """Normalise and rotate queries and keys, and fill ``pages`` (int32, slab after slab, none twice).

    qkv (N, 3, H, D), in ``slabs`` equal parts, each of which fills its pages from the first place on; the rest of its last page
    becomes zero. rms (2, N) of queries and keys, or what returns it, and is called when values have been written, which need no
    norm; rotary (2, N, D / 2), both float32; q_weight and k_weight (H * D,).

    Returns queries (``padded`` rows, H, D), zero beyond N, in qkv's type and None; with ``quantise_q`` in e4m3, and their
    scales, float32 (rows, H). Raises ValueError for shapes that do not fit one another.
    """
    rms = rms() if callable(rms) else rms
    check(pool, pages, slabs, qkv, rms, rotary)
    heads, dim, tokens = pool.heads, pool.head_dim, pool.page_tokens
    cos, sin = rotary[:, :, None]
    q, k, v = qkv.float().unbind(1)
    turned = []
    for x, scale, weight in ((q, rms[0], q_weight), (k, rms[1], k_weight)):
        a, b = (x * (scale[:, None, None] * weight.float().view(heads, dim))).chunk(2, -1)
        turned.append(torch.cat([a * cos - b * sin, a * sin + b * cos], -1))
    q, k = turned

    def in_pages(x: Tensor) -> Tensor:
        x = x.unflatten(0, (slabs, -1))
        x = F.pad(x, (0, 0, 0, 0, 0, len(pages) // slabs * tokens - x.shape[1]))
        return x.reshape(len(pages), tokens, heads, dim).transpose(1, 2)
    write_pages(pool, pages.long(), in_pages(k), in_pages(v))
    q = F.pad(q, (0, 0, 0, 0, 0, padded(len(q)) - len(q)))
    if not quantise_q:
        return q.to(qkv.dtype), None
    q8, scale = to_e4m3(q[:, :, None])
    return q8[:, :, 0], scale


def padded(tokens: int) -> int:
    """Return the number of query rows in whole blocks."""
    return -(-tokens // QUERY_BLOCK) * QUERY_BLOCK


def check(pool: Pool, pages: Tensor, slabs: int, qkv: Tensor, rms: Tensor | None, rotary: Tensor) -> None:
    """Raise ValueError for shapes that do not fit one another; ``rms`` None: not known yet."""
    if qkv.shape[1:] != (3, pool.heads, pool.head_dim) or (rms is not None and rms.shape != (2, len(qkv))) \
            or rotary.shape != (2, len(qkv), pool.head_dim // 2):
        given = None if rms is None else tuple(rms.shape)
        raise ValueError(f'qkv {tuple(qkv.shape)}, rms {given} and rotary {tuple(rotary.shape)} must be '
                         f'(N, 3, {pool.heads}, {pool.head_dim}), (2, N) and (2, N, {pool.head_dim // 2})')
    if slabs < 1 or len(qkv) % slabs or len(pages) != slabs * -(-len(qkv) // slabs // pool.page_tokens):
        raise ValueError(f'{len(qkv)} tokens in {slabs} slabs do not fill {len(pages)} pages of {pool.page_tokens}')

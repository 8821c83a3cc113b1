"""From a layer's qkv projection to rotated queries and written pages: the definition, in plain PyTorch."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .pages import Pool
from .quantise import read_pages, to_e4m3, write_pages


def write_qkv(pool: Pool, pages: Tensor, counts: Tensor, qkv: Tensor, rotary: Tensor, q_weight: Tensor,
              k_weight: Tensor, offsets: Tensor | None = None, quantise_q: bool = False, eps: float = 1e-6,
              by_frame: tuple[int, int] | None = None, scale: Tensor | None = None, dtype: torch.dtype | None = None
              ) -> tuple[Tensor, Tensor | None]:
    """Apply QK-norm and rotary embedding, and write the new keys and values of one layer to pages.

    qkv (tiles * N, 3, H, D), tile after tile, D contiguous, N of at most T tokens each; or, with ``by_frame``
    (frames, tiles of a frame), frame after frame: a frame has its part of each of its tiles, one after the other, and after
    ``frames`` of them come those of the next tiles. rotary has qkv's order. Of tile i, the first counts[i] tokens are valid
    (int32, 0 to N); they go to page pages[i] (int32, no page twice), from place offsets[i] on (int32, offset and count together
    at most T; 0 if not given, and always for FP8 and FP4, whose scale spans a page). Places before the offset keep what they
    have, those after the new tokens become zero. Queries and keys are normalised (RMSNorm over D with q_weight and k_weight
    (D,)) and rotated as ``model.dit.rotate`` does, by rotary (2, tiles * N, D / 2) float32, all in float32. qkv in e4m3 comes
    with its ``scale``, float32 (tiles * N, 3, H), and with the queries' ``dtype``.

    Returns the queries (tiles * N, H, D), zero for invalid tokens, in ``dtype`` or qkv's type, and None; with ``quantise_q`` in
    e4m3, and their scales, float32 (tiles * N, H): the largest magnitude of each token and head is 448.
    """
    check(pool, pages, qkv, rotary, offsets, by_frame, scale, dtype)
    dtype = dtype or qkv.dtype
    if scale is not None:
        qkv = qkv.float() * scale[..., None]
    tiles, tokens = len(pages), len(qkv) // len(pages)
    if by_frame is not None:
        frames, of_frame = by_frame
        groups = tiles // of_frame
        qkv = qkv.unflatten(0, (groups, frames, of_frame, -1)).transpose(1, 2).flatten(0, 3)
        rotary = rotary.unflatten(1, (groups, frames, of_frame, -1)).transpose(2, 3).flatten(1, 4)
    there = torch.arange(tokens, device=qkv.device) < counts[:, None]
    q, k, v = torch.where(there.flatten()[:, None, None, None], qkv.float(), 0.0).unbind(1)
    q, k = (_rotated(F.rms_norm(x, x.shape[-1:], weight.float(), eps), rotary, there) for x, weight in
            ((q, q_weight), (k, k_weight)))
    place = torch.arange(pool.page_tokens, device=qkv.device) - (0 if offsets is None else offsets[:, None])
    place = place.expand(tiles, -1)[:, None, :, None]
    held = (None, None) if offsets is None else read_pages(pool, pages.long())

    def page(new: Tensor, old: Tensor | None) -> Tensor:
        new = new.unflatten(0, (tiles, tokens)).transpose(1, 2)
        new = new.gather(2, place.clamp(0, tokens - 1).expand(-1, new.shape[1], -1, new.shape[3]))
        new = torch.where(place < counts[:, None, None, None], new, 0.0)
        return new if old is None else torch.where(place < 0, old, new)
    write_pages(pool, pages.long(), page(k, held[0]), page(v, held[1]))
    if not quantise_q:
        return q.to(dtype), None
    q8, scale = to_e4m3(q[:, :, None])
    return q8[:, :, 0], scale


def _rotated(x: Tensor, rotary: Tensor, there: Tensor) -> Tensor:
    """Rotate x (tokens, H, D) by rotary (2, tokens, D / 2); zero for invalid tokens, whatever rotary has there."""
    cos, sin = rotary[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.where(there.flatten()[:, None, None], torch.cat([a * cos - b * sin, a * sin + b * cos], -1), 0.0)


def check(pool: Pool, pages: Tensor, qkv: Tensor, rotary: Tensor, offsets: Tensor | None,
          by_frame: tuple[int, int] | None = None, scale: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError for shapes that do not fit one another."""
    tokens = len(qkv) // max(1, len(pages))
    if by_frame is not None and (tokens % by_frame[0] or len(pages) % by_frame[1]):
        raise ValueError(f'{len(pages)} tiles of {tokens} tokens are no frames of {by_frame[1]} tiles, each of '
                         f'{by_frame[0]} parts')
    if qkv.shape != (len(pages) * tokens, 3, pool.heads, pool.head_dim) or not 0 < tokens <= pool.page_tokens:
        raise ValueError(f'qkv {tuple(qkv.shape)} must be (tiles * N, 3, {pool.heads}, {pool.head_dim}) for '
                         f'{len(pages)} tiles of N tokens, 1 to {pool.page_tokens}')
    if rotary.shape != (2, len(qkv), pool.head_dim // 2):
        raise ValueError(f'rotary {tuple(rotary.shape)} must be {(2, len(qkv), pool.head_dim // 2)}, as qkv has tokens')
    if (qkv.dtype is torch.float8_e4m3fn) != (scale is not None) or (scale is not None and (
            dtype is None or scale.dtype != torch.float32 or scale.shape != qkv.shape[:3])):
        given = 'no scale' if scale is None else f'a scale {scale.dtype} {tuple(scale.shape)}'
        raise ValueError(f'qkv {qkv.dtype} {tuple(qkv.shape)} with {given} and dtype {dtype}: e4m3, and nothing else, has a '
                         f'float32 scale {tuple(qkv.shape[:3])} and a dtype of the queries')
    if offsets is not None and pool.precision.quantised:
        raise ValueError(f'a page in {pool.precision.value} is written as a whole, since its scale spans it: leave out '
                         f'offsets')

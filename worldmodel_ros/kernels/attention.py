"""Paged attention, and the steps before it, by the fastest kernel that supports the inputs."""
from __future__ import annotations

import torch
from torch import Tensor

from . import page_write, qk_norm, reference, requantise as definitions
from .pages import Pool, TileLists
from .splits import merge


def paged_attention(q: Tensor, pools: list[Pool], lists: list[TileLists], scale: float | None = None,
                    by_frame: tuple[int, int] | None = None, out: Tensor | None = None) -> Tensor:
    """Attend from each query tile to the valid tokens of the pages that its row lists, of all pools under one softmax.

    q (query tiles * N, H, D), tile after tile; one pool of each precision at most, and a list for each. Returns q's shape and
    type, with ``by_frame`` (frames, tiles of a frame) in the order in which ``write_qkv`` takes qkv with it; zeros for a tile
    that lists nothing. ``scale`` multiplies the logits, 1 / sqrt(D) unless given. The result is written to ``out``, if given,
    whose rows (H, D) are contiguous. Raises ValueError if the shapes do not match.
    """
    _check(q, pools, lists, out)
    if q.is_cuda:  # not every machine without a GPU has Triton
        from .attention_hopper import paged_attention_hopper, supports
        if supports(q, pools, lists[0].query_tiles, by_frame):
            return paged_attention_hopper(q, pools, lists, scale, out, by_frame=by_frame)
        from .attention_triton import paged_attention_triton as attention
    else:
        attention = reference.paged_attention
    found = attention(q, pools, lists, scale)
    if by_frame is not None:
        frames, tiles = by_frame
        run = len(q) // lists[0].query_tiles // frames
        found = found.unflatten(0, (-1, tiles, frames, run)).transpose(1, 2).reshape(q.shape)
    return found if out is None else out.copy_(found)


def split_attention(q: Tensor, pool: Pool, lists: TileLists, splits: int) -> Tensor:
    """``paged_attention`` to one pool, with the list of each query tile split into ``splits`` parts, whose results are merged:
    this keeps all processors busy with few queries.

    ``lists``: the first parts of all tiles, then all second ones, and so on. A part may be empty, but not all parts of a tile.
    """
    if lists.query_tiles % splits:
        raise ValueError(f'{lists.query_tiles} lists are no {splits} parts of as many tiles each')
    if splits == 1:
        return paged_attention(q, [pool], [lists])
    rows = splits * len(q)
    lse = torch.empty((pool.heads, rows), dtype=torch.float32, device=q.device)
    if not q.is_cuda:
        parts = reference.paged_attention(q.repeat(splits, 1, 1), [pool], [lists], lse=lse)
        return merge(parts, lse, splits, len(q)).view(q.shape)
    from .attention_hopper import paged_attention_hopper, supports
    from .splits_triton import merge_triton
    if supports(q, [pool], lists.query_tiles // splits):
        parts = paged_attention_hopper(q, [pool], [lists], repeats=splits, lse=lse)
    else:
        from .attention_triton import paged_attention_triton
        parts = paged_attention_triton(q.repeat(splits, 1, 1), [pool], [lists], lse=lse)
    return merge_triton(parts, lse, splits, len(q)).view(q.shape)


def write_qkv(pool: Pool, pages: Tensor, counts: Tensor, qkv: Tensor, rotary: Tensor, q_weight: Tensor,
              k_weight: Tensor, offsets: Tensor | None = None, by_frame: tuple[int, int] | None = None,
              scale: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``page_write.write_qkv``; returns the queries alone."""
    if qkv.is_cuda:
        from .page_write_triton import write_qkv_triton as write
    else:
        write = page_write.write_qkv
    return write(pool, pages, counts, qkv, rotary, q_weight, k_weight, offsets, by_frame=by_frame, scale=scale,
                 dtype=dtype)[0]


def rotate_qk(qkv: Tensor, rotary: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
    """``qk_norm.rotate_qk``."""
    if qkv.is_cuda:
        from .qk_norm_triton import rotate_qk_triton as rotate
    else:
        rotate = qk_norm.rotate_qk
    rotate(qkv, rotary, q_weight, k_weight)


def requantise(source: Pool, source_pages: Tensor, target: Pool, target_pages: Tensor) -> None:
    """``requantise.requantise``."""
    if source.k.is_cuda:
        from .requantise_triton import requantise_triton, supports
        if supports(source, target):
            requantise_triton(source, source_pages, target, target_pages)
            return
    definitions.requantise(source, source_pages, target, target_pages)


def _check(q: Tensor, pools: list[Pool], lists: list[TileLists], out: Tensor | None) -> None:
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride()[1:] != (q.shape[2], 1)):
        raise ValueError(f'the result {out.dtype} {tuple(out.shape)} with strides {out.stride()} must be {q.dtype} '
                         f'{tuple(q.shape)}, its rows contiguous')
    if not pools or len(pools) != len(lists):
        raise ValueError(f'{len(pools)} pools and {len(lists)} lists of pages: each pool needs its list')
    if len({pool.precision for pool in pools}) != len(pools):
        raise ValueError('there are two pools of one precision: put their pages into one')
    for pool, table in zip(pools, lists):
        name = f'the {pool.precision.value} pool'
        if q.shape[1:] != (pool.heads, pool.head_dim):
            raise ValueError(f'queries {tuple(q.shape)} (tokens, heads, head width) do not fit {name} of '
                             f'{pool.heads} heads of width {pool.head_dim}')
        if table.query_tiles != lists[0].query_tiles or len(q) % table.query_tiles:
            raise ValueError(f'{len(q)} queries are not {table.query_tiles} tiles, as the list of {name} has them')

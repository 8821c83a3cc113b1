"""Paged attention by the fastest kernel that takes what it is given."""
from __future__ import annotations

from torch import Tensor

from . import reference
from .pages import Pool, TileLists


def paged_attention(q: Tensor, pools: list[Pool], lists: list[TileLists], scale: float | None = None) -> Tensor:
    """Each query tile attends to the valid tokens of the pages that its row lists, of all pools under one softmax.

    q (query tiles * T, H, D), tile after tile, T the tokens of a page; one pool of each precision at most, and a list
    for each. Returns q's shape and type; zeros for a tile that lists nothing. ``scale`` multiplies the logits,
    1 / sqrt(D) unless given. Raises ValueError where the shapes do not belong together.
    """
    _check(q, pools, lists)
    if not q.is_cuda:
        return reference.paged_attention(q, pools, lists, scale)
    # Triton is not there on every machine without a GPU.
    from .attention_hopper import paged_attention_hopper, supports
    if supports(q, pools):
        return paged_attention_hopper(q, pools, lists, scale)
    from .attention_triton import paged_attention_triton
    return paged_attention_triton(q, pools, lists, scale)


def _check(q: Tensor, pools: list[Pool], lists: list[TileLists]) -> None:
    if not pools or len(pools) != len(lists):
        raise ValueError(f'{len(pools)} pools and {len(lists)} lists of pages: each pool needs its list')
    if len({pool.precision for pool in pools}) != len(pools):
        raise ValueError('there are two pools of one precision: put their pages into one')
    for pool, table in zip(pools, lists):
        name = f'the {pool.precision.value} pool'
        if q.shape[1:] != (pool.heads, pool.head_dim):
            raise ValueError(f'queries {tuple(q.shape)} (tokens, heads, head width) do not fit {name} of '
                             f'{pool.heads} heads of width {pool.head_dim}')
        if len(q) != table.query_tiles * pool.page_tokens:
            raise ValueError(f'{len(q)} queries are not {table.query_tiles} tiles of {pool.page_tokens} tokens, '
                             f'as the list of {name} has them')

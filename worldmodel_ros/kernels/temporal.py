"""Attention along time, exactly per position, in plain PyTorch: the definition."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from .pages import Pool, TileLists
from .quantise import read_pages


def temporal_attention(q: Tensor, pools: list[Pool], lists: list[TileLists], frames: int,
                       positions: Tensor | None = None, query_times: Tensor | None = None,
                       page_times: list[Tensor] | None = None, scale: float | None = None,
                       dtype: torch.dtype = torch.float32) -> Tensor:
    """Attend from each query token to the tokens at its own position in all frames that its column lists.

    q (slabs * columns * T, H, D), slab after slab and in it tile after tile, as pages hold them; the slabs' tiles at one place
    of the plane are a column, and row i of ``lists`` is what column i visits. A page holds ``frames`` frames, token f * P + p
    being position p of frame f; P is T / frames, or positions[i] (columns,), int32, where tiles at the border have fewer. The
    remaining places, beyond frames * P, are empty, and their result is zero.

    With ``query_times`` (slabs,) and ``page_times``, for each pool (listed pages,), all int32, the number of the first frame of
    each query slab and of each listed page, a query sees no frame later than its own. Returns q's shape and type; zeros for a
    query that sees nothing. ``scale`` as in ``reference.paged_attention``. Computed in ``dtype``.
    """
    check(q, pools, lists, frames, positions, query_times, page_times)
    columns, tokens = lists[0].query_tiles, pools[0].page_tokens
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device).unflatten(0, (-1, columns, tokens))
    queries, slabs = q.to(dtype).unflatten(0, (-1, columns, tokens)), len(q) // (columns * tokens)
    frame = torch.arange(frames, device=q.device)
    for column in range(columns):
        width = tokens // frames if positions is None else int(positions[column])
        keys, values, there, times = [], [], [], []
        for index, (pool, table) in enumerate(zip(pools, lists, strict=True)):
            row = slice(int(table.starts[column]), int(table.starts[column + 1]))
            # (pages, H, T, D) to (pages * frames, P, H, D)
            k, v = (x[:, :, :frames * width].unflatten(2, (frames, width)).permute(0, 2, 3, 1, 4).flatten(0, 1)
                    .to(dtype) for x in read_pages(pool, table.pages[row].long()))
            token = torch.arange(frames * width, device=q.device)
            keys.append(k)
            values.append(v)
            there.append((token < table.lengths[row, None]).unflatten(1, (frames, width)).flatten(0, 1))
            if page_times is not None:
                times.append((page_times[index][row, None] + frame).flatten())
        visible = torch.cat(there).T[:, None]  # (P, 1, pages * frames)
        if page_times is not None:
            visible = visible & (torch.cat(times) <= (query_times[:, None] + frame).flatten()[:, None])
        x = queries[:, column, :frames * width].unflatten(1, (frames, width)).flatten(0, 1)
        logits = torch.einsum('tphd,sphd->hpts', x, torch.cat(keys)) * scale
        weights = logits.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
        result = torch.einsum('hpts,sphd->tphd', weights, torch.cat(values))
        out[:, column, :frames * width] = result.unflatten(0, (slabs, frames)).flatten(1, 2)
    return out.flatten(0, 2).to(q.dtype)


def check(q: Tensor, pools: list[Pool], lists: list[TileLists], frames: int, positions: Tensor | None,
          query_times: Tensor | None, page_times: list[Tensor] | None) -> None:
    """Raise ValueError for shapes that do not fit one another."""
    columns, tokens = lists[0].query_tiles, pools[0].page_tokens
    if any(table.query_tiles != columns for table in lists) or len(q) % (columns * tokens):
        raise ValueError(f'{len(q)} queries are no slabs of {[table.query_tiles for table in lists]} columns, as the '
                         f'lists have them, of {tokens} tokens')
    for pool in pools:
        if (pool.heads, pool.page_tokens, pool.head_dim) != (q.shape[1], tokens, q.shape[2]):
            raise ValueError(f'q {tuple(q.shape)} does not fit {pool.precision.value} pages of (heads, tokens, width) '
                             f'{(pool.heads, pool.page_tokens, pool.head_dim)}')
    if tokens % frames if positions is None else len(positions) != columns:
        raise ValueError(f'{tokens} tokens a page are no {frames} frames: give positions, one for each of {columns} '
                         f'columns')
    if (query_times is None) != (page_times is None) or (query_times is not None and (
            len(query_times) * columns * tokens != len(q) or len(page_times) != len(lists))):
        raise ValueError(f'query_times is one number for each of {len(q) // (columns * tokens)} query slabs, and '
                         f'page_times one tensor for each of {len(lists)} lists; both or neither')

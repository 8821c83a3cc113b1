"""Paged attention in plain PyTorch: the definition, for any device and precision, and the CPU path."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from .pages import Pool, TileLists
from .quantise import read_pages


def paged_attention(q: Tensor, pools: list[Pool], lists: list[TileLists], scale: float | None = None,
                    dtype: torch.dtype = torch.float32, lse: Tensor | None = None) -> Tensor:
    """Attend from each query tile to the valid tokens of the pages that its row lists, of all pools under one softmax.

    q (query tiles * N, H, D), tile after tile. Returns the same shape and dtype; zeros for a tile that lists nothing. ``scale``
    multiplies the logits, 1 / sqrt(D) unless given. Computed in ``dtype``. ``lse`` (H, query tiles * N), if given, receives the
    base-2 logarithm of the sum of the exponentiated logits, -inf for a tile that lists nothing.
    """
    tokens, dim, queries = pools[0].page_tokens, q.shape[-1], len(q) // lists[0].query_tiles
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    if lse is not None:
        lse.fill_(-math.inf)
    for tile in range(lists[0].query_tiles):
        keys, values = [], []
        for pool, table in zip(pools, lists, strict=True):
            row = slice(int(table.starts[tile]), int(table.starts[tile + 1]))
            if row.start == row.stop:
                continue
            k, v = read_pages(pool, table.pages[row].long())
            valid = torch.arange(tokens, device=q.device) < table.lengths[row, None]
            keys.append(k.transpose(1, 2)[valid])     # (valid tokens, H, D)
            values.append(v.transpose(1, 2)[valid])
        if not keys:
            continue
        rows = slice(tile * queries, (tile + 1) * queries)
        logits = torch.einsum('nhd,mhd->hnm', q[rows].to(dtype), torch.cat(keys).to(dtype)) * scale
        if lse is not None:
            lse[:, rows] = logits.logsumexp(-1) * math.log2(math.e)
        out[rows] = torch.einsum('hnm,mhd->nhd', logits.softmax(-1), torch.cat(values).to(dtype))
    return out.to(q.dtype)

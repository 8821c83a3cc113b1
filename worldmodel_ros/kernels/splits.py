"""Attention whose keys were split: parts of one softmax, each with its log-sum-exp, are put together. The definition."""
from __future__ import annotations

import torch
from torch import Tensor


def merge(parts: Tensor, lse: Tensor, splits: int, tokens: int) -> Tensor:
    """parts (splits * R, H, D), results for the same R queries, and the base-2 logarithms of their sums, float32
    (H, splits * R), to (tokens, H * D) for the first ``tokens`` queries, in parts' type."""
    weights = torch.softmax(lse.unflatten(1, (splits, -1)) * 0.6931471805599453, 1)  # (H, splits, R)
    whole = (parts.float().unflatten(0, (splits, -1)) * weights.permute(1, 2, 0)[..., None]).sum(0)
    return whole[:tokens].flatten(1).to(parts.dtype)


def splits_for(items: int, processors: int, most: int = 4) -> int:
    """Into how many parts the keys of ``items`` equal pieces of work are split, so that processors, which take whole
    pieces, are done with as little idling as can be; a further part must gain a twentieth."""
    def rounds(parts: int) -> float:
        return -(-items * parts // processors) / parts
    best = 1
    for parts in range(2, most + 1):
        if rounds(parts) < 0.95 * rounds(best):
            best = parts
    return best

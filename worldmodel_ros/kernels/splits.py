"""Merges attention over split keys, parts of one softmax with a log-sum-exp each: the definition."""
from __future__ import annotations

import torch
from torch import Tensor

from .rows import Rounded, quantise_rows


def merge(parts: Tensor, lse: Tensor, splits: int, tokens: int, fp8: bool = False, first: int = 0, out: Tensor | None = None
          ) -> Tensor | Rounded:
    """Merge parts (splits * R, H, D), results for the same R queries, by the base-2 logarithms of their sums, float32
    (H, splits * R), to (tokens, H * D) for ``tokens`` queries from the ``first`` on, in parts' type; with ``fp8``,
    ``rows.quantise_rows`` of that, else written to ``out`` if given."""
    check(parts, lse, splits, tokens, fp8, first, out)
    weights = torch.softmax(lse.unflatten(1, (splits, -1)) * 0.6931471805599453, 1)  # (H, splits, R)
    whole = (parts.float().unflatten(0, (splits, -1)) * weights.permute(1, 2, 0)[..., None]).sum(0)
    whole = whole[first:first + tokens].flatten(1)
    if fp8:
        return quantise_rows(whole)
    return whole.to(parts.dtype) if out is None else out.copy_(whole)


def check(parts: Tensor, lse: Tensor, splits: int, tokens: int, fp8: bool, first: int, out: Tensor | None) -> None:
    """Raise ValueError for what ``merge`` does not take."""
    rows, heads, dim = parts.shape
    if lse.shape != (heads, rows) or rows % splits:
        raise ValueError(f'parts {tuple(parts.shape)} and lse {tuple(lse.shape)} must be of {splits} times as many rows')
    if not 0 <= first <= first + tokens <= rows // splits:
        raise ValueError(f'there are {rows // splits} queries, not {tokens} from {first} on')
    if out is not None and (fp8 or out.shape != (tokens, heads * dim) or out.dtype != parts.dtype):
        raise ValueError(f'out {out.dtype} {tuple(out.shape)} must be {parts.dtype} {(tokens, heads * dim)}, and not for '
                         f'rounded rows')


def splits_for(items: int, processors: int, most: int = 4) -> int:
    """Return how many parts to split the keys of ``items`` equal pieces of work into, so that processors, which take whole
    pieces, idle as little as possible.

    Any gain is worth a split, as merging costs little. With the 1,480 pieces of LingBot-World-Fast's chunk, an H200
    (132 processors) needs 4.93, 4.43, 4.43 and 3.98 ms in bf16 and 3.70, 3.66, 3.56 and 3.38 ms in FP8 for 1 to 4 parts, and
    with the 444 of its small successor 1.33, 1.20, 1.25, 1.23 ms and 1.26, 1.12, 1.16, 1.07 ms
    (``benchmarks/results/wan_h200.json``).
    """
    def rounds(parts: int) -> float:
        return -(-items * parts // processors) / parts
    return min(range(1, most + 1), key=rounds)  # the smallest of equals

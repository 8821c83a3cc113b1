"""All-to-all attention of a chunk's tokens to flat pages: one list of pages for all queries.

On Hopper, where programs take whole blocks of queries, the list is split into parts whose results are merged: otherwise most
processors would wait for the few that have a block more.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cross_attention as cross, flat_write, reference
from .flat_write import QUERY_BLOCK, padded
from .pages import Pool, Precision, TileLists
from .rows import Rounded
from .splits import splits_for


@dataclass(frozen=True)
class FlatPlan:
    """How a device attends: by the kernel for Hopper or another one, in how many parts, to queries in FP8 or not."""

    hopper: bool
    splits: int
    quantise_q: bool

    @classmethod
    def of(cls, pool: Pool, tokens: int) -> FlatPlan:
        """Return the plan for ``tokens`` queries."""
        device = pool.k.device
        if device.type != 'cuda' or torch.cuda.get_device_capability(device) != (9, 0) or pool.head_dim != 128 \
                or pool.precision not in (Precision.BF16, Precision.FP8) or pool.page_tokens % QUERY_BLOCK:
            return cls(False, 1, False)
        items = padded(tokens) // QUERY_BLOCK * pool.heads
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(True, splits_for(items, processors), pool.precision is Precision.FP8)

    def lists(self, entries: list[tuple[int, int]], page_tokens: int, device: torch.device) -> TileLists:
        """Return the lists for (page, valid tokens) pairs."""
        parts = TileLists.from_rows([entries[at::self.splits] for at in range(self.splits)], page_tokens)
        return TileLists(*(to_device(x, device) for x in (parts.starts, parts.pages, parts.lengths, parts.full)))


def write_flat(pool: Pool, pages: Tensor, slabs: int, qkv: Tensor, rms: Tensor | Callable[[], Tensor], rotary: Tensor,
               q_weight: Tensor, k_weight: Tensor, quantise_q: bool = False) -> tuple[Tensor, Tensor | None]:
    """``flat_write.write_flat``."""
    if qkv.is_cuda:  # not every machine without a GPU has Triton
        from .flat_write_triton import write_flat_triton as write
    else:
        write = flat_write.write_flat
    return write(pool, pages, slabs, qkv, rms, rotary, q_weight, k_weight, quantise_q)


@dataclass(frozen=True)
class Unmerged:
    """Results of attention to ``splits`` parts of the keys, (splits * R, H, D), and the base-2 logarithms of their sums,
    float32 (H, splits * R)."""

    parts: Tensor
    lse: Tensor | None = None
    splits: int = 1

    def rows(self, first: int, count: int, fp8: bool = False, out: Tensor | None = None) -> Tensor | Rounded:
        """Return the results (count, H * D) of ``count`` queries from the ``first`` on; with ``fp8``, if parts are merged
        anyway, rounded rows, as ``splits.merge`` does, else written to ``out`` if given."""
        if self.splits == 1:
            rows = self.parts[first:first + count].flatten(1)
            return rows if out is None else out.copy_(rows)
        from .splits_triton import merge_triton
        return merge_triton(self.parts, self.lse, self.splits, count, fp8, first, out)


def flat_attention(q: Tensor, q_scale: Tensor | None, pool: Pool, lists: TileLists, plan: FlatPlan) -> Unmerged:
    """Attend with queries from ``write_flat``."""
    if not plan.hopper:
        if q.is_cuda:
            from .attention_triton import paged_attention_triton as attention
        else:
            attention = reference.paged_attention
        return Unmerged(attention(q, [pool], [lists]))
    from .attention_hopper import paged_attention_hopper
    lse = torch.empty((pool.heads, plan.splits * len(q)), dtype=torch.float32, device=q.device)
    return Unmerged(paged_attention_hopper(q, [pool], [lists], quantised_q=None if q_scale is None else (q, q_scale),
                                           repeats=plan.splits, lse=lse), lse, plan.splits)


def cross_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, eps: float,
                    static: Tensor | None = None, rms: Tensor | None = None) -> Tensor | Rounded:
    """``cross_attention.cross_attention``."""
    if q.is_cuda:
        from .cross_attention_triton import cross_attention_triton as attention
    else:
        attention = cross.cross_attention
    return attention(q, keys, values, bias, eps, static, rms)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host through pinned memory, so that the host does not wait for the device's queued work."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else x.to(device)

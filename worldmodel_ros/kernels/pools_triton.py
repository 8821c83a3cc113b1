"""How pools of pages are passed to a Triton kernel that visits them one kind of page after the other."""
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .formats_triton import INTERPRETED
from .pages import Pool, Precision

# Kinds of pages, by bits per value: each has its own loop in a kernel.
PLAIN, FP8, FP4 = tl.constexpr(16), tl.constexpr(8), tl.constexpr(4)
_KINDS = {Precision.FP32: PLAIN, Precision.BF16: PLAIN, Precision.FP8: FP8, Precision.FP4: FP4}


def arguments_by_kind(pools: list[Pool], tables: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...] | None]:
    """Return, for PLAIN, FP8 and FP4 pages each, the four tensors of a pool's list, then its own k, v, k_scale, v_scale,
    k_exponent and v_exponent as far as present; None if there is no pool of that kind."""
    found = {}
    for pool, table in zip(pools, tables, strict=True):
        kind = _KINDS[pool.precision]
        if kind in found:
            raise ValueError(f'two pools for one loop of the kernel ({pool.precision.value}): put their pages into one')
        own = (as_bytes(tensor) for tensor in (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.k_exponent,
                                               pool.v_exponent) if tensor is not None)
        found[kind] = (*table, *own)
    return [found.get(kind) for kind in (PLAIN, FP8, FP4)]


def as_bytes(x: Tensor) -> Tensor:
    """Return an e4m3 tensor as uint8, which kernels for every GPU can take; others as they are."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def product_type(q: Tensor, pools: list[Pool]) -> tl.dtype:
    """Return the type of the matrix products: bfloat16, or float32 if q or a pool is. The interpreter computes wrongly in
    bfloat16."""
    exact = INTERPRETED.value or torch.float32 in (q.dtype, *(pool.k.dtype for pool in pools))
    return tl.float32 if exact else tl.bfloat16


def check_queries(q: Tensor) -> None:
    """Raise ValueError for queries (tokens, H, D) that no kernel takes."""
    if q.shape[2] not in (16, 32, 64, 128) or q.stride(2) != 1 or q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f'q must be bfloat16 or float32 with 16, 32, 64 or 128 contiguous values a head, not '
                         f'{q.dtype} {tuple(q.shape)} with strides {q.stride()}')

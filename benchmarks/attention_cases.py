"""Cases shared by the GPU benchmarks: a chunk of queries over a cache of slabs, its masks, and interleaved timing."""
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.patterns import Pattern, page_lists
from worldmodel_ros.cache.sequence import Table
from worldmodel_ros.cache.torch_storage import kernel_lists
from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import write_pages

DEVICE = 'cuda'
HEADS, HEAD_DIM = 24, 128
LAYOUT = TileLayout(tile=(4, 8, 8), grid=(32, 32))
FLEX_BLOCK = 128


def table_of(slabs: int, pages: np.ndarray) -> Table:
    """Return the table of a session with ``slabs`` full slabs, whose tiles lie in the given pages."""
    head = np.stack([np.arange(slabs), *[np.full(slabs, LAYOUT.frames)] * 2, np.zeros(slabs, np.int64)], 1)
    return Table(np.concatenate([head, pages.reshape(slabs, LAYOUT.tiles)], 1).astype(np.int64))


def lists_of(table: Table, queries: tuple[int, ...], pattern: Pattern, sinks: int = 0) -> TileLists:
    """Return the lists of pages that the tiles of the query slabs visit, on the GPU; for one precision."""
    found, = page_lists(table, LAYOUT, queries, pattern, sinks).values()
    return kernel_lists(found, DEVICE)


def take(lists: TileLists, first: bool, count: int) -> TileLists:
    """Return the first ``count`` pages of each row, or the others."""
    starts, pages, lengths = (t.cpu().tolist() for t in (lists.starts, lists.pages, lists.lengths))
    rows = [list(zip(pages[a:b], lengths[a:b]))[slice(count) if first else slice(count, None)]
            for a, b in zip(starts, starts[1:])]
    return TileLists.from_rows(rows, LAYOUT.page_tokens, DEVICE)


def random_pool(precision: Precision, pages: int) -> Pool:
    """Return normally distributed keys and values; written in parts, because the definition needs memory for float32."""
    pool = Pool.allocate(precision, pages, HEADS, LAYOUT.page_tokens, HEAD_DIM, DEVICE)
    for ids in torch.arange(pages, device=DEVICE).split(16):
        write_pages(pool, ids, *torch.randn(2, len(ids), HEADS, LAYOUT.page_tokens, HEAD_DIM, device=DEVICE))
    return pool


def useful_flops(lists: TileLists) -> float:
    """Return the operations of both matrix products over the keys that the mask lets through, all heads."""
    return 4.0 * LAYOUT.page_tokens * float(lists.lengths.sum()) * HEADS * HEAD_DIM


def dense(pool: Pool) -> tuple[Tensor, Tensor]:
    """Return bf16 pages as (1, H, tokens, D), the layout that other kernels read."""
    return tuple(t.transpose(0, 1).reshape(1, HEADS, -1, HEAD_DIM).contiguous() for t in (pool.k, pool.v))


def flex_mask(lists: TileLists, keys: int):
    """Return the same mask for FlexAttention; all listed blocks are full, so it never checks single keys."""
    from torch.nn.attention.flex_attention import BlockMask
    per_page = LAYOUT.page_tokens // FLEX_BLOCK
    blocks = keys // FLEX_BLOCK
    starts, pages = lists.starts.cpu().numpy(), lists.pages.cpu().numpy()
    indices = np.tile(np.arange(blocks), (lists.query_tiles * per_page, 1))
    counts = np.zeros(len(indices), np.int64)
    for tile in range(lists.query_tiles):
        visited = np.sort((pages[starts[tile]:starts[tile + 1], None] * per_page + np.arange(per_page)).ravel())
        row = np.concatenate([visited, np.setdiff1d(np.arange(blocks), visited)])
        indices[tile * per_page:(tile + 1) * per_page] = row
        counts[tile * per_page:(tile + 1) * per_page] = len(visited)
    full = torch.from_numpy(indices).int().to(DEVICE)[None, None]
    number = torch.from_numpy(counts).int().to(DEVICE)[None, None]
    return BlockMask.from_kv_blocks(torch.zeros_like(number), full, number, full, BLOCK_SIZE=FLEX_BLOCK,
                                    seq_lengths=(len(indices) * FLEX_BLOCK, keys))


def bias_of(lists: TileLists, keys: int) -> Tensor:
    """Return the same mask as an additive bias, bf16 (1, 1, queries, keys)."""
    tokens = LAYOUT.page_tokens
    allowed = torch.zeros(lists.query_tiles, keys // tokens, dtype=torch.bool, device=DEVICE)
    rows = torch.repeat_interleave(torch.arange(lists.query_tiles, device=DEVICE), lists.starts.diff().long())
    allowed[rows, lists.pages.long()] = True
    bias = torch.where(allowed, 0.0, -torch.inf).bfloat16()
    return bias.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)[None, None]


@dataclass
class Timed:
    """Milliseconds of one function: the median of its medians over rounds, and the highest p99."""

    p50: float
    p99: float
    spread: float  # largest difference between two rounds' medians, relative to the median


def interleaved(functions: dict[str, Callable[[], object]], rounds: int = 5, ms: int = 150) -> dict[str, Timed]:
    """Time functions in turns, so that thermal throttling affects all alike."""
    import triton
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            found[name].append(triton.testing.do_bench(function, warmup=40, rep=ms, quantiles=[0.5, 0.99]))
    result = {}
    for name, values in found.items():
        medians = [p50 for p50, _ in values]
        middle = statistics.median(medians)
        result[name] = Timed(round(middle, 4), round(max(p99 for _, p99 in values), 4),
                             round((max(medians) - min(medians)) / middle, 3))
    return result


def gpu_name() -> str:
    return torch.cuda.get_device_name()

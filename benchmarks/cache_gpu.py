"""What the paged cache saves on a GPU, in bytes and milliseconds, compared with cloning, moving and dense dequantisation.

    python benchmarks/cache_gpu.py --folder benchmarks/results     # writes cache_<gpu>.json there

One layer of 24 heads of width 128, frames of 32x32 tokens, slabs of 4 frames. A step inserts one slab (4,096 tokens)
into a context of 30 s at 10 Hz (75 slabs, 307,200 tokens) and attends from it to a window of 3x3x3 tiles and the first
slab. Other ways attend to the same mask by FlexAttention; ``clone, dense`` attends to everything by cuDNN, as causal video
models do.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from result_file import command, short_name, write_result
import torch
from attention_cases import (DEVICE, HEADS, HEAD_DIM, LAYOUT, flex_mask, gpu_name, interleaved, lists_of,
                             random_pool, table_of)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from worldmodel_ros.cache.patterns import page_lists, window
from worldmodel_ros.cache.pool import PagePool
from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.cache.torch_storage import TorchStorage, kernel_lists
from worldmodel_ros.kernels.attention import paged_attention
from worldmodel_ros.kernels.attention_hopper import paged_attention_hopper
from worldmodel_ros.kernels.page_write_triton import write_qkv_triton
from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import read_pages

SLABS = 75
TILES, TOKENS = LAYOUT.tiles, LAYOUT.page_tokens
SLAB_TOKENS = TILES * TOKENS
PATTERN, SINKS = window((3, 3, 3), shifted=True), 1


class Slab:
    """A new slab as a layer's qkv projection leaves it, with the weights and phases that normalise and rotate it."""

    def __init__(self):
        self.qkv = torch.randn(SLAB_TOKENS, 3, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
        angle = torch.rand(SLAB_TOKENS, HEAD_DIM // 2, device=DEVICE) * 6.28
        self.rotary = torch.stack([angle.cos(), angle.sin()])
        self.q_weight, self.k_weight = torch.rand(2, HEAD_DIM, device=DEVICE) + 0.5
        self.counts = torch.full((TILES,), TOKENS, dtype=torch.int32, device=DEVICE)


@torch.compile
def prepare(qkv: torch.Tensor, rotary: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normalised, rotated queries and keys, and values, (1, H, tokens, D) each: the input of the dense ways."""
    cos, sin = rotary[:, :, None]

    def rotated(x, weight):
        a, b = functional.rms_norm(x.float(), x.shape[-1:], weight, 1e-6).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).bfloat16()
    q, k, v = qkv.unbind(1)
    return tuple(x.transpose(0, 1)[None].contiguous() for x in (rotated(q, q_weight), rotated(k, k_weight), v))


class Paged:
    """A ring of pages: a new slab replaces the oldest one that is not a sink, and nothing moves."""

    def __init__(self, precision: Precision):
        self.pool = random_pool(precision, (SLABS + 1) * TILES)
        self.pages = torch.randperm((SLABS + 1) * TILES).numpy().reshape(SLABS + 1, TILES)
        self.lists = lists_of(table_of(SLABS, self.pages[:SLABS]), (SLABS - 1,), PATTERN, SINKS)
        self.target = torch.from_numpy(self.pages[SLABS - 1]).int().to(DEVICE)

    def insert(self, slab: Slab) -> tuple[torch.Tensor, torch.Tensor | None]:
        return write_qkv_triton(self.pool, self.target, slab.counts, slab.qkv, slab.rotary, slab.q_weight,
                                slab.k_weight, quantise_q=self.pool.precision.quantised)

    def step(self, slab: Slab) -> torch.Tensor:
        q, scale = self.insert(slab)
        if scale is None:
            return paged_attention_hopper(q, [self.pool], [self.lists])
        return paged_attention_hopper(q, [self.pool], [self.lists], out=torch.empty_like(q, dtype=torch.bfloat16),
                                      quantised_q=(q, scale))


class Dense:
    """Keys and values of the context in one tensor each, (1, H, tokens, D)."""

    def __init__(self, attend: Callable):
        self.k, self.v = (torch.randn(1, HEADS, SLABS * SLAB_TOKENS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
                          for _ in range(2))
        self.attend = attend

    def clone(self, slab: Slab) -> torch.Tensor:
        """Drop the oldest slab behind the sink and concatenate the new one."""
        q, k, v = prepare(slab.qkv, slab.rotary, slab.q_weight, slab.k_weight)
        self.k, self.v = (torch.cat([old[:, :, :SLAB_TOKENS], old[:, :, 2 * SLAB_TOKENS:], new], 2)
                          for old, new in ((self.k, k), (self.v, v)))
        return self.attend(q, self.k, self.v)

    def move(self, slab: Slab) -> torch.Tensor:
        """Move the window down inside its buffer, as rolling caches of causal video models do."""
        q, k, v = prepare(slab.qkv, slab.rotary, slab.q_weight, slab.k_weight)
        for old, new in ((self.k, k), (self.v, v)):
            old[:, :, SLAB_TOKENS:-SLAB_TOKENS] = old[:, :, 2 * SLAB_TOKENS:].clone()
            old[:, :, -SLAB_TOKENS:] = new
        return self.attend(q, self.k, self.v)


def dequantised(paged: Paged, attend: Callable) -> Callable:
    """Insert into FP8 pages, then attend to dense bf16 tensors made of the slabs that the mask reaches."""
    reached = np.concatenate([np.arange(TILES), np.arange((SLABS - 3) * TILES, SLABS * TILES)])
    pages = torch.from_numpy(paged.pages.ravel()[reached]).to(DEVICE)

    @torch.compile
    def dense() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(x.bfloat16().transpose(0, 1).reshape(1, HEADS, -1, HEAD_DIM)
                     for x in read_pages(paged.pool, pages))

    def step(slab: Slab) -> torch.Tensor:
        paged.insert(slab)
        q, _, _ = prepare(slab.qkv, slab.rotary, slab.q_weight, slab.k_weight)
        return attend(q, *dense())
    return step


def attention_by_flex(lists: TileLists, keys: int) -> Callable:
    flex, mask = torch.compile(flex_attention), flex_mask(lists, keys)
    return lambda q, k, v: flex(q, k, v, block_mask=mask)


def attention_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def insert_and_attend() -> list[dict]:
    slab = Slab()
    logical = lists_of(table_of(SLABS, np.arange(SLABS * TILES)), (SLABS - 1,), PATTERN, SINKS)
    flex = attention_by_flex(logical, SLABS * SLAB_TOKENS)
    remapped = lists_of(table_of(4, np.arange(4 * TILES)), (3,), PATTERN, SINKS)
    fp8 = Paged(Precision.FP8)
    steps = {'paged bf16': Paged(Precision.BF16).step, 'paged fp8': fp8.step, 'paged fp4': Paged(Precision.FP4).step,
             'clone and concatenate': Dense(flex).clone, 'memmove': Dense(flex).move,
             'clone, dense attention': Dense(attention_to_all).clone,
             'fp8, dense dequantisation': dequantised(fp8, attention_by_flex(remapped, 4 * SLAB_TOKENS))}
    times = interleaved({name: (lambda step=step: step(slab)) for name, step in steps.items()}, rounds=3)
    moved = 2 * (SLABS - 2) * SLAB_TOKENS * HEADS * HEAD_DIM * 2
    reference = times['clone and concatenate'].p50
    return [{'case': 'insert and attend, 30 s', 'way': name, 'ms_p50': t.p50, 'ms_p99': t.p99,
             'ratio_clone': round(reference / t.p50, 2),
             'bytes_copied_by_rolling': moved * (1 + (name == 'memmove')) if name.startswith(('clone', 'mem')) else 0}
            for name, t in times.items()]


def insert() -> list[dict]:
    """Time the write of a slab alone: QK-norm, rotation and rounding, from the projection's output to pages."""
    slab = Slab()
    ways = {precision.value: Paged(precision) for precision in (Precision.BF16, Precision.FP8, Precision.FP4)}
    times = interleaved({name: (lambda paged=paged: paged.insert(slab)) for name, paged in ways.items()}, rounds=3)
    read = slab.qkv.numel() * 2 + slab.rotary.numel() * 4
    rows = []
    for name, t in times.items():
        pool, tokens = ways[name].pool, SLAB_TOKENS
        queries = tokens * HEADS * HEAD_DIM * (1 if pool.precision.quantised else 2)
        written = pool.nbytes * TILES // len(pool.k) + queries
        rows.append({'case': 'insert alone', 'way': name, 'ms_p50': t.p50, 'ms_p99': t.p99,
                     'gb_per_s': round((read + written) / t.p50 / 1e6)})
    return rows


def page_in() -> list[dict]:
    """Time a slab of six layers in FP8 from pinned host memory: alone, and while the device attends."""
    layers = 6
    device, host = (TorchStorage(LAYOUT, layers, HEADS, HEAD_DIM, TILES, Precision.FP8, where, pinned=where == 'cpu')
                    for where in (DEVICE, 'cpu'))
    ids = np.arange(TILES)
    size = device.page_bytes * TILES
    slab, paged = Slab(), Paged(Precision.FP8)

    def attend():
        for _ in range(8):
            paged.step(slab)

    def wall(*work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for part in work:
            part()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3
    copy = partial(device.copy_later, ids, host, ids)
    cases = {'page-in alone': (copy,), 'attention alone': (attend,), 'page-in during attention': (copy, attend)}
    for work in cases.values():
        wall(*work)
    ms = {name: float(np.median([wall(*work) for _ in range(30)])) for name, work in cases.items()}
    hidden = 1.0 - (ms['page-in during attention'] - ms['attention alone']) / ms['page-in alone']
    return [{'case': 'page-in of a slab, 6 layers, fp8', 'way': name, 'ms_p50': round(value, 3), 'bytes': size,
             'gb_per_s': round(size / value / 1e6, 1) if name == 'page-in alone' else None,
             'hidden': round(hidden, 3) if 'during' in name else None} for name, value in ms.items()]


def flat() -> list[dict]:
    """Time a session's step, tables and uploads included, as the session grows older: 30 s of context, bf16."""
    held = SINKS + SLABS + 1  # the last one is staged before the oldest goes
    storage = TorchStorage(LAYOUT, 1, HEADS, HEAD_DIM, held * TILES, Precision.BF16, DEVICE)
    cache = SequenceCache(LAYOUT, [PagePool.of('bf16', storage)], held, SINKS)
    q, k, v = torch.randn(3, SLAB_TOKENS * HEADS * HEAD_DIM, device=DEVICE).bfloat16()
    q, (k, v) = q.view(SLAB_TOKENS, HEADS, HEAD_DIM), (
        x.view(1, HEADS, LAYOUT.frames, LAYOUT.tokens, HEAD_DIM) for x in (k, v))
    times = []
    for slab in range(1550):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with cache.stage() as stage:
            stage.write(slab * LAYOUT.frames, k, v)
        cache.evict((slab + 1 - SLABS) * LAYOUT.frames)
        lists = page_lists(cache.table, LAYOUT, (slab,), PATTERN, SINKS)
        paged_attention(q, [storage.layer(0)], [kernel_lists(lists[0], DEVICE)])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    ages = {'10 s': 25, '1 min': 150, '10 min': 1500}
    found = {age: np.array(times[at - 10:at + 50]) for age, at in ages.items()}
    first = np.median(found['10 s'])
    return [{'case': 'a step as the session ages', 'way': age, 'ms_p50': round(float(np.median(ms)), 4),
             'ms_p99': round(float(np.quantile(ms, 0.99)), 4), 'ratio_10_s': round(float(np.median(ms) / first), 4)}
            for age, ms in found.items()]


def memory() -> list[dict]:
    """Return the bytes of GPU memory that a session of 30 s takes, compared with the nominal size of its precision."""
    values = 2 * SLABS * SLAB_TOKENS * HEADS * HEAD_DIM
    bits = {Precision.BF16: 16.0, Precision.FP8: 8.0, Precision.FP4: 4.0 + 8.0 / 16.0}
    rows = []
    for precision, width in bits.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        pool = Pool.allocate(precision, SLABS * TILES, HEADS, TOKENS, HEAD_DIM, DEVICE)
        taken = torch.cuda.memory_allocated() - before
        rows.append({'case': 'memory of one layer, 30 s', 'way': precision.value, 'bytes': taken,
                     'promised': round(values * width / 8), 'ratio_promised': round(taken / (values * width / 8), 4)})
        del pool
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, help='where to write cache_<gpu>.json')
    options = parser.parse_args()
    rows = memory() + insert() + insert_and_attend() + page_in() + flat()
    for row in rows:
        print({**row, 'gpu': gpu_name()}, flush=True)
    result = {'command': command(), 'gpu': gpu_name(), 'torch': torch.__version__, 'rows': rows}
    write_result(result, options.folder and options.folder / f'cache_{short_name([gpu_name()])}.json')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

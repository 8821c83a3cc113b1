"""Times paged attention on a GPU against FlexAttention and cuDNN, with the same shapes and masks, in one run.

    python benchmarks/attention.py --folder benchmarks/results     # writes attention_<gpu>.json there

The queries are one chunk of 16,384 tokens with 24 heads of width 128 (16 frames of 32x32 tokens, 4 slabs of 16 tiles), over
a cache of 7 slabs whose pages lie in random order. Useful operations count only the pairs that the mask lets through.
``contiguous`` is the same kernel with the pages in the order of their use. ``cudnn contiguous`` is cuDNN over the same number
of keys, dense and without a mask: an upper bound for masked attention.
"""
from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from result_file import command, short_name, write_result
import torch
from attention_cases import (DEVICE, HEADS, HEAD_DIM, LAYOUT, bias_of, dense, flex_mask, gpu_name,
                             interleaved, lists_of, random_pool, table_of, take, useful_flops)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from worldmodel_ros.cache.patterns import EVERYTHING, SPATIAL, TEMPORAL, window
from worldmodel_ros.kernels import reference
from worldmodel_ros.kernels.attention import paged_attention
from worldmodel_ros.kernels.attention_hopper import paged_attention_hopper, supports
from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.query import quantise_queries

SLABS, QUERY_SLABS = 7, (3, 4, 5, 6)
PATTERNS = {'window': window((3, 3, 3), shifted=True), 'spatial': SPATIAL, 'temporal': TEMPORAL, 'dense': EVERYTHING}
BF16, FP8, FP4 = Precision.BF16, Precision.FP8, Precision.FP4


def error(q: torch.Tensor, pools: list[Pool], lists: list[TileLists], out: torch.Tensor, tiles: int = 2) -> float:
    """Return the largest relative error of a few query tiles, all heads, against float64 on the values that the pages hold."""
    tokens = LAYOUT.page_tokens
    worst = 0.0
    for tile in torch.randint(lists[0].query_tiles, (tiles,)).tolist():
        rows = slice(tile * tokens, (tile + 1) * tokens)
        one = [TileLists.from_rows([list(zip(table.pages[a:b].tolist(), table.lengths[a:b].tolist()))], tokens, DEVICE)
               for table in lists for a, b in [table.starts[tile:tile + 2].tolist()]]
        exact = reference.paged_attention(q[rows], pools, one, dtype=torch.float64).double()
        worst = max(worst, float((out[rows].double() - exact).norm() / exact.norm()))
    return worst


def ours(q: torch.Tensor, quantised_q: tuple, pools: list[Pool], lists: list[TileLists]):
    """Return the call to time. FP8 queries are passed in, since the kernel that writes the pages produces them."""
    if supports(q, pools, lists[0].query_tiles):
        return partial(paged_attention_hopper, q, pools, lists, out=torch.empty_like(q), quantised_q=quantised_q)
    return partial(paged_attention, q, pools, lists)


def pattern_rows(name: str, q: torch.Tensor, pools: dict[Precision, Pool], order: np.ndarray) -> list[dict]:
    table = table_of(SLABS, order)
    lists = lists_of(table, QUERY_SLABS, PATTERNS[name])
    in_order = lists_of(table_of(SLABS, np.arange(len(order))), QUERY_SLABS, PATTERNS[name])
    per_row = int(lists.starts[1])
    recent = max(1, per_row // 3)
    split = [take(lists, True, recent), take(lists, False, recent)]
    q8 = quantise_queries(q)
    calls = {('paged', 'bf16'): ([pools[BF16]], [lists]), ('contiguous', 'bf16'): ([pools[BF16]], [in_order]),
             ('paged', 'fp8'): ([pools[FP8]], [lists]), ('contiguous', 'fp8'): ([pools[FP8]], [in_order]),
             ('paged', 'fp4'): ([pools[FP4]], [lists]),
             ('paged', 'fp8 + fp4'): ([pools[FP8], pools[FP4]], split),
             ('paged', 'bf16 + fp8'): ([pools[BF16], pools[FP8]], split)}
    functions, errors = {}, {}
    for key, (pool_list, tables) in calls.items():
        functions[key] = ours(q, q8, pool_list, tables)
        errors[key] = error(q, pool_list, tables, functions[key]())
    dense_q = q.transpose(0, 1)[None].contiguous()
    k, v = dense(pools[BF16])
    flex, mask = torch.compile(flex_attention), flex_mask(lists, k.shape[2])
    functions['flex', 'bf16'] = lambda: flex(dense_q, k, v, block_mask=mask)
    errors['flex', 'bf16'] = error(q, [pools[BF16]], [lists], functions['flex', 'bf16']()[0].transpose(0, 1))

    def cudnn(keys, values, bias=None):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(dense_q, keys, values, attn_mask=bias)
    bias = None if name == 'dense' else bias_of(lists, k.shape[2])
    functions['cudnn', 'bf16'] = lambda: cudnn(k, v, bias)
    errors['cudnn', 'bf16'] = error(q, [pools[BF16]], [lists], functions['cudnn', 'bf16']()[0].transpose(0, 1))
    near = [t[:, :, :per_row * LAYOUT.page_tokens].contiguous() for t in (k, v)]
    functions['cudnn contiguous', 'bf16'] = lambda: cudnn(*near)
    times = interleaved(functions)
    work, flex_ms, cudnn_ms = useful_flops(lists), times['flex', 'bf16'].p50, times['cudnn', 'bf16'].p50
    return [{'gpu': gpu_name(), 'kernel': kernel, 'pattern': name, 'dtype': dtype, 'tokens': len(q),
             'density': round(per_row / len(order), 3), 'ms_p50': t.p50, 'ms_p99': t.p99, 'spread': t.spread,
             'tflops_useful': round(work / t.p50 / 1e9, 1), 'ratio_flex': round(flex_ms / t.p50, 3),
             'ratio_cudnn': round(cudnn_ms / t.p50, 3),
             'error': round(errors[kernel, dtype], 5) if (kernel, dtype) in errors else None}
            for (kernel, dtype), t in times.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, help='where to write attention_<gpu>.json')
    parser.add_argument('--patterns', nargs='+', default=list(PATTERNS), choices=PATTERNS)
    options = parser.parse_args()
    pages = SLABS * LAYOUT.tiles
    order = np.random.default_rng().permutation(pages)
    q = torch.randn(len(QUERY_SLABS) * LAYOUT.tiles * LAYOUT.page_tokens, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    pools = {precision: random_pool(precision, pages) for precision in (BF16, FP8, FP4)}
    rows = []
    for name in options.patterns:
        rows += pattern_rows(name, q, pools, order)
        for row in rows[-10:]:
            print('{pattern:9} {kernel:17} {dtype:10} {ms_p50:8.3f} ms {tflops_useful:7.1f} TFLOP/s  '
                  'flex {ratio_flex:5.2f}  cudnn {ratio_cudnn:6.2f}  error {error}'.format(**row), flush=True)
    result = {'command': command(), 'gpu': gpu_name(), 'torch': torch.__version__, 'heads': HEADS, 'head_dim': HEAD_DIM,
              'rows': rows}
    write_result(result, options.folder and options.folder / f'attention_{short_name([gpu_name()])}.json')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

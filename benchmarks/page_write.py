"""GB/s of the steps before attention, at the shapes of ``robot_3b``: pages written from a projection, queries rotated.

    python benchmarks/page_write.py --json benchmarks/results/page_write_<gpu>.json

Each byte that must be read or written is counted once, also for the copy it is compared with. Without a GPU all of it
runs at a small size in Triton's interpreter (TRITON_INTERPRET=1), which tests the code and measures nothing.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from result_file import command, write_result
import torch
from fp8_cases import DEVICE, GPU, normal, timed

from worldmodel_ros.kernels.page_write_triton import write_qkv_triton
from worldmodel_ros.kernels.pages import Pool, Precision
from worldmodel_ros.kernels.qk_norm_triton import rotate_qk_triton
from worldmodel_ros.machine import machine, versions

GROUPS, FRAMES, TILES, RUN, HEADS, DIM = (4, 4, 16, 64, 24, 128) if GPU else (1, 2, 2, 8, 2, 16)
TOKENS = GROUPS * FRAMES * TILES * RUN


def writing(precision: Precision, quantise_q: bool = False) -> dict:
    pages, pool = GROUPS * TILES, Pool.allocate(precision, GROUPS * TILES, HEADS, FRAMES * RUN, DIM, DEVICE)
    angle = torch.rand(TOKENS, DIM // 2, device=DEVICE) * 6.3
    arguments = (pool, torch.randperm(pages, device=DEVICE).int(),
                 torch.full((pages,), FRAMES * RUN, dtype=torch.int32, device=DEVICE), normal(TOKENS, 3, HEADS, DIM),
                 torch.stack([angle.cos(), angle.sin()]), *(normal(DIM).abs() for _ in range(2)))

    def write() -> list[torch.Tensor]:
        made = write_qkv_triton(*arguments, quantise_q=quantise_q, by_frame=(FRAMES, TILES))
        return [x for x in (*made, *pool.tensors().values()) if x is not None]
    moved = sum(x.nbytes for x in (arguments[3], arguments[4], *write()))
    name = f'write_qkv, {precision.value} pages' + ', e4m3 queries' * quantise_q
    return measured(name, write, moved)


def rotating() -> dict:
    qkv, rotary, weights = normal(TOKENS, 3, HEADS, DIM), torch.rand(2, TOKENS, DIM // 2, device=DEVICE), normal(2, DIM)
    return measured('rotate_qk', lambda: rotate_qk_triton(qkv, rotary, *weights), qkv.nbytes * 4 // 3 + rotary.nbytes)


def copying() -> dict:
    x = normal(TOKENS, 3, HEADS, DIM)
    return measured('copy', x.clone, 2 * x.nbytes)


def measured(kernel: str, call: Callable[[], object], moved: int) -> dict:
    ms = timed({kernel: call})[kernel]
    return {'kernel': kernel, 'ms': round(ms, 4), 'gb_per_s': round(1e-6 * moved / ms)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    result = {'command': command(), 'gpu': torch.cuda.get_device_name() if GPU else None,
              **machine(), 'versions': versions(('torch', 'triton')), 'rows': []}
    parts = (copying, partial(writing, Precision.BF16), partial(writing, Precision.FP8),
             partial(writing, Precision.FP8, True), partial(writing, Precision.FP4), rotating)
    with torch.inference_mode():
        for part in parts:
            result['rows'].append(part())
            print(json.dumps(result['rows'][-1]), flush=True)
            write_result(result, options.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())

"""What processes on several GPUs exchange in a pass, by each available transport, at the sizes of the large model.

    python benchmarks/exchange.py --json benchmarks/results/exchange_h200x4.json

For every message, the time of one in a CUDA graph of several (median and 99th percentile over replays, the slowest
GPU's), and the bytes that a GPU sends to others per second. All in one run:

* nccl: all-to-all in bfloat16; nccl-fp8: rounded for the transfer, with rounding and restoring in the time
  (``parallel.rounding``);
* peers, peers-fp8: the same by the GPUs' copy engines (``parallel.peer_memory``), which a model on several GPUs uses. They must
  give the bits that NCCL gives. In results before them, ``symmetric`` is PyTorch's symmetric memory, used in the same way;
* all-reduce: what tensor parallelism sends instead, twice in every layer.

Without GPUs it only checks itself, on two processes: gloo, small messages, no meaningful times.
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from result_file import command, write_result
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from worldmodel_ros.engine.distributed.backend import use_device
from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.parallel.group import SequenceParallel, TensorParallel
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.presets import PRESETS

IN_GRAPH = 8  # messages, so that launching the graph is a small part
CHECKED = 20  # messages compared with NCCL's


def cases(count: int, small: bool) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Return name, shape of a rank's tensor (B, T, P, ..., H, d), divided and joined axis."""
    found = []
    for name in ('robot_3b', 'robot_3b_4k'):
        preset = PRESETS[name]
        frames, frame, heads, dim = preset.chunk_frames // count, preset.tokens, preset.heads, preset.head_dim
        if small:
            frames, frame, heads, dim = 2, 16, 4, 16
        found += [(f'{name} into a cache layer', (1, frames, frame, 3, heads, dim), -2, 1),
                  (f'{name} out of it', (1, frames * count, frame, heads // count, dim), 1, -2),
                  (f'{name} commit, into any layer', (1, 1, frame // count, 3, heads, dim), -2, 2)]
    return found


def measure(function: Callable[[Tensor], Tensor], x: Tensor, replays: int) -> dict[str, float]:
    """Return milliseconds of one call."""
    if not x.is_cuda:
        start = time.perf_counter()
        function(x)
        return {'p50': round(1e3 * (time.perf_counter() - start), 3)}
    for _ in range(3):
        function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode='thread_local'):
        for _ in range(IN_GRAPH):
            function(x)
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / IN_GRAPH)
    values = torch.tensor(times, device=x.device).sort().values
    found = torch.stack([values[len(values) // 2], values[int(0.99 * len(values))]])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(('p50', 'p99'), (round(each, 4) for each in found.tolist())))


def ways(link: Link, shape: tuple[int, ...], divide: int, join: int, x: Tensor) -> dict[str, Callable]:
    """Return the calls; each sets itself up when it is measured, so that one that is unavailable fails alone."""
    by_nccl = replace(link, _peers=None)

    def call(through: Link, rounded: bool) -> Callable[[Tensor], Tensor]:
        group = SequenceParallel(through, rounded)
        if through is link:
            if link._peers is None:
                raise RuntimeError("the GPUs cannot write into each other's memory")
            wanted = SequenceParallel(by_nccl, rounded)
            for _ in range(CHECKED):
                y = torch.randn_like(x)
                if not torch.equal(group.exchange(y, divide, join), wanted.exchange(y, divide, join)):
                    raise RuntimeError('the copy engines gave something else than NCCL')
        return lambda x: group.exchange(x, divide, join)
    found = {f'{way}{"-fp8" if rounded else ""}': partial(call, through, rounded)
             for way, through in (('nccl', by_nccl), ('peers', link))[:2 if x.is_cuda else 1] for rounded in (False, True)}
    if len(shape) == 5:  # the output of a linear layer, all tokens and channels
        reduced = TensorParallel(link)
        whole = x.new_ones(shape[0], shape[1], shape[2], shape[3] * link.count * shape[4])
        found['all-reduce'] = lambda: lambda x: reduced.sum(whole)
    return found


def process(rank: int, count: int, port: int, options: argparse.Namespace) -> None:
    device = use_device(rank)
    link = Link.join(device, rank, count, Link.connect(port, count))
    result = {'command': command(), 'machine': machine(), 'versions': versions(),
              'processes': count, 'rows': []}
    on_gpu = device.type == 'cuda'
    # Those that may hang come last.
    for way in ('nccl', 'nccl-fp8', 'all-reduce', 'peers', 'peers-fp8'):
        for name, shape, divide, join in cases(count, not on_gpu):
            x = torch.randn(shape, dtype=torch.bfloat16, device=device)
            made = ways(link, shape, divide, join, x).get(way)
            if made is None:
                continue
            row = {'message': name, 'way': way, 'bytes': x.nbytes * (count - 1) // count}
            try:
                row['ms'] = measure(made(), x, options.replays)
                row['gb_s_of_bf16'] = round(row['bytes'] / row['ms']['p50'] / 1e6, 1)
            except Exception as error:  # keep the other results
                row['error'] = f'{type(error).__name__}: {error}'[:300]
            result['rows'].append(row)
            if rank == 0:
                print(row, flush=True)
                write_result(result, options.json)
    Link.leave().result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--replays', type=int, default=200)
    parser.add_argument('--processes', type=int, help='default: one for each GPU')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    os.environ.setdefault('TORCH_SYMM_MEM_DISABLE_MULTICAST', '1')
    count = options.processes or max(2, torch.cuda.device_count())
    store = Link.listen(count)
    mp.spawn(process, (count, store.port, options), count)


if __name__ == '__main__':
    main()

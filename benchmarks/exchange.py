"""What processes on several GPUs exchange in a pass, by each available transport, at the sizes of the large model.

    python benchmarks/exchange.py --json benchmarks/results/exchange_h200x4.json

For every message, the time of one in a CUDA graph of several (median and 99th percentile over replays, the slowest
GPU's), and the bytes that a GPU sends to others per second. All in one run:

* nccl: all-to-all in bfloat16; nccl-fp8: rounded for the transfer, with rounding and restoring in the time
  (``parallel.rounding``);
* symmetric: each GPU writes into its peers' memory (symmetric memory, no multicast), in bfloat16: the possible
  gain over NCCL, but without a safe way to give up a lost peer;
* all-reduce: what tensor parallelism sends instead, twice in every layer.

Without GPUs it only checks itself, on two processes: gloo, small messages, no meaningful times.
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
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


class Symmetric:
    """An all-to-all that writes into the other GPUs' memory."""

    def __init__(self, link: Link, rows: Tensor):
        import torch.distributed._symmetric_memory as symmetric
        self._link, self._own = link, symmetric.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._handle = symmetric.rendezvous(self._own, dist.group.WORLD)
        self._peers = [self._handle.get_buffer(peer, rows.shape, rows.dtype) for peer in range(link.count)]

    def all_to_all(self, rows: Tensor) -> Tensor:
        self._handle.barrier(channel=0)  # until all have read the previous message
        for step in range(self._link.count):
            peer = (self._link.rank + step) % self._link.count
            self._peers[peer][self._link.rank].copy_(rows[peer])
        self._handle.barrier(channel=1)
        return self._own


def ways(link: Link, shape: tuple[int, ...], divide: int, join: int, x: Tensor) -> dict[str, Callable]:
    """Return the calls; each sets itself up when it is measured, so that one that is unavailable fails alone."""
    plain, rounded = SequenceParallel(link), SequenceParallel(link, rounded=True)

    def symmetric() -> Callable[[Tensor], Tensor]:
        rows = x.view(link.count, -1)
        by_memory = Symmetric(link, rows)
        if not torch.equal(by_memory.all_to_all(rows), link.all_to_all(rows.view(torch.uint8)).view(x.dtype)):
            raise RuntimeError('symmetric memory gave something else than NCCL')
        return lambda x: by_memory.all_to_all(x.view(link.count, -1))
    found = {'nccl': lambda: lambda x: plain.exchange(x, divide, join),
             'nccl-fp8': lambda: lambda x: rounded.exchange(x, divide, join)}
    if x.is_cuda:
        found['symmetric'] = symmetric
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
    for way in ('nccl', 'nccl-fp8', 'all-reduce', 'symmetric'):
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

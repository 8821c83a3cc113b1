"""Where the time of a tick goes, kernel by kernel, against the device's limits; as text.

    python benchmarks/profile_tick.py --preset base --backend torch-compiled --folder benchmarks/results
    python benchmarks/profile_tick.py --preset robot_3b --backend torch-fp8 --folder benchmarks/results
    python benchmarks/profile_tick.py --preset robot_3b --backend torch-fp8 --gpus 4 --folder benchmarks/results

Random weights, a full window, ticks of two steps. The operations of a chunk's linears and attention are counted from the
preset (tick_work.py); the lower bound on their time is by the tensor cores' data-sheet rate. With several GPUs, the kernels
are those of the first; NCCL kernels include waiting for the others.
"""
from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from result_file import command, short_name
import torch
from tick_work import PEAK, chunk_flops
from torch.profiler import ProfilerActivity, profile

from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.machine import machine, versions

STEPS = 2
# What a kernel does, by its name: the first match counts.
KINDS = (('exchange', r'nccl'), ('attention', r'attn|attention|flash|fmha|sdpa'),
         ('convolution', r'conv|winograd|implicit|wgrad|fprop|mkldnn'),
         ('linear', r'gemm|gemv|matmul|cutlass|cublas|nvjet|scaled_mm|addmm|linear|_product|\bmm\b|bmm'),
         ('copy', r'memcpy|memset|copy|cat|index|gather|scatter|stack'),
         ('row-wise', r'norm|gelu|silu|modulat|rotat|quant|_each|_write|elementwise|triton_|reduce|softmax|add|mul'))


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), 'other')


def tick(session, frame: np.ndarray, executed: np.ndarray) -> None:
    session.observe(frame, executed)
    session.look_ahead(session.spec.goals[0], STEPS).future()


def profiled(engine: Engine, ticks: int) -> list[tuple[str, float, float]]:
    """Return kernels (without a GPU: operators) with calls and ms of a tick, the longest first."""
    spec, on_gpu = engine.spec, torch.cuda.is_available()
    frame = np.random.default_rng(0).integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
    executed = np.zeros(spec.actions, np.float32)
    session = engine.open_session()
    for _ in range(spec.window_frames):
        session.observe(frame, executed)
    for _ in range(5):
        tick(session, frame, executed)
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(ticks):
            tick(session, frame, executed)
        engine.backend.settle()
    rows = []
    for event in found.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            rows.append((event.key, event.count / ticks, microseconds / 1e3 / ticks))
    return sorted(rows, key=lambda row: -row[2])


def report(engine: Engine, backend: str, rows: list[tuple[str, float, float]], shown: int,
           gpus: int) -> str:
    total = sum(ms for _, _, ms in rows)
    flops = {part: value / gpus for part, value in chunk_flops(engine.spec, STEPS).items()}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else machine()['cpu']
    share = f', a share of one in {gpus}' if gpus > 1 else ''
    kinds: dict[str, tuple[float, float]] = {}
    for key, calls, ms in rows:
        before = kinds.get(kind_of(key), (0.0, 0.0))
        kinds[kind_of(key)] = before[0] + calls, before[1] + ms
    lines = [command(), f'{name}; torch {versions()["torch"]}',
             f'{engine.spec.name} on {backend}{share}, random weights: {total:.3f} ms of kernels a tick of {STEPS} steps', '',
             f'{"kind":<14}{"calls":>9}{"ms":>10}{"share":>8}']
    for kind, (calls, ms) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        lines.append(f'{kind:<14}{calls:>9.1f}{ms:>10.3f}{ms / total:>8.1%}')
    lines += ['', 'The chunk at best (the commit, the autoencoder and the heads are not in it), ms:']
    for part, value in flops.items():
        times = ', '.join(f'{dtype} {value / peak * 1e3:.3f}' for dtype, peak in PEAK.items())
        lines.append(f'  {part:<10} {value / 1e12:9.3f} TFLOP: {times}')
    lines += ['', f'{"ms":>9}{"share":>8}{"calls":>9}  kernel']
    lines += [f'{ms:>9.4f}{ms / total:>8.1%}{calls:>9.1f}  {key[:150]}' for key, calls, ms in rows[:shown]]
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--preset', default='base')
    parser.add_argument('--backend', default='torch-compiled')
    parser.add_argument('--gpus', type=int, default=1)
    parser.add_argument('--parallel', default='sequence-fp8', help='how several GPUs share the model')
    parser.add_argument('--ticks', type=int, default=20)
    parser.add_argument('--shown', type=int, default=40, help='kernels in the table')
    parser.add_argument('--folder', type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    several = {'gpus': options.gpus, 'parallel': options.parallel} if options.gpus > 1 else {}
    engine = load_random(options.preset, options.backend, sessions=1, **several)
    engine.warm_up(ticks=2)
    text = report(engine, options.backend, profiled(engine, options.ticks), options.shown, options.gpus)
    print(text, flush=True)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        gpu = short_name(machine()['gpus'])
        count = f'x{options.gpus}' if several else ''
        (options.folder / f'profile_{options.preset}_{options.backend}_{gpu}{count}.txt').write_text(text)
    if several:
        engine.close()
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

"""An upper bound on the gain of dividing a tick's networks among processes, from the parts of the real model.

    python benchmarks/pools.py --json benchmarks/results/pools_tiny_<machine>.json

Two processes, a thread each, compute at the same time. *Colocated*: both answer whole ticks (a frame taken in, a plan, two
denoising steps, images). *Divided*: one only takes frames in, or only denoises, and so on, each with a session of its own:
the exchange that they would need is left out, and measured separately, so the true rate is lower. Divisions alternate
``--rounds`` times, since other programs may use the machine; a part's time is the median of its CPU time. The rate of a
divided pair is that of its slower half, the rate of a colocated pair the sum of both.
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.engine import load
from worldmodel_ros.engine.session import Session

PARTS = ('observe', 'denoise', 'denoise', 'decode')
DIVISIONS = {'colocated': (PARTS, PARTS),
             'frames | denoising, images': (('observe',), ('denoise', 'denoise', 'decode')),
             'frames, images | denoising': (('observe', 'decode'), ('denoise', 'denoise')),
             'frames, first step | second step, images': (('observe', 'denoise'), ('denoise', 'decode'))}


def ticks(session: Session, parts: tuple[str, ...], frame: np.ndarray) -> Iterator[None]:
    """Repeat these parts of a tick."""
    spec = session.spec
    executed = np.zeros(spec.actions, np.float32)
    for _ in range(spec.window_frames + 1):
        session.observe(frame, executed)
    plan = session.plan(spec.goals[0])
    future = session.imagine(plan)
    while True:
        if 'observe' in parts:
            session.observe(frame, executed)
            plan = session.plan(spec.goals[0])
        if steps := parts.count('denoise'):
            future = session.imagine(plan, steps)
        if 'decode' in parts:
            session.decode(future)
        yield


def serve(model: str, backend: str, pipe: multiprocessing.connection.Connection) -> None:
    """Serve as a process: run the requested parts for the requested seconds; send the CPU times of each tick [s]."""
    engine = load(model, backend, sessions=len(DIVISIONS) * 2)
    frame = np.random.default_rng(0).integers(0, 256, (*engine.spec.image_size, 3), dtype=np.uint8)
    running: dict[tuple[str, ...], Iterator[None]] = {}
    for parts, seconds in iter(pipe.recv, None):
        work = running.setdefault(parts, ticks(engine.open_session(), parts, frame))
        next(work)
        taken, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.process_time()
            next(work)
            taken.append(time.process_time() - begin)
        pipe.send(taken)


def exchange(size: int, count: int = 200) -> dict:
    """Time writing ``size`` bytes to shared memory and reading them [ms]: what a tick adds to a session."""
    block = shared_memory.SharedMemory(create=True, size=size)
    data, back, times = np.ones(size, np.uint8), np.empty(size, np.uint8), []
    there = np.frombuffer(block.buf, np.uint8, size)
    for _ in range(count):
        begin = time.perf_counter()
        there[:] = data
        back[:] = there
        times.append((time.perf_counter() - begin) * 1e3)
    del there
    block.close()
    block.unlink()
    return {'bytes': size, 'p50_ms': round(float(np.median(times)), 4), 'p99_ms': round(float(np.quantile(times, 0.99)), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--backend', default='onnx-int8')
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--seconds', type=float, default=1.0, help='of each division in each round')
    parser.add_argument('--slab', type=int, default=300_000, help='bytes that a tick adds to a session')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context('spawn')
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(options.model, options.backend, theirs), daemon=True).start()
        pipes.append(ours)
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in DIVISIONS}
    for _ in range(options.rounds):
        for name, halves in DIVISIONS.items():
            for pipe, parts in zip(pipes, halves, strict=True):
                pipe.send((parts, options.seconds))
            for times, pipe in zip(taken[name], pipes, strict=True):
                times.extend(pipe.recv())
    for pipe in pipes:
        pipe.send(None)
    rates = {name: [1.0 / float(np.median(times)) for times in halves] for name, halves in taken.items()}
    colocated = sum(rates['colocated'])
    rows = [{'division': name, 'ms_of_each_half': [round(1e3 / rate, 3) for rate in halves],
             'ticks_a_second': round(sum(halves) if name == 'colocated' else min(halves), 2),
             'times_colocated': round((sum(halves) if name == 'colocated' else min(halves)) / colocated, 3)}
            for name, halves in rates.items()]
    write_result({**provenance(), 'model': options.model, 'backend': options.backend, 'rounds': options.rounds, 'rows': rows,
                  'exchange_of_a_slab': exchange(options.slab), 'load_average': round(os.getloadavg()[0], 2)},
                 options.json, show=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())

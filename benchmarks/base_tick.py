"""Where the time of a tick of ``base`` goes: by part, by kind of kernel, and with several candidates at a time.

    python benchmarks/base_tick.py --json benchmarks/results/base_tick_<gpu>.json
    python benchmarks/base_tick.py --ways fp8 --candidates 4 16 --json ...

Random weights, a full window, ticks of two steps, back to back and at the interval of a 60 Hz camera. Times of parts are
device times; a tick is from a frame in host memory to a checked plan in host memory. Three ways are compared: pages that are
read in place, pages that are gathered for each layer, and layers in FP8. The imagined futures of each way are compared with
those of the first; in bf16 about a percent is rounding. Candidates are chunks under different plans over one window, in one
batch, as sessions have them. Rows are written as they come; no way is begun that would end after --budget.
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from profile_tick import kind_of, profiled
from result_file import provenance, write_result
from tick_measure import gathering_engine, measure, summary
import torch

from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.network_calls import Call

WAYS = {'in place': ('torch-compiled', True), 'gathered': ('torch-compiled', False), 'fp8': ('torch-fp8', True)}
STEPS, PERIOD, SHOWN = 2, 1.0 / 60.0, 30
WAY = 45.0  # s that one way takes, compilation included


def engine_of(preset: str, way: str) -> Engine:
    backend, in_place = WAYS[way]
    return (load_random if in_place else gathering_engine)(preset, backend, sessions=2)


def futures(engine: Engine) -> np.ndarray:
    """Return latents of some ticks over a window that fills and rolls; weights and frames are the same in every way."""
    spec, found = engine.spec, []
    frames = np.random.default_rng(0).integers(0, 256, (8, *spec.image_size, 3), dtype=np.uint8)
    session = engine.open_session(seed=1)
    for count in range(spec.window_frames + 4):
        session.observe(frames[count % len(frames)], np.full(spec.actions, 0.1, np.float32))
        future = session.look_ahead(spec.goals[0], STEPS).future()
        if count % 4 == 3:
            found.append(engine.backend.host(future.latents))
    session.close()
    return np.stack(found)


def kernels(engine: Engine) -> dict:
    rows, kinds = profiled(engine, 10), {}
    for key, calls, ms in rows:
        before = kinds.get(kind_of(key), [0.0, 0.0])
        kinds[kind_of(key)] = [round(before[0] + calls, 1), round(before[1] + ms, 4)]
    return {'kernels_ms': round(sum(ms for _, _, ms in rows), 3), 'kinds_calls_ms': kinds,
            'longest_calls_ms': [[key[:110], round(calls, 1), round(ms, 4)] for key, calls, ms in rows[:SHOWN]]}


def chunk_of(engine: Engine, candidates: int, repeats: int = 30) -> dict:
    """Time both steps of a chunk and its outcomes, for ``candidates`` plans at a time."""
    spec, backend = engine.spec, engine.backend
    session, rng = engine.open_session(), np.random.default_rng(0)
    for _ in range(spec.window_frames):
        session.observe(rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8), np.zeros(spec.actions, np.float32))
    plans = rng.normal(0.0, 0.1, (candidates, spec.chunk_frames, spec.actions)).astype(np.float32)
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        works = [session._sampler.denoise(session._cache, session._time, plan, STEPS) for plan in plans]
        calls = [next_call(work, None) for work in works]
        while calls[0] is not None:
            outputs = backend.launch(calls[0].network, [call.inputs for call in calls])
            calls = [next_call(work, output) for work, output in zip(works, outputs)]
        backend.settle()
        times.append((time.perf_counter() - start) * 1e3)
    session.close()
    return {'candidates': candidates, 'chunk_ms': summary(times[5:])}


def next_call(work, outputs) -> Call | None:
    try:
        item = work.send(outputs)
        while not isinstance(item, Call):
            item = work.send(None)
        return item
    except StopIteration:
        return None


class Results:
    """The results so far, saved in a file."""

    def __init__(self, file: Path | None):
        self._file, self.found = file, {**provenance(), 'weights': 'random', 'start_s': {}, 'rows': [], 'failed': {}}

    def take(self, way: str, part: Callable[..., dict], *arguments: Any) -> None:
        """Add a row, or the reason why there is none; a failure leaves the other rows."""
        try:
            self.found['rows'].append({'way': way, **part(*arguments)})
            print(json.dumps(self.found['rows'][-1]), file=sys.stderr, flush=True)
        except Exception as error:
            self.fail(way, f'{part.__name__}: {type(error).__name__}: {error}')
        self.write()

    def fail(self, way: str, reason: str) -> None:
        print(f'{way} failed: {reason}', file=sys.stderr, flush=True)
        self.found['failed'].setdefault(way, []).append(reason[:2000])
        self.write()

    def write(self) -> None:
        write_result(self.found, self._file)


def run(way: str, options: argparse.Namespace, results: Results, first: list[np.ndarray]) -> None:
    """Measure all rows of a way; ``first`` receives the futures of the first way."""
    begun = time.perf_counter()
    engine = engine_of(options.preset, way)
    engine.warm_up(ticks=4)
    results.found['start_s'][way] = round(time.perf_counter() - begun, 1)
    for period in (0.0, PERIOD):
        results.take(way, ticks, engine, options.seconds, period)
    results.take(way, difference, engine, first)
    results.take(way, kernels, engine)
    for count in options.candidates:
        results.take(way, chunk_of, engine, count)


def ticks(engine: Engine, seconds: float, period: float) -> dict:
    return {'period_ms': round(1e3 * period, 2), **measure(engine, STEPS, 10_000, seconds, period)}


def difference(engine: Engine, first: list[np.ndarray]) -> dict:
    found = futures(engine)
    if not first:
        first.append(found)
    return {'difference_rms': float(np.sqrt(np.square(found - first[0]).mean() / np.square(first[0]).mean()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--preset', default='base')
    parser.add_argument('--ways', nargs='*', default=['in place', 'gathered'], choices=WAYS)
    parser.add_argument('--candidates', type=int, nargs='*', default=[], help='plans that are imagined in one batch')
    parser.add_argument('--seconds', type=float, default=4.0, help='of each series of ticks')
    parser.add_argument('--budget', type=float, default=120.0, help='s, of all')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, results, first = time.monotonic() + options.budget, Results(options.json), []
    for way in options.ways:
        if way != options.ways[0] and time.monotonic() + WAY > end:
            results.fail(way, 'not begun: the budget was spent')
            continue
        try:
            run(way, options, results, first)
        except Exception as error:
            results.fail(way, f'{type(error).__name__}: {error}')
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(json.dumps(results.found['failed']))
    return 1 if results.found['failed'] else 0


if __name__ == '__main__':
    raise SystemExit(main())

"""Batches of sessions on a GPU: whether CUDA graphs, eager batches and single calls agree, and what a batch costs.

    python benchmarks/batching_gpu.py --presets tiny small base --json benchmarks/results/batching_h100.json

Random weights. Differences are the largest of any session, relative to the largest absolute value of that output; times
are medians of whole units (including gathering the batch and waiting for the device), in ms, with graphs and without.
Without a GPU there are no graphs to compare, and the same comparison runs on the CPU.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from result_file import provenance, write_result
import torch

from worldmodel_ros.engine.backends.networks import random_model
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.network_calls import Boundary, Calls, Work, run, run_unit
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.session import Session
from worldmodel_ros.kernels.pages import Precision

TOLERANCE = {Precision.FP32: 2e-3, Precision.BF16: 5e-2}  # relative; convolutions on a GPU round to TF32
RUNS = 15


def tick(session: Session, frame: np.ndarray, steps: int) -> Calls:
    yield Boundary('observe')
    yield from session.observing(frame, np.full(session.spec.actions, 0.1, np.float32))
    plan = yield from session.planning(session.spec.goals[0])
    return plan, (yield from session.imagining(np.zeros_like(plan), steps))


def ticks(engine: Engine, sessions: Sequence[Session], images: np.ndarray, together: bool) -> list[dict]:
    """Run a tick of each session, every other one of a single step: together in mixed batches, or one by one."""
    backend = engine.backend
    calls = [tick(session, image, 2 - index % 2) for index, (session, image) in enumerate(zip(sessions, images))]
    if not together:
        results = [run(each, backend) for each in calls]
    else:
        works = [Work(each) for each in calls]
        while open_works := [work for work in works if work.boundary]:
            for error in run_unit(open_works, backend):
                if error:
                    raise error
        results = [work.result for work in works]
    return [{'plan': plan, 'latents': backend.host(future.latents), 'risk': future.collision_risk}
            for plan, future in results]


def difference(ours: list[dict], theirs: list[dict]) -> float:
    """Return the largest relative difference of any output of any session."""
    return max(float(np.abs(a[name] - b[name]).max() / (np.abs(b[name]).max() + 1e-6))
               for a, b in zip(ours, theirs) for name in a)


def agreement(engines: dict[str, Engine], size: int) -> dict[str, float]:
    """Compare graphs and single calls with eager batches, for sessions of different ages, with young and full windows."""
    spec = next(iter(engines.values())).spec
    rng = np.random.default_rng(size)
    images = rng.integers(0, 256, (spec.window_frames + 4, size, *spec.image_size, 3), dtype=np.uint8)
    sessions = {name: [engine.open_session(seed) for seed in range(size)] for name, engine in engines.items()}
    worst: dict[str, float] = {}
    for number, frames in enumerate(images):
        # The second half of the sessions begins later.
        some = slice(None) if number >= 2 else slice((size + 1) // 2)
        answers = {name: ticks(engine, sessions[name][some], frames[some], together=name != 'single')
                   for name, engine in engines.items()}
        for name in answers.keys() - {'eager'}:
            worst[name] = max(worst.get(name, 0.0), difference(answers[name], answers['eager']))
    return worst


def unit_times(engine: Engine, size: int) -> dict[str, float]:
    """Return the median ms of each unit of a tick, and of a branch's commit and images, with full windows."""
    spec = engine.spec
    sessions = [engine.open_session(seed) for seed in range(size)]
    frame = np.random.default_rng(0).integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
    actions = np.zeros((spec.chunk_frames + 1, spec.actions), np.float32)
    taken: dict[str, list[float]] = {}
    for number in range(spec.window_frames + RUNS):
        for works in ([Work(tick(session, frame, 2)) for session in sessions],
                      [Work(session.branching(actions, 1)) for session in sessions]
                      if number >= spec.window_frames else []):
            while works and works[0].boundary:
                name, start = works[0].boundary.unit, time.perf_counter()
                for error in run_unit(works, engine.backend):
                    if error:
                        raise error
                engine.backend.settle()
                if number > spec.window_frames + 1:
                    taken.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
    return {name: round(float(np.median(times)), 3) for name, times in taken.items()}


def measure(preset: str, precision: Precision, sizes: Sequence[int]) -> dict:
    on_gpu = torch.cuda.is_available()
    model = random_model(preset)
    ways = {'eager': False, 'single': False} | ({'graphs': True} if on_gpu else {})
    # The engines share one model, whose conversion sets the precision of all: the last one's.
    engines = {name: Engine(TorchBackend(model, precision=precision, graphs=graphs), Path(preset), max(sizes) + 1)
               for name, graphs in ways.items()}
    rows, worst = [], 0.0
    for size in sizes:
        row = {'batch': size, 'relative_difference_from_eager': agreement(engines, size)}
        worst = max(worst, *row['relative_difference_from_eager'].values())
        row |= {f'{name}_ms': unit_times(engines[name], size) for name in ways if name != 'single'}
        rows.append(row)
        print(json.dumps({'preset': preset, 'precision': precision.value, **row}), file=sys.stderr, flush=True)
    return {'preset': preset, 'precision': precision.value, 'rows': rows, 'worst_difference': worst,
            'agrees': worst <= TOLERANCE[precision]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--presets', nargs='+', default=['tiny', 'small', 'base'])
    parser.add_argument('--precisions', nargs='+', default=['fp32', 'bf16'])
    parser.add_argument('--sizes', type=int, nargs='+', default=[1, 3, 8])
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    result = {**provenance(), 'weights': 'random', 'measured': []}
    for preset in options.presets:
        for precision in map(Precision, options.precisions):
            try:
                result['measured'].append(measure(preset, precision, options.sizes))
            except Exception as error:  # keep measuring the others
                result['measured'].append({'preset': preset, 'precision': precision.value, 'agrees': False,
                                           'error': f'{type(error).__name__}: {error}'})
                print(f'{preset} {precision.value}: {type(error).__name__}: {error}', file=sys.stderr)
            write_result(result, options.json)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    agrees = all(each['agrees'] for each in result['measured'])
    print(json.dumps({'agrees': agrees, 'worst': {f'{each["preset"]} {each["precision"]}': each.get('worst_difference')
                                                  for each in result['measured']}}, indent=1))
    return 0 if agrees else 1


if __name__ == '__main__':
    raise SystemExit(main())

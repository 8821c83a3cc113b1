"""Whether a GPU's ticks, queued, captured, compiled, and with questions in the background, equal those of plain calls.

    python benchmarks/tick_agreement.py --presets tiny base --json benchmarks/results/tick_agreement_<gpu>.json

Random weights. The reference is the same network in the same precision, run eagerly call by call. Differences are the
largest, relative to the largest absolute value. Questions are asked while ticks go on, one unit at a time next to each
tick, repeatedly; their answers must be the same as when nothing else runs.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from result_file import provenance, write_result
import torch

from worldmodel_ros.engine.backends.networks import random_model
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.session import Future, Session
from worldmodel_ros.kernels.pages import Precision

TOLERANCE = {Precision.FP32: 2e-3, Precision.BF16: 5e-2}  # relative; convolutions on a GPU round to TF32
LAST = 6  # ticks of an episode whose answers are compared


def engine_of(preset: str, precision: Precision, **options: bool) -> Engine:
    return Engine(TorchBackend(random_model(preset), precision=precision, **options), Path(preset), sessions=2)


def inputs(spec, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, *spec.image_size, 3), dtype=np.uint8), np.full(spec.actions, 0.1, np.float32)


def tick(session: Session, frame: np.ndarray, executed: np.ndarray, steps: int) -> Future:
    session.observe(frame, executed)
    return session.look_ahead(session.spec.goals[0], steps).future()


def drive(engine: Engine) -> list[dict[str, np.ndarray]]:
    """Return answers of the last ticks of an episode over a window that fills and rolls."""
    spec, host, answers = engine.spec, engine.backend.host, []
    frames, executed = inputs(spec, spec.window_frames + LAST)
    session = engine.open_session(seed=1)
    for count, frame in enumerate(frames):
        future = tick(session, frame, executed, 1 + count % 2)
        answers.append({'plan': future.actions, 'latents': host(future.latents), 'risk': future.collision_risk})
    return answers[:2] + answers[-LAST:]


def difference(ours: list[dict], theirs: list[dict]) -> float:
    return max(float(np.abs(a[name] - b[name]).max() / (np.abs(b[name]).max() + 1e-6))
               for a, b in zip(ours, theirs) for name in a)


def question(session: Session, meanwhile=None) -> Future:
    spec = session.spec
    units = session.what_if(np.full((2 * spec.chunk_frames + 1, spec.actions), 0.2, np.float32))
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value
        if meanwhile:
            meanwhile()


def beside(engine: Engine, repeats: int) -> dict:
    """Compare questions next to ticks with questions alone, from the same moments; and the ticks' own results."""
    spec, host = engine.spec, engine.backend.host
    frames, executed = inputs(spec, spec.window_frames)
    alone, busy = (engine.open_session(seed=1) for _ in range(2))
    worst, overtaken, latencies = 0.0, 0, []
    for frame in frames:
        for session in (alone, busy):
            tick(session, frame, executed, 2)

    def meanwhile() -> None:
        nonlocal overtaken
        start = time.perf_counter()
        futures.append(tick(busy, frames[len(futures) % len(frames)], executed, 2))
        latencies.append(time.perf_counter() - start)
        overtaken += busy.busy
    for _ in range(repeats):
        futures: list[Future] = []
        expected, found = question(alone), question(busy, meanwhile)
        pairs = [(found.latents, expected.latents), (found.collision_risk, expected.collision_risk)]
        for index, future in enumerate(futures):  # the other session catches up, with nothing else running
            theirs = tick(alone, frames[index % len(frames)], executed, 2)
            pairs += [(host(future.latents), host(theirs.latents)), (future.actions, theirs.actions)]
        worst = max(worst, *(float(np.abs(a - b).max() / (np.abs(b).max() + 1e-6)) for a, b in pairs))
    return {'questions': repeats, 'difference': worst, 'ticks_that_ended_before_the_unit': overtaken,
            'tick_ms_p50': round(1e3 * float(np.median(latencies)), 3),
            'tick_ms_p99': round(1e3 * float(np.quantile(latencies, 0.99)), 3)}


def rows(presets: list[str], repeats: int) -> Iterator[dict]:
    """Yield, for each preset, precision and way of running it, the difference from plain calls, or the error."""
    on_gpu = torch.cuda.is_available()
    ways = {'graphs': {}, 'compiled': {'compiled': True}} if on_gpu else {'again': {}}
    for preset in presets:
        for precision in (Precision.FP32, Precision.BF16) if on_gpu else (Precision.FP32,):
            reference = drive(engine_of(preset, precision, graphs=False))
            for way, how in ways.items():
                row = {'preset': preset, 'precision': precision.value, 'way': way}
                try:
                    engine = engine_of(preset, precision, **how)
                    row['difference'] = difference(drive(engine), reference)
                    with engine.backend.urgent():  # as on a node's thread
                        row['beside'] = beside(engine, repeats)
                    row['agrees'] = max(row['difference'], row['beside']['difference']) <= TOLERANCE[precision]
                except Exception as error:  # keep measuring the other rows
                    row |= {'error': f'{type(error).__name__}: {error}', 'agrees': False}
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--presets', nargs='*', default=['tiny', 'base'])
    parser.add_argument('--repeats', type=int, default=20, help='questions next to ticks')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    result = {**provenance(), 'rows': []}
    for row in rows(options.presets, options.repeats):
        result['rows'].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        write_result(result, options.json)
    print(json.dumps(result, indent=1))
    return 0 if all(row['agrees'] for row in result['rows']) else 1


if __name__ == '__main__':
    raise SystemExit(main())

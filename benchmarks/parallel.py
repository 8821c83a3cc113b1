"""A model on several GPUs: whether its answers equal those of one GPU, and the cost of losing a GPU's process.

    python benchmarks/parallel.py --json benchmarks/results/parallel_h200x4.json

Random weights. One row for each way to divide the model: the distance of plans and imagined latents from those of
one GPU, relative to their root mean square, next to the distance of one GPU's bfloat16 answer from its FP8 one, as a
measure of rounding; the time to start. Then, with the first way, one process is killed and another
stopped while a robot ticks: from the fault to the first tick that reports it, to all processes being back, and the
duration of the tick that restored the session. ``benchmarks/tick.py --gpus`` has the times of ticks.
"""
from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from result_file import provenance, write_result
import torch

from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.distributed.session import RestoringSession
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import load, load_random
from worldmodel_ros.engine.session import Session

FAULTS = {'killed': signal.SIGKILL, 'stopped': signal.SIGSTOP}
PART_S = 150.0  # after which a part is given up, and the run with it
RATE_HZ = 20.0  # of ticks while a process is lost


def opened(options: argparse.Namespace, backend: str, **several: Any) -> Engine:
    if Path(options.model).is_dir():
        return load(options.model, backend, sessions=2, **several)
    return load_random(options.model, backend, sessions=2, **several)


def frames(spec, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *spec.image_size, 3), dtype=np.uint8)


def answers(engine: Engine, count: int) -> dict[str, np.ndarray]:
    """Return plan and latents after ``count`` frames, whether or not the first slabs have left the window."""
    session = engine.open_session()
    for frame in frames(engine.spec, count):
        observe(session, frame)
    actions = np.tile(np.float32([[0.3, 0.5]]), (engine.spec.chunk_frames, 1))
    return {'plan': session.plan(engine.spec.goals[0]), 'latents': session.imagine(actions).latents}


def observe(session: Session, frame: np.ndarray) -> None:
    session.observe(frame, np.full(session.spec.actions, 0.1, np.float32))


def distances(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.sqrt(np.mean((found[name] - right[name]) ** 2) / np.mean(right[name] ** 2)))
            for name in right}


def fault(engine: Engine, session: RestoringSession, number: int) -> dict[str, float]:
    """Send a signal to a process while a robot ticks; return seconds from the fault."""
    images = frames(engine.spec, 8)
    backend, epoch = engine.backend, engine.backend.epoch
    os.kill(backend.processes.pids[-1], number)
    start, found = time.monotonic(), {}
    for tick in range(int(PART_S * RATE_HZ)):
        begun = time.monotonic()
        try:
            observe(session, images[tick % len(images)])
            observed = time.monotonic()
            session.imagine(np.tile(session.plan(engine.spec.goals[0])[:1], (engine.spec.chunk_frames, 1)))
            if backend.epoch > epoch:
                return found | {'to_answers_s': round(time.monotonic() - start, 3),
                                'restoring_observe_s': round(observed - begun, 3)}
        except RankFailure as failure:
            found = found or {'reason': str(failure), 'to_notice_s': round(time.monotonic() - start, 3)}
        time.sleep(max(0.0, begun + 1.0 / RATE_HZ - time.monotonic()))
    return found | {'error': 'the processes did not come back'}


def guarded(rows: list[dict], row: dict, work: Any, save: Any) -> None:
    """Run a part such that its failure, or a hang, does not lose the others' results."""
    signal.alarm(int(PART_S))  # see ``main``
    try:
        row |= work()
    except Exception as error:
        row['error'] = f'{type(error).__name__}: {error}'[:500]
    signal.alarm(0)
    rows.append(row)
    print(row, flush=True)
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='robot_3b_4k', help='preset, or folder of weights; with tiles')
    parser.add_argument('--backend', default='torch-fp8')
    parser.add_argument('--gpus', type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument('--parallel', nargs='*', default=['sequence', 'sequence-fp8', 'tensor'])
    parser.add_argument('--frames', type=int, default=24)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    # A part that takes too long ends this process and leaves all threads' stacks, also while one of them holds the GIL.
    # faulthandler's timer belongs to the engine (``supervisor.exit_after``).
    faulthandler.register(signal.SIGALRM, chain=True)
    result = {**provenance(),
              'model': options.model, 'backend': options.backend, 'gpus': options.gpus, 'frames': options.frames,
              'rows': []}

    def save() -> None:
        write_result(result, options.json)
    right = answers(opened(options, options.backend), options.frames)
    guarded(result['rows'], {'part': 'rounding', 'of': 'torch-bf16 on one GPU'},
            lambda: distances(answers(opened(options, 'torch-bf16'), options.frames), right), save)
    for kind in options.parallel:
        start = time.monotonic()
        try:
            engine = opened(options, options.backend, gpus=options.gpus, parallel=kind)
        except Exception as error:
            failed = {'part': 'agreement', 'parallel': kind, 'error': f'{type(error).__name__}: {error}'[:500]}
            result['rows'].append(failed)
            save()
            continue
        row = {'part': 'agreement', 'parallel': kind, 'start_s': round(time.monotonic() - start, 1)}
        guarded(result['rows'], row, lambda: distances(answers(engine, options.frames), right), save)
        if kind == options.parallel[0]:
            session = engine.open_session()
            for frame in frames(engine.spec, options.frames):
                observe(session, frame)
            for name, number in FAULTS.items():
                guarded(result['rows'], {'part': 'fault', 'parallel': kind, 'process': name},
                        lambda: fault(engine, session, number), save)
        engine.close()


if __name__ == '__main__':
    main()

"""Compares the back ends on this machine: time of each part of a tick, and what each does to the model's quality.

    python benchmarks/engines.py --json benchmarks/results/engines_<machine>.json

Times are paced at the model's rate (10 Hz by default), as on a robot, because a processor that idles between ticks is
slower than one that never does. Quality is the PSNR of predicted chunks on freshly simulated episodes, while the robot
moves, and the difference of the plans from PyTorch's.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.engine import load
from worldmodel_ros.evaluate.drive.pictures import MOVING_V, MOVING_W, psnr
from worldmodel_ros.sim.rollout import collect

CONFIGURATIONS = (('torch', 1), ('torch', 2), ('onnx', 1), ('onnx', 2), ('onnx-int8', 1), ('onnx-int8', 2))
FIRST_SEED = 3_000_000


def timed(engine, episode: dict, ticks: int, period: float) -> dict:
    """Return milliseconds of a two-step tick, from a frame at hand to its checked plan, and of decoding, paced."""
    session, totals, decodes = engine.open_session(), [], []
    due = time.perf_counter()
    for tick in range(ticks):
        frame = tick % len(episode['frames'])
        start = time.perf_counter()
        session.observe(episode['frames'][frame], episode['actions'][frame])
        future = session.imagine(session.plan('red'))
        totals.append(time.perf_counter() - start)
        session.decode(future)
        decodes.append(session.timings['decode'])
        due += period
        time.sleep(max(0.0, due - time.perf_counter()))
    ms = np.array(totals[5:]) * 1e3
    return {'tick_ms': {'p50': round(float(np.median(ms)), 2), 'p99': round(float(np.quantile(ms, 0.99)), 2),
                        'max': round(float(ms.max()), 2)},
            'decode_ms_p50': round(float(np.median(decodes)) * 1e3, 2)}


def quality(engine, episodes: list[dict], every: int) -> dict:
    """Return the mean PSNR (dB) of two-step and one-step chunks, that of copy-last-frame, and all plans."""
    scores: dict[str, list[float]] = {'two_step': [], 'one_step': [], 'copy_last': []}
    plans = []
    ahead = engine.spec.chunk_frames
    for episode in episodes:
        session = engine.open_session()
        for t in range(len(episode['frames']) - ahead):
            session.observe(episode['frames'][t], episode['actions'][t])
            actions = episode['actions'][t + 1:t + 1 + ahead]
            if t % every or not (np.abs(actions) > (MOVING_V, MOVING_W)).any():
                continue
            plans.append(session.plan('green'))
            truth = episode['frames'][t + 1:t + 1 + ahead]
            for name, steps in (('two_step', 2), ('one_step', 1)):
                frames = session.decode(session.imagine(actions, steps))
                scores[name] += [psnr(a, b) for a, b in zip(frames, truth)]
            scores['copy_last'] += [psnr(episode['frames'][t], b) for b in truth]
    return {'psnr_db': {name: round(float(np.mean(values)), 3) for name, values in scores.items()},
            'chunks': len(plans), 'plans': np.array(plans)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--episodes', type=int, default=8)
    parser.add_argument('--ticks', type=int, default=300)
    parser.add_argument('--rate', type=float, default=10.0, help='ticks per second while timing; 0 runs flat out')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + options.episodes)
    arrays = collect(seeds, 60, workers=1)
    episodes = [{name: np.array(arrays[name][i]) for name in ('frames', 'actions')} for i in range(len(seeds))]
    rows, reference = [], None
    for backend, threads in CONFIGURATIONS:
        engine = load(options.model, backend, threads)
        engine.warm_up()
        row = {'backend': engine.backend.name, 'threads': threads,
               **timed(engine, episodes[0], options.ticks, 1.0 / options.rate if options.rate else 0.0)}
        if threads == 1:
            measured = quality(engine, episodes, every=5)
            plans = measured.pop('plans')
            reference = plans if reference is None else reference
            row |= measured | {'plan_difference_mean': [round(float(x), 4) for x in np.abs(plans - reference).mean((0, 1))]}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    result = {**provenance(),
              'model': options.model, 'rate_hz': options.rate, 'rows': rows}
    write_result(result, options.json, show=True)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

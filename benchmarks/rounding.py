"""
How far the plans of one session differ between computations: another engine, a store, larger batches.

    python benchmarks/rounding.py --json benchmarks/results/rounding_<machine>.json

Sessions of random weights take in the same frames: alone; in a second engine with the same weights, on the same thread and
on another one; with the session stored, closed and read back before each frame; and in batches with others. Only repeating
the first and going through the store must be equal to the bit on every device: a batch of another size sums in another
order, and on a GPU two engines need not run the same kernels.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.residency import Difference, plans_of_a_batch
from benchmarks.result_file import provenance, write_result
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.session_store import SessionLog
from worldmodel_ros.model.presets import Preset

Frames = list[tuple[np.ndarray, np.ndarray]]


def frames_of(spec: Preset, seed: int, ticks: int) -> Frames:
    """Return frames and executed actions of noise."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8),
             rng.uniform(-0.2, 0.5, spec.actions).astype(np.float32)) for _ in range(ticks)]


def plans_of(engine: Engine, together: Sequence[Frames], stored: bool = False) -> list[np.ndarray]:
    """Return the plans of the first of some sessions, which take in their frames in one batch each; ``stored``: they are
    stored, closed and read back before each frame but the first."""
    sessions, plans, store = [engine.open_session() for _ in together], [], HostStore()
    logs = [SessionLog(store, f'session{number}', 1) for number in range(len(together))]
    for inputs in zip(*together):
        if stored and plans:
            sessions = [_by_way_of_a_store(engine, session, log) for session, log in zip(sessions, logs)]
        plans.append(np.array(plans_of_a_batch(engine, [(session, *each) for session, each in zip(sessions, inputs)])[0]))
    for session in sessions:
        session.close()
    return plans


def _by_way_of_a_store(engine: Engine, session: Session, log: SessionLog) -> Session:
    checkpoint = log.checkpoint(session.capture(), {})
    for _ in checkpoint.pieces():
        pass
    manifest = checkpoint.write()
    session.close()
    session, stored = engine.open_session(), engine.stored_session(log.store)
    stored.read(manifest)
    for _ in stored.pieces():
        pass
    session.restore(stored)
    stored.close()
    return session


def row(preset: str, backend: str, ticks: int) -> dict:
    """Return the row of one preset on one back end."""
    first, second = (load_random(preset, backend, sessions=5) for _ in range(2))
    frames = [frames_of(first.spec, seed, ticks) for seed in range(4)]
    alone = plans_of(first, frames[:1])
    with ThreadPoolExecutor(1) as thread:
        by_another_thread = thread.submit(plans_of, second, frames[:1]).result()
    others = {'again': plans_of(first, frames[:1]), 'by_way_of_a_store': plans_of(first, frames[:1], stored=True),
              'second_engine': plans_of(second, frames[:1]), 'second_engine_other_thread': by_another_thread,
              'batch_of_2': plans_of(first, frames[:2]), 'batch_of_4': plans_of(first, frames)}
    found = {'preset': preset, 'backend': backend, 'largest_in_a_plan': float(max(np.abs(plan).max() for plan in alone))}
    for name, plans in others.items():
        difference = Difference()
        for plan, other in zip(alone, plans, strict=True):
            difference.add(plan, other)
        found[name] = difference.to_dict()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--rows', nargs='+', metavar='PRESET/BACKEND',
                        default=['tiny/torch', 'tiny/torch-bf16', 'tiny/torch-compiled', 'small/torch-bf16', 'base/torch-bf16'])
    parser.add_argument('--ticks', type=int, default=4)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    result = {**provenance(), 'ticks': options.ticks, 'rows': []}
    for each in options.rows:
        result['rows'].append(row(*each.split('/'), options.ticks))
        print(result['rows'][-1], flush=True)
        write_result(result, options.json)
    return int(any(row[name]['differ'] for row in result['rows'] for name in ('again', 'by_way_of_a_store')))


if __name__ == '__main__':
    sys.exit(main())

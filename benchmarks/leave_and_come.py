"""
The cost for a session to come from a store, tick once and leave again, part by part; and what it delays meanwhile.

    python benchmarks/leave_and_come.py --model base --random-weights --rounds 5 --json FILE

A real session of a real model, whose window is full. *Come*: ``read`` (from the store, checked), ``room`` (get its pages),
``fill`` (write them), ``restore``. *Leave*: ``capture``, ``copy`` (from its pages), ``write``. No other session has its slabs:
all of them are read. Meanwhile a thread that sleeps 0.5 ms at a time reports by how much it was late: because of the GIL and,
where cores are few, because of the machine. On a GPU each part ends when the device has done it.
"""
from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.result_file import product_ms, provenance, write_result
from worldmodel_ros import realtime
from worldmodel_ros.cache.stores.host import HostStore, PinnedMemory
from worldmodel_ros.engine import load
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.session_store import Manifest, SessionLog, StoredSession

NAP = 0.0005       # s
MODELS = {False: load, True: load_random}


class Watch:
    """Times parts, and how late a thread wakes meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.late: dict[str, list[float]] = defaultdict(list)  # the latest wake-up during each
        self._part, self._latest, self._over = '', 0.0, False
        self._thread = threading.Thread(target=self._nap)
        self._thread.start()

    def _nap(self) -> None:
        while not self._over:
            begun = time.perf_counter()
            time.sleep(NAP)
            if self._part:
                self._latest = max(self._latest, time.perf_counter() - begun - NAP)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of the block."""
        self._latest, self._part, begun = 0.0, name, time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name].append(time.perf_counter() - begun)
        time.sleep(2 * NAP)  # so that a delayed thread reports
        self._part = ''
        self.late[name].append(self._latest)

    def close(self) -> None:
        """Stop the thread."""
        self._over = True
        self._thread.join()

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the median and maximum of each part and of the lateness meanwhile, ms."""
        def of(values: list[float]) -> list[float]:
            return [round(float(np.median(values)) * 1e3, 2), round(max(values) * 1e3, 2)]
        return {name: {'ms': of(times), 'late_ms': of(self.late[name])} for name, times in self.seconds.items()}


def come_and_leave(engine, store, rounds: int) -> dict:
    """Return the row of a store."""
    rng = np.random.default_rng(0)

    def tick(session) -> None:
        session.observe(rng.integers(0, 256, (*engine.spec.image_size, 3), dtype=np.uint8),
                        np.zeros(engine.spec.actions, np.float32))

    def leave(session, watch: Watch) -> Manifest:
        with watch.part('leave: capture'):
            checkpoint = log.checkpoint(session.capture(), {})
        with watch.part('leave: copy'):
            for _ in checkpoint.pieces():
                pass
        with watch.part('leave: write'):
            manifest = checkpoint.write()
        session.close()
        return manifest
    log = SessionLog(store, 'robot', 1)
    session = engine.open_session()
    for _ in range(engine.spec.window_frames + 1):
        tick(session)
    first = Watch()
    manifest = leave(session, first)  # it stores everything, unlike later rounds
    first.close()
    watch, stored = Watch(), []
    for _ in range(rounds):
        before = log.nbytes
        session, coming = engine.open_session(), StoredSession(store, engine.spec, engine.fingerprint, engine.memory)
        with watch.part('come: read'):
            coming.read(manifest)
        with watch.part('come: room'):
            for _ in coming.pieces():
                pass
        with watch.part('come: fill'):
            coming.settle()
        with watch.part('come: restore'):
            session.restore(coming)
        log.came_back(manifest, coming.uses)
        coming.close()
        tick(session)
        manifest = leave(session, watch)
        stored.append(log.nbytes - before)
    watch.close()
    totals = {way: sum(np.array(times) for name, times in watch.seconds.items() if name.startswith(way))
              for way in ('come', 'leave')}
    return {'session_mb': round(manifest.nbytes / 1e6, 1), 'slabs': len(manifest.slabs), 'rounds': rounds,
            'stored_mb_by_leaving': round(max(stored) / 1e6, 1), 'parts': watch.summary(),
            **{f'{way}_ms': [round(float(np.median(total)) * 1e3, 1), round(float(total.max()) * 1e3, 1)]
               for way, total in totals.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--random-weights', action='store_true', help='a preset with random weights')
    parser.add_argument('--backend', default='torch')
    parser.add_argument('--stores', nargs='*', choices=('host', 'pinned'), default=['host'])
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    sys.setswitchinterval(realtime.SWITCH_INTERVAL)  # as in a service
    engine = MODELS[options.random_weights](options.model, options.backend, sessions=2)
    rows = []
    for kind in options.stores:
        row = come_and_leave(engine, HostStore(PinnedMemory(2**30) if kind == 'pinned' else None), options.rounds)
        rows.append({'store': kind, **row, 'load_average': [round(load, 1) for load in os.getloadavg()[:2]]})
        print(rows[-1], flush=True)
    write_result({**provenance(), 'product_ms': round(product_ms(), 2), 'rows': rows}, options.json)


if __name__ == '__main__':
    main()

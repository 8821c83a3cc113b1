"""
How long a robot that reconnects waits for its first chunk, from each tier of memory; and the cost of sharing a scene.

    python benchmarks/resume.py --times 200 --json benchmarks/results/resume_tiny_<machine>.json

Real sessions of a real model: 20 frames are observed, stored, and read back into another session, which then takes in a frame
and imagines a chunk in two steps. In turn with that, a session that never left does the same tick: the cost of a resume is the
difference. ``resident``: another session of the engine still has the pages. Files are read from the disk: their pages in the
system's cache are dropped before. Times are wall-clock; ``cpu_ms`` and ``tick_cpu_ms`` are CPU times of the
process, which depend less on other load.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.result_file import provenance, write_result
from worldmodel_ros.cache.slab_index import SlabIndex
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.cache.stores.measured import MeasuredStore
from worldmodel_ros.cache.stores.objects import ObjectStore
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import SessionLog, read_newest

FRAMES = 20  # more than a window


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return quantiles in ms."""
    return {f'p{level}': round(float(np.percentile(seconds, level)) * 1e3, 2) for level in (50, 99, 100)}


def drop_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob('*'):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Bench:
    """One engine, and a live session that is also resumed from stores."""

    def __init__(self, model: str, backend: str, sessions: int) -> None:
        self.engine = load(model, backend, sessions=sessions)
        self._rng = np.random.default_rng(0)
        self.live = self.drive(FRAMES)

    def frame(self) -> np.ndarray:
        """Return a random image."""
        return self._rng.integers(0, 256, (*self.engine.spec.image_size, 3), dtype=np.uint8)

    def drive(self, frames: int):
        """Return a session that has seen ``frames`` frames."""
        session = self.engine.open_session()
        for _ in range(frames):
            self.tick(session, False)
        return session

    def tick(self, session, imagine: bool = True) -> None:
        """Observe a frame and imagine a chunk."""
        session.observe(self.frame(), np.zeros(self.engine.spec.actions, np.float32))
        if imagine:
            session.imagine(session.plan(self.engine.spec.goals[0]), 2)

    def store(self, store, name: str = 'robot'):
        """Store the live session; return its manifest."""
        checkpoint = SessionLog(store, name, 1).checkpoint(self.live.capture(), {})
        for _ in checkpoint.pieces():
            pass
        return checkpoint.write()

    def resume(self, store, name: str = 'robot'):
        """Return a session read from a store."""
        session, stored = self.engine.open_session(), self.engine.stored_session(store)
        try:
            read_newest(store, name, stored)
            for _ in stored.pieces():
                pass
            session.restore(stored)
        finally:
            stored.close()
        return session

    def tier(self, store, times: int, folder: Path | None = None, resident: bool = False) -> dict:
        """Time ``times`` resumes from a store."""
        measured = MeasuredStore(store)
        start = time.perf_counter()
        manifest = self.store(measured)
        stored_in = time.perf_counter() - start
        resumed, first, ticks, cpu, tick_cpu = [], [], [], [], []
        for _ in range(times + 3):
            if not resident:
                self.engine.slab_index = SlabIndex()
            if folder:
                drop_cache(folder)
            start, processor = time.perf_counter(), time.process_time()
            session = self.resume(measured)
            there = time.perf_counter()
            self.tick(session)
            end = time.perf_counter()
            cpu.append(time.process_time() - processor)
            del session
            begun, processor = time.perf_counter(), time.process_time()
            self.tick(self.live)
            ticks.append(time.perf_counter() - begun)
            tick_cpu.append(time.process_time() - processor)
            manifest = self.store(measured)  # else the live session would no longer have the same slabs
            resumed.append(there - start)
            first.append(end - start)
        resumed, first, ticks, cpu, tick_cpu = (values[3:] for values in (resumed, first, ticks, cpu, tick_cpu))
        rate = measured.bandwidth
        return {'mb': round(manifest.nbytes / 1e6, 3), 'first_store_ms': round(stored_in * 1e3, 2),
                'resume_ms': quantiles(resumed), 'resume_and_first_chunk_ms': quantiles(first),
                'tick_ms': quantiles(ticks), 'cpu_ms': quantiles(cpu),
                'tick_cpu_ms': quantiles(tick_cpu),
                'read_mb_s': round(rate / 1e6, 1) if rate and not resident else None}

    def sharing(self, store, sessions: int) -> dict:
        """Return pages and time of sessions that are opened on one prefix."""
        self.store(store, 'scene')
        allocator = self.engine.memory.pool.allocator
        self.engine.slab_index = SlabIndex()
        before, opened, pages, took = allocator.usage().used, [], [], []
        for _ in range(sessions):
            start = time.perf_counter()
            opened.append(self.resume(store, 'scene'))
            took.append(time.perf_counter() - start)
            pages.append(allocator.usage().used - before)
        return {'sessions': sessions, 'pages_of_one': pages[0], 'pages_of_all': pages[-1],
                'ratio': round(pages[-1] / pages[0], 3), 'open_first_ms': round(took[0] * 1e3, 2),
                'open_others_ms': quantiles(took[1:])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--backend', default='onnx')
    parser.add_argument('--times', type=int, default=200)
    parser.add_argument('--disk', default='', help='folder on the disk to be measured (default: here)')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    bench = Bench(options.model, options.backend, sessions=18)
    result = {**provenance(), 'what': f'resume of a session of {options.model} on {bench.engine.backend.name}',
              'times': options.times, 'load_average_before': round(os.getloadavg()[0], 2), 'tiers': {}}
    with tempfile.TemporaryDirectory(dir=options.disk or '.') as disk, tempfile.TemporaryDirectory(dir='/dev/shm') as memory:
        disk, memory = Path(disk).resolve(), Path(memory)
        (disk / 'bucket').mkdir()
        kinds = {'resident': (HostStore(), None, True), 'host': (HostStore(), None, False),
                 'shared_memory': (FileStore(memory, durable=False), None, False),
                 'nvme': (FileStore(disk / 'nvme'), disk, False),
                 'object_store_of_files': (ObjectStore((disk / 'bucket').as_uri()), disk, False)}
        for name, (store, folder, resident) in kinds.items():
            result['tiers'][name] = bench.tier(store, options.times, folder, resident)
            print(name, result['tiers'][name], flush=True)
        result['sharing'] = bench.sharing(HostStore(), 16)
    result['load_average_after'] = round(os.getloadavg()[0], 2)
    write_result(result, options.json, show=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())

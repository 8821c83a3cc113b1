"""What the paged cache costs: a tick of a session of ten seconds and of ten minutes, forks, branches, patterns.

    python benchmarks/cache_tick.py --json benchmarks/results/cache_tick_cpu.json

The young and the old session tick in turn, so that both run under the same conditions; both have been advanced frame by
frame. The cache's own work is all that a tick does to it and asks of it, without the network: stage, write, publish, evict,
and the window for the commit and for the denoising. The large context is that of a preset with tiles of 4 x 8 x 8 tokens,
32 x 32 tokens a frame and 16 frames a chunk: ten chunks of history, with pages of a few bytes, since table cost ignores them.
"""
from __future__ import annotations

import argparse
import time
import timeit
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.patterns import page_lists, window
from worldmodel_ros.cache.pool import NumpyStorage, PagePool
from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.engine import load

YOUNG, OLD = 100, 6000  # frames at 10 Hz
BRANCHES = 16
LARGE, CHUNKS, CHUNK = TileLayout((4, 8, 8), (32, 32)), 10, 16


def quantiles(values: list[float], unit: float) -> dict[str, float]:
    scaled = np.array(values) * unit
    return {'p50': round(float(np.median(scaled)), 3), 'p99': round(float(np.quantile(scaled, 0.99)), 3)}


def whole_ticks(engine, ticks: int) -> dict:
    """Time the ticks of a young and an old session: observe, plan, imagine in two steps."""
    spec, rng = engine.spec, np.random.default_rng(0)
    scene = rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
    executed = np.zeros(spec.actions, np.float32)
    sessions = {YOUNG: engine.open_session(), OLD: engine.open_session()}
    for age, session in sessions.items():
        for frame in range(age):
            session.observe(np.roll(scene, frame, 1), executed)
    times: dict[int, list[float]] = {age: [] for age in sessions}
    for tick in range(ticks):
        for age, session in list(sessions.items())[::1 if tick % 2 else -1]:
            start = time.perf_counter()
            session.observe(np.roll(scene, age + tick, 1), executed)
            session.imagine(session.plan(spec.goals[0]))
            times[age].append(time.perf_counter() - start)
    return compared(times, 1e3, 'ms')


def cache_ticks(engine, ticks: int) -> dict:
    """Time the same ticks' work on the cache alone."""
    spec, memory = engine.spec, engine.memory
    frame = np.zeros((spec.depth, spec.heads, 1, spec.tokens, spec.head_dim), np.float32)
    caches, times = {age: memory.open() for age in (YOUNG, OLD)}, {YOUNG: [], OLD: []}

    def tick(cache: SequenceCache, newest: int) -> None:
        memory.window(cache, np.array([newest]), causal=True).bias()
        with cache.stage() as staged:
            staged.write(newest, frame, frame)
        memory.roll(cache, newest)
        memory.window(cache, newest + 1 + np.arange(spec.chunk_frames), causal=False).bias()
    for age, cache in caches.items():
        for newest in range(age):
            tick(cache, newest)
    moved = 0
    for number in range(ticks):
        for age, cache in list(caches.items())[::1 if number % 2 else -1]:
            before = {row[0]: row[4:] for row in cache.table.rows}
            start = time.perf_counter()
            tick(cache, age + number)
            times[age].append(time.perf_counter() - start)
            moved += sum(int((row[4:] != before[row[0]]).sum()) for row in cache.table.rows if row[0] in before)
    return compared(times, 1e6, 'us') | {'bytes_moved_by_rolling': moved * memory.pool.storage.page_bytes,
                                         'bytes_written_a_tick': 2 * frame.nbytes}


def compared(times: dict[int, list[float]], unit: float, name: str) -> dict:
    young, old = (quantiles(times[age], unit) for age in (YOUNG, OLD))
    # Ratios of adjacent ticks, so that background load is in both.
    ratio = np.median(np.array(times[OLD]) / np.array(times[YOUNG]))
    return {f'at_10_s_{name}': young, f'at_10_min_{name}': old, 'ratio_of_pairs_p50': round(float(ratio), 4)}


def branches() -> dict:
    """Measure a session of ten chunks of history, its forks, and the pages of branches that imagine a chunk each."""
    slabs = CHUNKS * CHUNK // LARGE.frames
    pool = PagePool.of('pages', NumpyStorage(LARGE, 1, 1, 1, 2 * slabs * LARGE.tiles + BRANCHES * CHUNK * LARGE.tiles))
    cache = SequenceCache(LARGE, [pool], slabs + CHUNK // LARGE.frames)
    chunk = np.zeros((1, 1, CHUNK, LARGE.tokens, 1), np.float32)
    for number in range(CHUNKS):
        with cache.stage() as staged:
            staged.write(number * CHUNK, chunk, chunk)
    session = pool.used_bytes
    seconds = timeit.repeat(cache.fork, number=100, repeat=30)
    forks = [cache.fork() for _ in range(BRANCHES)]
    forked = pool.used_bytes - session
    for fork in forks:
        with fork.stage() as staged:
            staged.write(CHUNKS * CHUNK, chunk, chunk, observed=False)
    queries = tuple(range(slabs - CHUNK // LARGE.frames, slabs))

    def neighbourhood() -> None:
        page_lists.cache_clear()
        page_lists(cache.table, LARGE, queries, window((3, 3, 3), shifted=True))
    return {'pages_of_the_context': slabs * LARGE.tiles, 'fork_us': quantiles(seconds, 1e4),
            'bytes_of_16_forks': forked, 'chunks_held_by_16_branches_of_a_chunk':
                (pool.used_bytes - session) / (session / CHUNKS),
            'lists_of_64_query_tiles_by_27_us': quantiles(timeit.repeat(neighbourhood, number=20, repeat=30), 1e6 / 20)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--backend', default='auto')
    parser.add_argument('--ticks', type=int, default=400)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    engine = load(options.model, options.backend)
    result = {**provenance(), 'backend': engine.backend.name, 'whole_tick': whole_ticks(engine, options.ticks),
              'cache_only': cache_ticks(engine, 5 * options.ticks), 'large_context': branches()}
    write_result(result, options.json, show=True)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

"""Predicts how long a store will take from its measured times."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise

import numpy as np

from .protocol import Blob, SlabStore

KEPT = 200           # batches whose times are kept
FEWEST = 5           # batches needed for a prediction
FRESH = 60.0         # s that a batch counts: a store that nothing is read from, since it was slow, is tried again
QUANTILE = 0.99
_SMALL = 64 * 1024   # bytes of a batch: up to this it measures latency, beyond it bandwidth


class MeasuredStore:
    """A ``SlabStore`` that measures how long reading from another store takes."""

    def __init__(self, store: SlabStore, clock: Callable[[], float] = time.monotonic):
        self._store, self._clock, self._lock = store, clock, threading.Lock()
        # When a batch was read, and s, of small ones; s per byte, of larger ones.
        self._latencies: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._rates: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def predicted(self, nbytes: int) -> float | None:
        """Return how long reading a batch of ``nbytes`` takes [s], by a high quantile of the batches of the last ``FRESH`` s;
        None if there are too few."""
        oldest = self._clock() - FRESH
        with self._lock:
            latencies, rates = ([took for at, took in times if at >= oldest] for times in (self._latencies, self._rates))
        if len(rates) < FEWEST:
            return None
        latency = float(np.quantile(latencies, QUANTILE)) if latencies else 0.0
        return latency + nbytes * float(np.quantile(rates, QUANTILE))

    @property
    def bandwidth(self) -> float | None:
        """Median bytes per second of larger batches; None if none was read."""
        with self._lock:
            return 1.0 / float(np.median([rate for _, rate in self._rates])) if self._rates else None

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        return self._store.put(items, create)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        start = time.perf_counter()
        promise = self._store.get(keys)

        def measure(done: Promise[list[memoryview]]) -> None:
            if done.exception():
                return
            seconds, nbytes = time.perf_counter() - start, sum(map(len, done.result()))
            with self._lock:
                if nbytes > _SMALL:
                    self._rates.append((self._clock(), seconds / nbytes))
                elif nbytes:
                    self._latencies.append((self._clock(), seconds))
        promise.add_done_callback(measure)
        return promise

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        return self._store.delete(keys)

    def list(self, prefix: str) -> Promise[list[str]]:
        return self._store.list(prefix)

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        return self._store.head(keys)

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        return self._store.held(keys)

    def close(self) -> None:
        self._store.close()

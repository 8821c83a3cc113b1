"""Predicts how long a store will take from its measured times."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future as Promise

import numpy as np

from .protocol import Blob, SlabStore

KEPT = 200           # batches whose times are kept
FEWEST = 5           # batches needed for a prediction
QUANTILE = 0.99
_SMALL = 64 * 1024   # bytes of a batch: up to this it measures latency, beyond it bandwidth


class MeasuredStore:
    """A ``SlabStore`` that measures how long reading from another store takes."""

    def __init__(self, store: SlabStore):
        self._store, self._lock = store, threading.Lock()
        self._latencies: deque[float] = deque(maxlen=KEPT)  # s, of small batches
        self._rates: deque[float] = deque(maxlen=KEPT)      # s per byte, of larger ones

    def predicted(self, nbytes: int) -> float | None:
        """Return how long reading a batch of ``nbytes`` takes [s], by a high quantile of measured batches; None if there are
        too few."""
        with self._lock:
            if len(self._rates) < FEWEST:
                return None
            latency = float(np.quantile(self._latencies, QUANTILE)) if self._latencies else 0.0
            return latency + nbytes * float(np.quantile(self._rates, QUANTILE))

    @property
    def bandwidth(self) -> float | None:
        """Median bytes per second of larger batches; None if none was read."""
        with self._lock:
            return 1.0 / float(np.median(self._rates)) if self._rates else None

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
                    self._rates.append(seconds / nbytes)
                elif nbytes:
                    self._latencies.append(seconds)
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

"""How fast a store has been, and so how long it will take."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future as Promise

import numpy as np

from .protocol import Blob, SlabStore

KEPT = 200           # batches that are remembered
FEWEST = 5           # before which nothing is predicted
QUANTILE = 0.99
_SMALL = 64 * 1024   # bytes of a batch, up to which it tells the latency; a larger one tells the bandwidth


class MeasuredStore:
    """A ``SlabStore`` that measures how long reading from another takes."""

    def __init__(self, store: SlabStore):
        self._store, self._lock = store, threading.Lock()
        self._latencies: deque[float] = deque(maxlen=KEPT)  # s, of small batches
        self._rates: deque[float] = deque(maxlen=KEPT)      # s a byte, of larger ones

    def predicted(self, nbytes: int) -> float | None:
        """Seconds that reading a batch of so many bytes takes, by a high quantile of those measured; None: too few
        have been."""
        with self._lock:
            if len(self._rates) < FEWEST:
                return None
            latency = float(np.quantile(self._latencies, QUANTILE)) if self._latencies else 0.0
            return latency + nbytes * float(np.quantile(self._rates, QUANTILE))

    @property
    def bandwidth(self) -> float | None:
        """Median bytes a second of larger batches; None: none was read."""
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

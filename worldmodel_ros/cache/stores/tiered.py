"""A hierarchy of stores: host memory in front of a disk, the disk in front of an object store."""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from typing import Any, TypeVar

from .host import HostStore
from .protocol import Blob, NotStored, SlabStore

Result = TypeVar('Result')


class TieredStore:
    """A ``SlabStore`` that has all blobs in each of ``lower``, the fastest first, and as many as fit ``capacity`` bytes in
    host memory.

    A blob is read from the first store that has it, and is then in host memory, too. When that is full, the session that
    is expected to tick last (``expect``) is evicted, sessions without an expected tick first. The first name of a key is
    its session. The last store, which others may share, decides ``create`` and ``list``.
    """

    def __init__(self, lower: Sequence[SlabStore], capacity: int, allocate: Callable[[int], memoryview] | None = None):
        """``allocate``: as for ``HostStore``."""
        if not lower or capacity < 0:
            raise ValueError('at least one store must be below the host\'s memory, which has a capacity of 0 or more')
        self._host, self._lower, self._capacity = HostStore(allocate), tuple(lower), capacity
        self._lock = threading.Lock()
        self._sizes: dict[str, dict[str, int]] = {}  # of blobs in host memory: session -> key -> bytes
        self._used = 0
        self._expected: dict[str, float] = {}
        self.hits = self.misses = 0  # blobs read from host memory, and from lower stores

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return self._used

    def expect(self, session: str, when: float) -> None:
        """Set when a session's next tick is expected: steady time in s; infinity forgets it."""
        with self._lock:
            if math.isinf(when):
                self._expected.pop(session, None)
            else:
                self._expected[session] = when

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        if create:
            return self._lower[-1].put(items, create=True)
        below = [store.put(items) for store in self._lower]
        self._keep(items)  # while they write
        return _all(below)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        found: dict[str, memoryview] = {}
        for key in keys:
            try:
                found[key], = self._host.get([key]).result()
            except NotStored:
                pass
        missing = [key for key in keys if key not in found]
        with self._lock:
            self.hits += len(found)
            self.misses += len(missing)
        promise: Promise[list[memoryview]] = Promise()

        def give() -> None:
            promise.set_result([found[key] for key in keys])

        def look(level: int) -> None:
            def looked(done: Promise[list[memoryview]]) -> None:
                try:
                    if isinstance(done.exception(), NotStored) and level + 1 < len(self._lower):
                        look(level + 1)
                        return
                    found.update(zip(missing, done.result()))
                    self._keep([(key, (blob,)) for key, blob in zip(missing, done.result())])
                    found.update(self._host.held(missing))  # a device may copy from there asynchronously
                except BaseException as error:  # nothing else would tell who waits
                    promise.set_exception(error)
                else:
                    give()
            self._lower[level].get(missing).add_done_callback(looked)
        if missing:
            look(0)
        else:
            give()
        return promise

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        with self._lock:
            for key in keys:
                self._forget(key)
        return _all([store.delete(keys) for store in self._lower])

    def list(self, prefix: str) -> Promise[list[str]]:
        return self._lower[-1].list(prefix)

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        return self._lower[-1].head(keys)

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        return self._host.held(keys)

    def close(self) -> None:
        for store in self._lower:
            store.close()

    def _keep(self, items: Sequence[tuple[str, Sequence[Blob]]]) -> None:
        nbytes = {key: sum(map(len, parts)) for key, parts in items}
        if sum(nbytes.values()) > self._capacity:
            return
        try:
            self._host.put(items).result()
        except MemoryError:
            return  # the stores below have them
        with self._lock:
            for key, size in nbytes.items():
                sizes = self._sizes.setdefault(_session(key), {})
                self._used += size - sizes.get(key, 0)
                sizes[key] = size
            arriving = set(map(_session, nbytes))
            while self._used > self._capacity:
                last = max(self._sizes, key=lambda session: (session not in arriving,
                                                             self._expected.get(session, math.inf)))
                for key in list(self._sizes[last]):
                    self._forget(key)

    def _forget(self, key: str) -> None:
        session = _session(key)
        sizes = self._sizes.get(session, {})
        if key in sizes:
            self._used -= sizes.pop(key)
            self._host.delete([key]).result()
        if not sizes:
            self._sizes.pop(session, None)


def _session(key: str) -> str:
    return key.partition('/')[0]


def _all(promises: Sequence[Promise[Any]]) -> Promise[None]:
    """Return a promise that is fulfilled when all are, or raises what one of them has raised."""
    whole: Promise[None] = Promise()
    left, lock = len(promises), threading.Lock()

    def ended(_: Promise[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            error = next(filter(None, (promise.exception() for promise in promises)), None)
            if error:
                whole.set_exception(error)
            else:
                whole.set_result(None)
    for promise in promises:
        promise.add_done_callback(ended)
    return whole

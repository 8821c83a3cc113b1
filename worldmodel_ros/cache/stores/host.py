"""Slabs in the memory of this process."""
from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from typing import TypeVar

import numpy as np

from .protocol import AlreadyStored, Blob, NotStored, check_key, joined

Result = TypeVar('Result')

_PART = 2**30  # bytes that are page-locked at a time
_STEP = 4096   # bytes, granularity of allocations


class PinnedMemory:
    """
    Page-locked host memory, which a GPU copies from and to asynchronously. Call it to allocate some, which is freed when
    nothing refers to it. Thread-safe.

    All of it is locked at the start, as locking takes the driver 20 ms for a slab of 16 MiB, which made ticks late. When it is
    full, or the driver has none, ordinary memory is returned.
    """

    def __init__(self, nbytes: int) -> None:
        """``nbytes``: to page-lock; the last part is rounded up to a power of two, as PyTorch does."""
        import torch
        self._parts: list[np.ndarray] = []
        try:
            while (left := nbytes - self.nbytes) > 0:
                size = min(_PART, 1 << (left - 1).bit_length())
                self._parts.append(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())
        except RuntimeError:  # no GPU, or the driver has none left
            pass
        self._free = [(part, 0, len(array)) for part, array in enumerate(self._parts)]  # from, to; in order
        self._returned: deque[tuple[int, int, int]] = deque()  # by finalizers, which may run while this thread has the lock
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(map(len, self._parts))

    def __call__(self, nbytes: int) -> memoryview:
        size = -(-max(nbytes, 1) // _STEP) * _STEP
        with self._lock:
            self._take_back()
            index = next((index for index, (_, begin, end) in enumerate(self._free) if end - begin >= size), None)
            if index is not None:
                part, begin, end = self._free[index]
                self._free[index:index + 1] = [(part, begin + size, end)] if begin + size < end else []
        if index is None:
            return memoryview(np.empty(nbytes, np.uint8))
        given = self._parts[part][begin:begin + nbytes]
        weakref.finalize(given, self._returned.append, (part, begin, begin + size)).atexit = False
        return memoryview(given)

    def _take_back(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        whole: list[tuple[int, int, int]] = []
        for part, begin, end in sorted(self._free):
            if whole and whole[-1][0] == part and whole[-1][2] == begin:
                part, begin, _ = whole.pop()
            whole.append((part, begin, end))
        self._free = whole


class HostStore:
    """A ``SlabStore`` in memory, which ends with the process. A put copies in the calling thread; a get copies nothing: it
    returns the store's own memory, read-only."""

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` returns memory for a blob of the given size in bytes, and frees it when nothing refers to it, such as
        ``PinnedMemory``; None: the interpreter's memory."""
        self._allocate = allocate
        self._blobs: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs."""
        with self._lock:
            return sum(map(len, self._blobs.values()))

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        for key, _ in items:
            check_key(key)
        blobs = {key: self._copied(parts) for key, parts in items}

        def keep() -> None:
            there = next((key for key in blobs if key in self._blobs), None)
            if create and there:
                raise AlreadyStored(f'{there} is there already')
            self._blobs |= blobs
        return self._done(keep)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        def find() -> list[memoryview]:
            missing = next((key for key in keys if key not in self._blobs), None)
            if missing:
                raise NotStored(f'{missing} is not there')
            return [self._blobs[key] for key in keys]
        return self._done(find)

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        def drop() -> None:
            for key in keys:
                self._blobs.pop(key, None)
        return self._done(drop)

    def list(self, prefix: str) -> Promise[list[str]]:
        check_key(prefix)
        return self._done(lambda: sorted(key for key in self._blobs if key.startswith(prefix + '/')))

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        return self._done(lambda: [len(self._blobs[key]) if key in self._blobs else None for key in keys])

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        with self._lock:
            return {key: self._blobs[key] for key in keys if key in self._blobs}

    def close(self) -> None:
        pass

    def _copied(self, parts: Sequence[Blob]) -> memoryview:
        return joined(parts, self._allocate(sum(map(len, parts))) if self._allocate else None)

    def _done(self, function: Callable[[], Result]) -> Promise[Result]:
        promise: Promise[Result] = Promise()
        try:
            with self._lock:
                result = function()
        except Exception as error:
            promise.set_exception(error)
        else:
            promise.set_result(result)
        return promise

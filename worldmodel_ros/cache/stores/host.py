"""Slabs in the memory of this process."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from typing import TypeVar

from .protocol import AlreadyStored, Blob, NotStored, check_key, joined

Result = TypeVar('Result')


def pinned(nbytes: int) -> memoryview:
    """
    Return page-locked memory of the host, which a GPU copies from and to by itself; where the driver has none left, ordinary
    memory. PyTorch keeps what is given back for the next one of that size, rounded up to a power of two.
    """
    import torch
    try:
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())
    except RuntimeError:
        return memoryview(bytearray(nbytes))


class HostStore:
    """A ``SlabStore`` that is as fast as a copy, and ends with the process. A put copies in the calling thread; a get
    copies nothing: what it gives is the store's own, and read-only."""

    def __init__(self, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate``: gives memory for a blob of so many bytes, which it takes back when nothing refers to it, such as
        ``pinned``; None: the interpreter's."""
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

"""The interface of slab stores, and the thread pool that makes them asynchronous."""
from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np

Blob = bytes | bytearray | memoryview
Result = TypeVar('Result')

_KEY = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,4}')


class StoreError(RuntimeError):
    """A store cannot do what it was asked for; the text says why."""


class NotStored(StoreError):
    """There is nothing under a key."""


class AlreadyStored(StoreError):
    """There is something already under a key that was to be created."""


class SlabStore(Protocol):
    """Blobs by key. Thread-safe and asynchronous: each call on a batch returns one promise.

    A key is one to five names, joined by ``/``; see ``check_key``. A put is atomic, even if the process or the machine
    dies, and visible to every reader once its promise is fulfilled. Nothing is ever changed in place. Promises raise
    StoreError.
    """

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        """Store blobs, each given in parts. An existing key keeps its blob, or gets an equal one; with ``create`` it raises
        AlreadyStored, so that exactly one of several concurrent puts succeeds."""

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        """Return the blobs. Raises NotStored if one is missing."""

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        """Delete blobs; a missing one is no error."""

    def list(self, prefix: str) -> Promise[list[str]]:
        """Return all keys that begin with the names of ``prefix``, sorted."""

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        """Return the size of each blob in bytes, None for a missing one."""

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        """Return, as ``get`` does, those of the blobs that are in this process's memory. Does not block."""

    def close(self) -> None:
        """Stop the store's threads; blobs stay, unless they are in the memory of this process."""


def check_key(key: str) -> None:
    """Raise ValueError for an invalid key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f'{key[:140]!r} is no key of a store: one to five names of a-z, A-Z, 0-9, ".", "_" and "-", at most '
                         '128 characters each, that begin with a letter or a digit, joined by "/"')


def joined(parts: Sequence[Blob], memory: memoryview | None = None) -> memoryview:
    """Concatenate the parts in ``memory``, by default the interpreter's, and return it read-only. Releases the GIL, which
    ``bytes.join`` holds while it copies anything but ``bytes``: 20 MB stopped other threads for some ms."""
    if memory is None:
        memory = memoryview(np.empty(sum(map(len, parts)), np.uint8))
    to, at = np.frombuffer(memory, np.uint8), 0
    for part in parts:
        to[at:at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return memory.toreadonly()


class Threads:
    """Runs a store's blocking calls, those of a batch in parallel."""

    def __init__(self, name: str, count: int):
        self._pool = ThreadPoolExecutor(count, name)

    def each(self, function: Callable[..., Result], items: Sequence[tuple], finish: Callable[[], None] | None = None
             ) -> Promise[list[Result]]:
        """Promise what ``function(*item)`` returns for each item, or the first exception, once all have ended. Unless one
        has raised, ``finish`` is then called before the promise is fulfilled."""
        promise: Promise[list[Result]] = Promise()
        results: list[Result | None] = [None] * len(items)
        errors: list[BaseException] = []
        left, counting = len(items), threading.Lock()

        def end() -> None:
            try:
                if errors:
                    raise errors[0]
                if finish:
                    finish()
            except BaseException as error:  # the promise must always be fulfilled
                promise.set_exception(error)
            else:
                promise.set_result(results)

        def run(index: int) -> None:
            nonlocal left
            try:
                results[index] = function(*items[index])
            except BaseException as error:
                errors.append(error)
            with counting:
                left -= 1
                last = left == 0
            if last:
                end()

        if not items:
            self._pool.submit(end)
        for index in range(len(items)):
            self._pool.submit(run, index)
        return promise

    def submit(self, function: Callable[..., Result], *arguments: object) -> Promise[Result]:
        """Promise the result of one call."""
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """End the threads after their submitted work."""
        self._pool.shutdown()

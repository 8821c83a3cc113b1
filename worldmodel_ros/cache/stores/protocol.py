"""What every store of slabs does, and the thread pool that makes it asynchronous."""
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
    """A store that cannot do what it was asked for; the text says why."""


class NotStored(StoreError):
    """There is nothing under a key."""


class AlreadyStored(StoreError):
    """There is something under a key that was to be made."""


class SlabStore(Protocol):
    """Blobs by key. From any thread; nothing waits but for what is promised, and a batch is one promise.

    A key is one to five names, joined by ``/``; see ``check_key``. What has been put is there as a whole or not at all,
    whenever the process or the machine ends, and once its promise is kept it is there for every reader. Nothing is
    ever changed in place. Promises raise StoreError.
    """

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        """Store blobs, each given in parts. A key that is there keeps its blob, or is replaced by an equal one;
        with ``create`` it raises AlreadyStored, for exactly one of those that put it at the same time does not."""

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        """The blobs. Raises NotStored if one is missing."""

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        """Forget blobs; what is not there is no error."""

    def list(self, prefix: str) -> Promise[list[str]]:
        """All keys that begin with the names of ``prefix``, sorted."""

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        """Bytes of each blob; None where there is none."""

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        """Those of the blobs that are in this process's memory, as ``get`` gives them. Does not wait."""

    def close(self) -> None:
        """End what it runs; what was put stays, unless it is in the memory of this process."""


def check_key(key: str) -> None:
    """Raise ValueError for what is no key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f'{key[:140]!r} is no key of a store: one to five names of a-z, A-Z, 0-9, ".", "_" and "-", at most '
                         '128 characters each, that begin with a letter or a digit, joined by "/"')


def joined(parts: Sequence[Blob], memory: memoryview | None = None) -> memoryview:
    """The parts one after the other in ``memory``, by default the interpreter's; read-only. Other threads run Python meanwhile,
    which those of ``bytes.join`` cannot while it copies what is no ``bytes``: 20 MB were some ms of each thread's time."""
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
        """Promise what ``function(*item)`` returns for each item, or the first exception, once all have ended. Then,
        unless one has raised, ``finish`` is called before the promise is kept."""
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
            except BaseException as error:  # somebody waits for the promise
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
        """Promise what one call returns."""
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """End the threads after what they were given."""
        self._pool.shutdown()

"""Prefetches the items of an iterator in a thread."""
from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar('T')
_END = object()
_PATIENCE = 0.1  # s, between two checks whether the generator was closed


def ahead(iterator: Iterator[T], items: int) -> Iterator[T]:
    """
    Yield the items of ``iterator``, computed in a thread up to ``items`` ahead; an exception is raised in its place in the
    sequence. The thread ends with the last item, or when the generator is closed.
    """
    ready: queue.Queue = queue.Queue(items)
    closed = threading.Event()

    def put(item: object) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_PATIENCE)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in iterator:
                if not put((item, None)):
                    return
        except BaseException as error:
            put((None, error))
        else:
            put((_END, None))

    thread = threading.Thread(target=run, name='reads ahead', daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        closed.set()
        thread.join()

"""Lets an iterator run ahead of who iterates, in a thread."""
from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar('T')
_END = object()
_PATIENCE = 0.1  # s, between two looks whether anybody still waits


def ahead(iterator: Iterator[T], items: int) -> Iterator[T]:
    """
    Yield what ``iterator`` yields, computed in a thread of its own up to ``items`` ahead; an exception is raised where it
    belongs. The thread ends with the last item, or when the generator is closed.
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

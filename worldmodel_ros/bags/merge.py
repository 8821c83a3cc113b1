"""Merges streams of messages by time, with only overlapping streams open."""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar('T')


class Stream(NamedTuple):
    """Messages ordered by time, none before ``start`` [ns]; opened when needed."""

    start: int
    open: Callable[[], Iterator]


def merge(streams: Iterable[Stream], time: Callable[[T], int]) -> Iterator[T]:
    """Yield the messages of all streams by time; at equal times, those of an earlier stream first."""
    waiting = sorted(enumerate(streams), key=lambda item: item[1].start, reverse=True)
    heap: list[tuple[int, int, T, Iterator[T]]] = []
    while heap or waiting:
        while waiting and (not heap or waiting[-1][1].start <= heap[0][0]):
            order, stream = waiting.pop()
            messages = stream.open()
            for message in messages:
                heapq.heappush(heap, (time(message), order, message, messages))
                break
        if not heap:
            continue
        _, order, message, messages = heap[0]
        yield message
        for following in messages:
            heapq.heapreplace(heap, (time(following), order, following, messages))
            break
        else:
            heapq.heappop(heap)

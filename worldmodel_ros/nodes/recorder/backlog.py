"""Queue of messages to write to disk, bounded in bytes: a slow disk costs messages, never memory."""
from __future__ import annotations

import threading
from collections import Counter, deque
from typing import NamedTuple


class Received(NamedTuple):
    """One serialised message and its time of receipt [ns, ROS time]."""

    topic: str
    time: int
    data: bytes


class Backlog:
    """A queue between the receiving and the writing thread. When full, it keeps the newest messages."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._waiting: deque[Received] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self.dropped: Counter[str] = Counter()  # by topic

    @property
    def bytes(self) -> int:
        """Bytes in the queue."""
        return self._bytes

    def put(self, message: Received) -> None:
        """Add a message, and drop the oldest ones if there is no room. Never blocks."""
        with self._changed:
            self._waiting.append(message)
            self._bytes += len(message.data)
            while self._bytes > self._max and len(self._waiting) > 1:
                oldest = self._waiting.popleft()
                self._bytes -= len(oldest.data)
                self.dropped[oldest.topic] += 1
            self._changed.notify()

    def get(self) -> Received | None:
        """Wait for the oldest message and return it; None if the backlog is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            message = self._waiting.popleft()
            self._bytes -= len(message.data)
            return message

    def close(self) -> None:
        """Let ``get`` return None once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

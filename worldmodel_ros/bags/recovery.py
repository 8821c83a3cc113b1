"""Base class of the readers of damaged storage files, which replace the readers of ``rosbags``."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

from rosbags.interfaces import Connection

from .problems import Problem
from .steps_back import StepsBack


class Unreadable(ValueError):
    """Nothing can be recovered from a file; the text says why, and what to do."""


class Recovered(ABC):
    """
    A damaged file, read as far as possible. ``problems`` say what is wrong with it.

    ``start_time`` is the time of the first message, and ``end_time`` that of the last one plus 1 ns, as in ``rosbags`` [ns].
    """

    def __init__(self) -> None:
        self.steps_back = StepsBack()
        self.connections: list[Connection] = []
        self.problems: list[Problem] = []
        self.start_time, self.end_time = 2 ** 63 - 1, 0

    @property
    def message_count(self) -> int:
        return sum(connection.msgcount for connection in self.connections)

    @abstractmethod
    def messages(self, connections: Collection[Connection]) -> Iterator[tuple[Connection, int, bytes]]:
        """
        Yield the messages of ``connections`` by time of receipt [ns], or in the order of recording if that time goes back.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def _note_time(self, connection: int, time: int) -> None:
        self.start_time, self.end_time = min(self.start_time, time), max(self.end_time, time + 1)
        self.steps_back.passed(connection, time)

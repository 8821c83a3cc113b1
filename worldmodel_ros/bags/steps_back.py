"""
Detects recordings during which time was set back, from the times of receipt of each topic in the order of recording.

Sorted by time, messages from before and after would silently interleave.
"""
from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
from mcap.reader import make_reader

from .problems import Problem

_STEP = 1_000_000_000  # ns; smaller steps occur when several threads write messages
_INDEX = struct.Struct('<BQHI')  # opcode, length, channel, bytes of entries
_ENTRY = np.dtype([('time', '<u8'), ('offset', '<u8')])


class StepsBack:
    """Counts steps back of more than a second; ``largest`` [ns]."""

    def __init__(self) -> None:
        self.count = self.largest = 0
        self._last: dict[int, int] = {}

    def passed(self, topic: int, time: int) -> None:
        """Process the next message of a topic, in the order of recording."""
        back = self._last.get(topic, time) - time
        self._last[topic] = time
        if back > _STEP:
            self.count += 1
            self.largest = max(self.largest, back)

    def problem(self, path: Path) -> Problem:
        """Return the steps back as a Problem."""
        return Problem(
            'time set back', f'{path}: the clock was set back while this was recorded, by up to '
            f'{self.largest / 1e9:.1f} s: its messages are read as they were recorded, each part for itself. Keep '
            'the clocks synchronised (chrony), and start a new recording after a simulation was reset', self.count)


def in_mcap(path: Path) -> StepsBack:
    """Return the steps back in an MCAP file, from its index; without an index, none are found."""
    steps = StepsBack()
    with path.open('rb') as stream:
        summary = make_reader(stream).get_summary()
        for chunk in sorted(summary.chunk_indexes, key=lambda chunk: chunk.chunk_start_offset):
            for channel, offset in chunk.message_index_offsets.items():
                stream.seek(offset)
                *_, size = _INDEX.unpack(stream.read(_INDEX.size))
                entries = np.frombuffer(stream.read(size), _ENTRY)
                for time in entries['time'][np.argsort(entries['offset'], kind='stable')].tolist():
                    steps.passed(channel, time)
    return steps


def open_sqlite(path: Path, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a SQLite bag read-only, without creating a file next to it, whatever characters its path has."""
    return sqlite3.connect(f'{path.absolute().as_uri()}?mode=ro&immutable=1', uri=True, check_same_thread=check_same_thread)


def in_sqlite(path: Path) -> StepsBack:
    """Return the steps back in a SQLite bag, from its rows."""
    steps = StepsBack()
    with closing(open_sqlite(path)) as database:
        for topic, time in database.execute('SELECT topic_id, timestamp FROM messages WHERE timestamp > 0 ORDER BY id'):
            steps.passed(topic, time)
    return steps

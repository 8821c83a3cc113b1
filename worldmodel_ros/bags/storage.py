"""One storage file of a bag: read by its index or, if that is missing or damaged, as far as possible."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from rosbags.interfaces import Connection
from rosbags.rosbag2 import Reader, storage_mcap

from . import steps_back
from .mcap_records import has_index
from .problems import Problem
from .recovery import Recovered, Unreadable
from .recovery_mcap import RecoveredMcap
from .recovery_sqlite import RecoveredSqlite
from .unpacking import unpack_chunk

# The library's own decompressors unpack everything before they check its size.
storage_mcap.DECOMPRESSORS.update(
    zstd=lambda data, size: unpack_chunk(data, 'zstd', size), lz4=lambda data, size: unpack_chunk(data, 'lz4', size))

Message = tuple[Connection, int, bytes]  # connection, time of receipt [ns], data


class _Typed(Protocol):
    type: str


class StorageFile:
    """An open file. ``connections`` are those of CDR messages; ``start_ns`` and ``end_ns`` are None if it is empty."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        """Open the file; faults are added to ``problems``, now and while reading."""
        self._path, self._problems = path, problems
        self._opened: list[Any] = []
        self._note_journal()
        try:
            self._open()
        except Unreadable as error:
            self._note_unreadable(error)
            return
        for connection in self._reader.connections:
            if connection not in self.connections:
                problems.append(Problem(
                    'topic', f'{connection.topic} is not read: its messages are encoded as '
                    f'{connection.ext.serialization_format!r}, and rosbag2 writes cdr', connection.msgcount))

    @property
    def readable(self) -> bool:
        return bool(self._opened)

    @property
    def connections(self) -> list[Connection]:
        return [c for c in self._reader.connections if c.ext.serialization_format == 'cdr']

    @property
    def message_count(self) -> int:
        """Number of messages as stated by the file, CDR or not."""
        return self._reader.message_count

    @property
    def start_ns(self) -> int | None:
        return self._reader.start_time if self._reader.message_count else None

    @property
    def end_ns(self) -> int | None:
        return self._reader.end_time - 1 if self._reader.message_count else None

    @property
    def goes_back(self) -> bool:
        """Whether time was set back while the file was recorded; its messages then come in the order of recording."""
        return isinstance(self._reader, Recovered) and self._reader.steps_back.count > 0

    def messages(self, topics: Mapping[str, _Typed]) -> Iterator[Message]:
        """
        Yield the messages of ``topics`` (by name, of the given type) by time of receipt, unless it ``goes_back``.

        If the file turns out to be damaged on the way, the rest is recovered.
        """
        position = _Position()
        try:
            for message in self._select(topics):
                position.passed(message)
                yield message
            return
        except Exception:  # on damaged files, the libraries raise anything
            if isinstance(self._reader, Recovered):
                raise
        try:
            self._recover()
        except Unreadable as error:
            self._note_unreadable(error)
            return
        yield from position.skip_passed(self._select(topics))

    def close(self) -> None:
        """Close the file."""
        while self._opened:
            self._opened.pop().close()

    @property
    def _reader(self) -> Any:
        return self._opened[-1]

    def _open(self) -> None:
        is_mcap = self._path.suffix == '.mcap'
        if is_mcap and not has_index(self._path):
            return self._recover()
        try:
            in_order = not (steps_back.in_mcap if is_mcap else steps_back.in_sqlite)(self._path).count
            reader = Reader(self._path)
            if not is_mcap:
                reader.storage.path = Path(quote(str(self._path)))  # the library puts it into a URI as it is
            reader.open()
            _require_text(reader.connections)
        except Exception:  # on damaged files, the libraries raise anything
            return self._recover()
        self._opened.append(reader)
        if not in_order:
            self._recover()

    def _recover(self) -> None:
        recovered = (RecoveredMcap if self._path.suffix == '.mcap' else RecoveredSqlite)(self._path)
        self._opened.append(recovered)
        self._problems += recovered.problems

    def _note_unreadable(self, error: Unreadable) -> None:
        self._problems.append(Problem('unreadable file', f'{self._path} cannot be read: {error}'))

    def _note_journal(self) -> None:
        journal = self._path.with_name(f'{self._path.name}-wal')
        if journal.exists() and journal.stat().st_size:
            self._problems.append(Problem(
                'unsaved journal', f'{journal} holds messages that were not written into {self._path.name}, as after '
                'a crash of the recorder, and they are not read: '
                f'`sqlite3 {self._path} "PRAGMA wal_checkpoint(TRUNCATE)"` moves them there'))

    def _select(self, topics: Mapping[str, _Typed]) -> Iterator[Message]:
        wanted = [c for c in self.connections if c.topic in topics and topics[c.topic].type == c.msgtype]
        return self._reader.messages(wanted) if wanted else iter(())


def _require_text(connections: list[Connection]) -> None:
    """Raise TypeError if a topic's name or type is not text: SQLite stores any type in any column."""
    for connection in connections:
        if not (isinstance(connection.topic, str) and isinstance(connection.msgtype, str)):
            raise TypeError(f'topic {connection.topic!r} of type {connection.msgtype!r}')


class _Position:
    """How far a stream of messages was read, so that another reader can continue from there."""

    def __init__(self) -> None:
        self._time = -1
        self._at_time: Counter[str] = Counter()  # messages of exactly that time, by topic

    def passed(self, message: Message) -> None:
        connection, time, data = message
        if not (isinstance(time, int) and isinstance(data, bytes)):
            raise TypeError(f'a message of {connection.topic} is damaged')
        if time != self._time:
            self._time, self._at_time = time, Counter()
        self._at_time[connection.topic] += 1

    def skip_passed(self, messages: Iterator[Message]) -> Iterator[Message]:
        for message in messages:
            connection, time, _ = message
            if time > self._time:
                yield message
            elif time == self._time:
                if self._at_time[connection.topic]:
                    self._at_time[connection.topic] -= 1
                else:
                    yield message

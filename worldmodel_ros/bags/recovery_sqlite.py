"""Reads a SQLite bag whose file is truncated or damaged: row by row, skipping what cannot be read."""
from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat, Qos
from rosbags.rosbag2.metadata import parse_qos

from .decoding import decoder
from .problems import MessageError, Problem
from .recovery import Recovered, Unreadable
from .steps_back import open_sqlite

_FARTHEST = 2 ** 20  # maximum number of rows to skip in search of a readable one
_NO_DEFINITION = MessageDefinition(MessageDefinitionFormat.NONE, '')
_FORMATS = {'ros2msg': MessageDefinitionFormat.MSG, 'ros2idl': MessageDefinitionFormat.IDL}


class RecoveredSqlite(Recovered):
    """A damaged SQLite bag; opening it reads all rows once to find the readable ones. Raises Unreadable if there are none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._database = open_sqlite(path, check_same_thread=False)
        # Without this, a file shorter than its header says is refused as a whole.
        self._database.execute('PRAGMA writable_schema=ON')
        self._errors = 0
        counts: Counter[int] = Counter()
        try:
            topics = self._database.execute("SELECT id, name, type, serialization_format FROM topics WHERE "
                                            "typeof(name) = 'text' AND typeof(type) = 'text'").fetchall()
        except sqlite3.DatabaseError as error:
            self.close()
            raise Unreadable(f'its table of topics is gone ({error}): copy the recording again') from error
        for topic, time, _ in self._rows():
            counts[topic] += 1
            self._note_time(topic, time)
        self.connections = [
            Connection(number, name, kind, self._definition(kind), '', counts[number],
                       ConnectionExtRosbag2(encoding, self._qos(number)), self)
            for number, name, kind, encoding in topics]
        if not counts:
            self.close()
            raise Unreadable('it is a SQLite bag, but no message in it can be read: record again')
        if self.steps_back.count:
            self.problems.append(self.steps_back.problem(path))
        if self._errors:
            self.problems.append(Problem(
                'damaged', f'{path} is cut off or damaged: the {self.message_count} messages that can be read '
                f'are. Copy the recording again; `sqlite3 {path} .recover | sqlite3 whole.db3` writes what is '
                'left of it'))

    def messages(self, connections: Collection[Connection]) -> Iterator[tuple[Connection, int, bytes]]:
        """Yield messages in the order of recording."""
        wanted = {connection.id: connection for connection in connections}
        for topic, time, data in self._rows():
            if topic in wanted:
                yield wanted[topic], time, data

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _definition(self, kind: str) -> MessageDefinition:
        """Return the definition of a type; if it is not stored, as by Humble, or damaged, the decoder takes that of Jazzy."""
        with suppress(sqlite3.DatabaseError, MessageError, KeyError, TypeError):
            encoding, text = self._database.execute(
                'SELECT encoding, encoded_message_definition FROM message_definitions WHERE topic_type = ?', (kind,)).fetchone()
            definition = MessageDefinition(_FORMATS[encoding], text)
            decoder(kind, definition)
            return definition
        return _NO_DEFINITION

    def _qos(self, topic: int) -> list[Qos]:
        """Return the profiles that a topic's publishers offered; none if they are not stored, or damaged."""
        with suppress(Exception):  # on damaged text, the parser raises anything
            row = self._database.execute('SELECT offered_qos_profiles FROM topics WHERE id = ?', (topic,)).fetchone()
            return parse_qos(*row)
        return []

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield topic, time of receipt [ns] and data of each readable row."""
        last, ahead = -1, 0
        while ahead <= _FARTHEST:
            try:
                rows = self._database.execute(
                    'SELECT id, topic_id, timestamp, data FROM messages NOT INDEXED WHERE id > ? AND '
                    "typeof(topic_id) = 'integer' AND typeof(timestamp) = 'integer' AND typeof(data) = 'blob' "
                    'ORDER BY id',
                    (last + ahead,))
                for number, topic, time, data in rows:
                    last, ahead = number, 0
                    yield topic, time, data
                return
            except sqlite3.DatabaseError:
                ahead = max(1, 2 * ahead)
                self._errors += 1

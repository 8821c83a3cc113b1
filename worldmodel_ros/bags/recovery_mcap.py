"""Reads an MCAP file that has no index, is truncated, or has damaged chunks (https://mcap.dev/spec)."""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.reader import make_reader
from mcap.records import Channel, Schema
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat
from rosbags.rosbag2.metadata import parse_qos

from .mcap_records import MAGIC, RECORD, Contents, has_index, read_chunk, read_records
from .merge import Stream, merge
from .problems import Problem
from .recovery import Recovered, Unreadable
from .unpacking import LARGEST_CHUNK

_LOOSE = 2 ** 20  # bytes of messages outside chunks that are read at once
_FORMATS = {'ros2msg': MessageDefinitionFormat.MSG, 'ros2idl': MessageDefinitionFormat.IDL,
            'omgidl': MessageDefinitionFormat.IDL}


class _Segment(NamedTuple):
    """A chunk, or consecutive messages outside chunks: their position in the file, and their first time [ns]."""

    start: int
    offset: int
    length: int


class RecoveredMcap(Recovered):
    """A damaged MCAP file; opening it reads all of it once to find its contents. Raises Unreadable if there are none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._stream = path.open('rb')
        self._segments: list[_Segment] = []
        self._schemas: dict[int, Schema] = {}
        self._channels: dict[int, Channel] = {}
        counts: Counter[int] = Counter()
        self._cut_at: int | None = None
        chunks = damaged = refused = 0
        for offset, length, is_chunk in self._scan():
            contents = self._read(offset, length)
            chunks += is_chunk
            refused += contents.refused
            damaged += is_chunk and not contents.whole and not contents.refused and self._cut_at is None
            for channel, time, _ in contents.messages:
                counts[channel] += 1
                self._note_time(channel, time)
            if contents.messages:
                self._segments.append(_Segment(min(time for _, time, _ in contents.messages), offset, length))
        self._read_summary(path)
        self.connections = [self._connection(channel, counts[channel.id]) for channel in self._channels.values()]
        if not self._segments:
            self.close()
            raise Unreadable('it is an MCAP file, but not one message in it is whole: record again')
        self._note_problems(path, chunks, damaged)
        if refused:
            self.problems.append(Problem(
                'too large', f'{path}: {refused} of {chunks} chunks are not read, because they unpack to more than they '
                f'say, or than {LARGEST_CHUNK} bytes, as no recording of rosbag2 does: the others are read. Copy the '
                f'recording again; record with smaller chunks (`--storage-config-file` with chunkSize)', refused))

    def messages(self, connections: Collection[Connection]) -> Iterator[tuple[Connection, int, bytes]]:
        """Yield messages; see ``Recovered.messages``."""
        wanted = {connection.id: connection for connection in connections}

        def of(segment: _Segment) -> Iterator[tuple[Connection, int, bytes]]:
            found = self._read(segment.offset, segment.length).messages
            if not self.steps_back.count:
                found.sort(key=lambda message: message[1])
            for channel, time, data in found:
                if channel in wanted:
                    yield wanted[channel], time, data
        if self.steps_back.count:
            return chain.from_iterable(map(of, self._segments))
        return merge([Stream(s.start, lambda s=s: of(s)) for s in self._segments], lambda message: message[1])

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _scan(self) -> Iterator[tuple[int, int, bool]]:
        """Yield offset and length of each segment, and whether it is a chunk; stop where the file is truncated."""
        stream = self._stream
        size = stream.seek(0, 2)
        stream.seek(0)
        if stream.read(len(MAGIC)) != MAGIC:
            self.close()
            raise Unreadable('it does not begin as an MCAP file does: copy the recording again')
        offset = begun = len(MAGIC)  # ``begun``: start of the messages outside chunks that are not yielded yet
        while offset < size:
            stream.seek(offset)
            opcode, length = RECORD.unpack(stream.read(RECORD.size).ljust(RECORD.size, b'\xff'))
            end = offset + RECORD.size + length
            is_chunk, is_last = opcode == Opcode.CHUNK, end > size or opcode in (Opcode.DATA_END, Opcode.FOOTER)
            if offset > begun and (is_chunk or is_last or end - begun > _LOOSE):
                yield begun, offset - begun, False
                begun = offset
            if end > size:
                self._cut_at = offset
            if is_chunk:
                yield offset, min(end, size) - offset, True
                begun = end
            if is_last:
                return
            offset = end
        self._cut_at = offset
        if offset > begun:
            yield begun, offset - begun, False

    def _read(self, offset: int, length: int) -> Contents:
        """Return the messages of a segment, and keep its schemas and channels."""
        self._stream.seek(offset)
        if length > 2 * LARGEST_CHUNK:
            return Contents([], [], False, refused=True)
        data = self._stream.read(length)
        contents = (read_chunk if data[0] == Opcode.CHUNK else read_records)(data)
        for opcode, payload in contents.others:
            kind, known = (Schema, self._schemas) if opcode == Opcode.SCHEMA else (Channel, self._channels)
            with suppress(Exception):  # a damaged one shows when its messages are read
                record = kind.read(ReadDataStream(BytesIO(payload)))
                known.setdefault(record.id, record)
        return contents

    def _read_summary(self, path: Path) -> None:
        """Take schemas and channels from the summary at the end, since the chunks that have them may be damaged."""
        with suppress(Exception):
            if has_index(path):
                self._stream.seek(0)
                summary = make_reader(self._stream).get_summary()
                for known, there in ((self._schemas, summary.schemas), (self._channels, summary.channels)):
                    for number, record in there.items():
                        known.setdefault(number, record)

    def _connection(self, channel: Channel, count: int) -> Connection:
        schema = self._schemas.get(channel.schema_id)
        definition = MessageDefinition(MessageDefinitionFormat.NONE, '')
        if schema and schema.encoding in _FORMATS:
            definition = MessageDefinition(_FORMATS[schema.encoding], schema.data.decode(errors='replace'))
        qos = []
        with suppress(Exception):
            qos = parse_qos(channel.metadata.get('offered_qos_profiles', ''))
        return Connection(channel.id, channel.topic, schema.name if schema else '', definition, '', count,
                          ConnectionExtRosbag2(channel.message_encoding, qos), self)

    def _note_problems(self, path: Path, chunks: int, damaged: int) -> None:
        remedy = f'`mcap recover {path} -o whole.mcap` writes a file without this fault'
        if self._cut_at is not None:
            self.problems.append(Problem(
                'truncated', f'{path} breaks off after {self._cut_at} bytes, as after a crash of the recorder or on a '
                f'full disk: the {self.message_count} messages up to there are read. {remedy}'))
        elif not has_index(path):
            self.problems.append(Problem('no index', f'{path} has no index, so that the whole of it has to be read to '
                                         f'open it. {remedy}'))
        if self.steps_back.count:
            self.problems.append(self.steps_back.problem(path))
        if damaged:
            self.problems.append(Problem(
                'damaged', f'{path}: {damaged} of {chunks} chunks are damaged: of these, what comes before the damage '
                f'is read, or nothing. Copy the recording again; {remedy}', damaged))

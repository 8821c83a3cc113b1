"""Reads the intact records of an MCAP file (https://mcap.dev/spec)."""
from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import zstandard
from mcap.opcode import Opcode

from .unpacking import TooLarge, unpack_chunk

MAGIC = b'\x89MCAP0\r\n'
RECORD = struct.Struct('<BQ')      # opcode, length
_FOOTER = struct.Struct('<BQQQI8s')
_MESSAGE = struct.Struct('<HIQQ')  # channel, sequence, time of receipt, time of publication
_LENGTH = struct.Struct('<Q')
_CHUNK = struct.Struct('<QQQII')   # first and last time, size and checksum of the contents, length of 'zstd'


def has_index(path: Path) -> bool:
    """Return whether an MCAP file was closed properly, with the summary that its footer points to."""
    with path.open('rb') as stream:
        size = stream.seek(0, 2)
        if size < _FOOTER.size + len(MAGIC):
            return False
        stream.seek(size - _FOOTER.size)
        opcode, _, summary, _, _, magic = _FOOTER.unpack(stream.read())
    return opcode == Opcode.FOOTER and magic == MAGIC and summary > 0


class Contents(NamedTuple):
    """
    ``messages``: channel, time of receipt [ns], data. ``others``: opcode and payload of schemas and channels. ``whole``:
    nothing is missing or damaged. ``refused``: not unpacked, because it is too large.
    """

    messages: list[tuple[int, int, bytes]]
    others: list[tuple[int, bytes]]
    whole: bool
    refused: bool = False


def read_records(data: bytes, first: int = 0, last: int = 2 ** 64) -> Contents:
    """Return consecutive records up to the first incomplete one; only messages from ``first`` to ``last`` [ns]."""
    messages, others, position, whole = [], [], 0, True
    while position + RECORD.size <= len(data):
        opcode, length = RECORD.unpack_from(data, position)
        start, end = position + RECORD.size, position + RECORD.size + length
        if end > len(data) or opcode == 0:  # 0 is not an opcode: a megabyte of zeros would be 100,000 records
            break
        if opcode == Opcode.MESSAGE and length >= _MESSAGE.size:
            channel, _, time, _ = _MESSAGE.unpack_from(data, start)
            if first <= time <= last:
                messages.append((channel, time, data[start + _MESSAGE.size:end]))
            else:
                whole = False
        elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
            others.append((opcode, data[start:end]))
        position = end
    return Contents(messages, others, whole and position == len(data))


def read_chunk(record: bytes) -> Contents:
    """Return the contents of a chunk record, which may be truncated."""
    try:
        first, last, size, checksum, name_length = _CHUNK.unpack_from(record, RECORD.size)
        position = RECORD.size + _CHUNK.size
        compression = record[position:position + name_length].decode()
        position += name_length
        packed = record[position + _LENGTH.size:][:_LENGTH.unpack_from(record, position)[0]]
        data = unpack_chunk(packed, compression, size)
    except TooLarge:
        return Contents([], [], False, refused=True)
    except (struct.error, UnicodeDecodeError, zstandard.ZstdError, RuntimeError, KeyError):
        return Contents([], [], False)
    if len(data) == size and checksum and crc32(data) != checksum:
        return Contents([], [], False)
    contents = read_records(data, first, last)
    return contents._replace(whole=contents.whole and len(data) == size)

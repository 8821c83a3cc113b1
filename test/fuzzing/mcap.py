"""MCAP files: bytes damaged anywhere, records that lie, go missing or come twice, contents of chunks and their sizes."""
from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from random import Random
from zlib import crc32

import lz4.frame
import zstandard
from bag_messages import TYPES
from mcap.opcode import Opcode
from mcap.writer import Writer
from mcap_forms import FORMS

from worldmodel_ros.bags.mcap_records import MAGIC, RECORD

from . import mutate, recordings
from .harness import Bytes

_CHUNK = struct.Struct('<QQQII')
_PACKERS = {'zstd': zstandard.ZstdCompressor().compress, 'lz4': lz4.frame.compress, '': bytes}
_UNPACKERS = {'zstd': lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
              'lz4': lambda data: lz4.frame.LZ4FrameDecompressor().decompress(data), '': bytes}
_Record = tuple[int, bytes]  # opcode, payload


def seeds() -> list[bytes]:
    """Return a recording in each form, and of JPEG, PNG and raw images."""
    return [_file(form, 'jpeg') for form in FORMS] + [_file('zstd chunks', encoding) for encoding in ('png', 'rgb8')]


def _file(form: str, encoding: str) -> bytes:
    options = {'profile': 'ros2', **FORMS[form]}
    profile, stream = options.pop('profile'), io.BytesIO()
    writer = Writer(stream, chunk_size=600, **options)
    writer.start(profile=profile)
    channels: dict[str, int] = {}
    for said in recordings.messages(encoding):
        if said.topic not in channels:
            definition, _ = TYPES.generate_msgdef(said.type, ros_version=2)
            schema = writer.register_schema(said.type, 'ros2msg', definition.encode())
            channels[said.topic] = writer.register_channel(said.topic, 'cdr', schema)
        writer.add_message(channels[said.topic], said.at, said.data, said.at)
    writer.finish()
    return stream.getvalue()


def run(data: bytes) -> bool:
    """Read the bytes as a bag's only file."""
    with recordings.folder() as folder:
        path = folder / 'drive.mcap'
        path.write_bytes(data)
        return recordings.read(path)


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a file that is damaged anyhow, or one whose records are."""
    if random.random() < 0.35:
        return mutate.havoc(data, random, corpus)
    records, rest = _records(data[len(MAGIC):])
    if not records:
        return mutate.havoc(data, random, corpus)
    for _ in range(1 + int(random.random() ** 2 * 3)):
        _damage(records, random, corpus, depth=0)
    return data[:len(MAGIC)] + _joined(records, random) + rest


def _records(data: bytes) -> tuple[list[_Record], bytes]:
    found, at = [], 0
    while at + RECORD.size <= len(data):
        opcode, length = RECORD.unpack_from(data, at)
        if at + RECORD.size + length > len(data):
            break
        found.append((opcode, data[at + RECORD.size:at + RECORD.size + length]))
        at += RECORD.size + length
    return found, data[at:]


def _joined(records: list[_Record], random: Random) -> bytes:
    lying = random.randrange(len(records)) if records and random.random() < 0.15 else None
    return b''.join(bytes([opcode]) + (mutate.number(random, 8) if k == lying else struct.pack('<Q', len(payload))) + payload
                    for k, (opcode, payload) in enumerate(records))


def _damage(records: list[_Record], random: Random, corpus: Sequence[bytes], depth: int) -> None:
    if not records:
        return
    at = random.randrange(len(records))
    opcode, payload = records[at]
    choice = random.random()
    if choice < 0.1:
        del records[at]
    elif choice < 0.2:
        records.insert(random.randrange(len(records) + 1), records[at])
    elif choice < 0.3:
        records.append(records.pop(at))
    elif choice < 0.4:
        records[at] = random.choice((opcode, int(random.choice(list(Opcode))), random.getrandbits(8))), payload
    elif opcode == Opcode.CHUNK and depth == 0 and choice < 0.9:
        records[at] = opcode, _chunk(payload, random, corpus)
    elif choice < 0.7 and len(payload) >= 8:
        # Numbers are at the beginning of most records: times, sizes, offsets, counts.
        size, place = random.choice((2, 4, 8)), random.randrange(min(len(payload) - 7, 48))
        records[at] = opcode, payload[:place] + mutate.number(random, size) + payload[place + size:]
    else:
        records[at] = opcode, mutate.havoc(payload, random, corpus)


def _chunk(payload: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a chunk whose contents are damaged, and packed again; its sizes and checksum may lie."""
    try:
        first, last, _, _, length = _CHUNK.unpack_from(payload)
        name = payload[_CHUNK.size:_CHUNK.size + length].decode()
        records, rest = _records(_UNPACKERS[name](payload[_CHUNK.size + length + 8:]))
    except Exception:  # damaged before
        return mutate.havoc(payload, random, corpus)
    _damage(records, random, corpus, depth=1)
    contents = _joined(records, random) + rest
    if random.random() < 0.05:
        contents += bytes(random.choice((2 ** 12, 2 ** 20, 2 ** 27)))  # next to nothing, once it is packed
    packed_as = random.choice((name, name, *_PACKERS))
    packed = _PACKERS[packed_as](contents)
    size, checksum = len(contents), random.choice((0, crc32(contents), random.getrandbits(32)))
    if random.random() < 0.1:
        size = int.from_bytes(mutate.number(random, 8), 'little')
    if random.random() < 0.1:
        first, last = (int.from_bytes(mutate.number(random, 8), 'little') for _ in range(2))
    if random.random() < 0.1:
        packed = mutate.havoc(packed, random, corpus)
    encoded = random.choice((packed_as, packed_as, packed_as, 'lz5')).encode()
    return (_CHUNK.pack(first, last, size, checksum, len(encoded)) + encoded
            + struct.pack('<Q', len(packed)) + packed)


TARGET = Bytes(seeds, run, inputs=20_000, mutate=damaged, constant=recordings.LARGEST,
               resident=True)

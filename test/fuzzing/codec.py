"""The server's protocol: what bytes make of ``unpack``. A message that comes out goes in again, and comes out alike."""
from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

import numpy as np

from worldmodel_ros.serving.transport import codec, messages
from worldmodel_ros.serving.transport.codec import MessageError, pack, unpack

from . import mutate
from .harness import Bytes

_HEADER = 8  # bytes: magic, version, kind
_KINDS = sorted(codec._KINDS)
_Span = tuple[int, int, object]  # from, to, codec of the field


def seeds() -> list[bytes]:
    """Return one or more messages of each kind, short and long."""
    rows, empty = np.ones((4, 2), np.float32), np.zeros((0, 0), np.float32)
    found = [
        messages.Hello('/robot1/world_model_node'), messages.Hello('gateway/arm', 'gateway-1f', 2, 30.0),
        messages.Goodbye(), messages.Note('{"step": 7}'),
        messages.Tick(7, 3, 123_456_789, 2 ** 63, 'red', 12.5, True, np.float32([0.4, -1.0]), rows[:2]),
        messages.Question(9, 'blue', 1.5, 0, (messages.Branch('left', 3, np.float32([[0.3, 1.0]] * 3)),
                                              messages.Branch('policy', 8, empty)), 2),
        messages.Question(10, '', 0.0, -1, (), 1), messages.SessionFile(1, True, 'größe.safetensors'),
        messages.StatusRequest(), messages.Welcome('tiny', 'onnx-int8', '{"name": "tiny"}', 8, 2, 5, 7, True, 'n'),
        messages.Rejected('full'), messages.Planned(7, 1, 1.0, 2.0, '', rows), messages.Refused(7, 1.0, 'no time'),
        messages.Failed(7, 'NaN'), messages.Imagined(7, 1, rows, rows[:, 0], rows[:, 0], np.ones(8)),
        messages.ImaginedBranch(9, 'left', rows, rows[:, 0], np.ones(4)), messages.Answered(9, 5, True, ''),
        messages.Done(1, 'no such file'), messages.Status('{"pid": 1}'),
        messages.WorldHello('gateway-1f', 30.0), messages.WorldWelcome(True, '[64, 96]', '{"name": "tiny_world"}'),
        messages.Walk(3, 'event', np.tile(np.eye(4), (2, 1, 1)), np.full((2, 4), 30.0), '[64, 96]'), messages.Forget(4),
        messages.Walked(3, 9, 8, 0.1, 0.2, 0.3), messages.Walked(4, kind='session', refusal='no world')]
    return [pack(message) for message in found]


def run(data: bytes) -> bool:
    """Unpack; what can be unpacked has one form."""
    try:
        message = unpack(data)
    except MessageError:
        return False
    once = pack(message)
    assert pack(unpack(once)) == once, 'a message does not come out as it went in'
    return True


def spans(data: bytes) -> list[_Span]:
    """Return where the fields of a message are, those of its items too. Raises MessageError."""
    found: list[_Span] = []

    def walk(kind: type, at: int) -> int:
        for _, each in codec._layout(kind):
            begun = at
            if isinstance(each, codec._Many):
                count, at = codec._count(view, at)
                found.append((begun, at, each))
                for _ in range(count):
                    at = walk(each._kind, at)
            else:
                _, at = each.read(view, at)
                found.append((begun, at, each))
        return at
    view = memoryview(data)
    walk(codec._KINDS[struct.unpack_from('<H', data, 6)[0]], _HEADER)
    return found


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a message with hostile fields, with another kind's header, or damaged anyhow."""
    choice = random.random()
    if choice < 0.4:
        return mutate.havoc(data, random, corpus)
    if choice < 0.5:
        return data[:6] + struct.pack('<H', random.choice(_KINDS)) + data[8:]
    try:
        fields = _known.get(data) or spans(data)
    except (ValueError, KeyError, struct.error):
        return mutate.havoc(data, random, corpus)
    if data in corpus:
        _known[data] = fields
    if not fields:
        return data + random.randbytes(random.getrandbits(3))
    start, end, kind = random.choice(fields)
    return data[:start] + _hostile(kind, data[start:end], random) + data[end:]


_known: dict[bytes, list[_Span]] = {}  # of the seeds


def _hostile(kind: object, old: bytes, random: Random) -> bytes:
    if isinstance(kind, codec._Number):
        return mutate.real(random) if kind._struct.format == '<d' else mutate.number(random, len(old))
    if isinstance(kind, codec._Text):
        content = random.randbytes(int(random.random() ** 3 * 200)) if random.random() < 0.5 else old[4:]
        return (struct.pack('<I', len(content)) if random.random() < 0.5 else mutate.number(random, 4)) + content
    if isinstance(kind, codec._Floats):
        dimensions = random.choice((0, 1, 2, 3, 4, 5, 255))
        shape = b''.join(mutate.number(random, 4) for _ in range(min(dimensions, 6)))
        if random.random() < 0.5:  # a shape that is true
            sizes = [random.getrandbits(3) for _ in range(min(dimensions, 4))]
            shape, dimensions = struct.pack(f'<{len(sizes)}I', *sizes), len(sizes)
            old = b'\0' * 5 + b''.join(mutate.real(random, '<f') for _ in range(min(512, int(np.prod(sizes)))))
        return bytes([dimensions]) + shape + old[5:]
    return mutate.number(random, 4)


TARGET = Bytes(seeds, run, inputs=1_000_000, mutate=damaged, measured=10)

"""Memory that comes with a message: of another size than it says, not sealed, or with a shape that lies."""
from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from random import Random

import numpy as np

from worldmodel_ros.serving.transport import memory, pictures
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.frames import SLOTS, FrameSlots, make_memory

from . import mutate
from .harness import Bytes

_SIZE = (4, 6)
_SEALS = (0, fcntl.F_SEAL_SHRINK, memory._FIXED_SIZE)


def seeds() -> list[bytes]:
    """Return the contents of slots and of pictures, with what is done to them before: use, seals."""
    slots = make_memory(_SIZE)
    shown = pictures.put(np.zeros((2, *_SIZE, 3), np.uint8))
    found = [bytes([use, 2]) + os.pread(descriptor, 10_000, 0) for use, descriptor in ((0, slots), (1, shown))]
    for descriptor in (slots, shown):
        os.close(descriptor)
    return found


def run(data: bytes) -> bool:
    """Take the memory as a server or a front end does; no descriptor is left open."""
    use, seals, content = data[:1] == b'\1', data[1:2], data[2:]
    descriptor = os.memfd_create('fuzz', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS[seals[0] % 3 if seals else 0])
    try:
        if use:
            assert pictures.take(descriptor).nbytes == len(content) - 12
        else:
            slots = FrameSlots(descriptor, _SIZE)
            slots.read(len(content) % (SLOTS + 2), content[0] if content else 0)
    except MessageError:
        return False
    finally:
        try:
            os.close(descriptor)
        except OSError:
            pass
        else:
            raise AssertionError('a descriptor was left open')
    return True


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return damaged memory, or pictures whose shape lies."""
    if random.random() < 0.5 or data[:1] != b'\1':
        return mutate.havoc(data, random, corpus)
    if random.random() < 0.5:
        shape = [random.choice((0, 1, 2, 3, 4, 6)) for _ in range(3)]
        return data[:2] + struct.pack('<III', *shape) + bytes(3 * shape[0] * shape[1] * shape[2])
    return data[:2] + b''.join(mutate.number(random, 4) for _ in range(3)) + data[14:]


TARGET = Bytes(seeds, run, inputs=200_000, mutate=damaged)

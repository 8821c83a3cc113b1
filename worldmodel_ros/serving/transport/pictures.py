"""Pictures on their way to a front end: memory of their own for each message, since questions have any size."""
from __future__ import annotations

import os
import struct

import numpy as np

from . import memory
from .codec import MessageError

MAX_PIXELS = 1 << 31  # bytes of one message's pictures
_SHAPE = struct.Struct('<III')  # T, H, W


def put(pictures: np.ndarray) -> int:
    """Return the descriptor of memory that holds RGB pictures, uint8 (T, H, W, 3); the caller closes it."""
    data = np.ascontiguousarray(pictures, np.uint8)
    descriptor = memory.make('worldmodel pictures', _SHAPE.size + data.nbytes)
    try:
        # Written, not mapped: a system call lets Python's other threads go on meanwhile.
        os.pwrite(descriptor, _SHAPE.pack(*data.shape[:3]), 0)
        rest, at = memoryview(data).cast('B'), _SHAPE.size
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def take(descriptor: int) -> np.ndarray:
    """Return the pictures of a message, uint8 (T, H, W, 3), a copy. Closes the descriptor. Raises MessageError."""
    try:
        size = os.fstat(descriptor).st_size
        if not _SHAPE.size <= size <= MAX_PIXELS:
            raise MessageError(f'{size} bytes of pictures')
        data = memory.mapped(descriptor, size, writable=False)
        shape = (*_SHAPE.unpack(data[:_SHAPE.size].tobytes()), 3)
        # With a size of 0, any others need no bytes, and numpy has bounds of its own.
        if 0 in shape or int(np.prod(shape, dtype=object)) != size - _SHAPE.size:
            raise MessageError(f'{size - _SHAPE.size} bytes are no pictures of the shape {shape}')
        return data[_SHAPE.size:].reshape(shape).copy()
    finally:
        os.close(descriptor)

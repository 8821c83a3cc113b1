"""Images for a front end: separate shared memory for each message, since answers to questions have any size."""
from __future__ import annotations

import os
import struct

import numpy as np

from . import memory
from .codec import MessageError

MAX_PIXELS = 1 << 31  # bytes of one message's images
_SHAPE = struct.Struct('<III')  # T, H, W


def put(pictures: np.ndarray) -> int:
    """Return the descriptor of memory that holds RGB images, uint8 (T, H, W, 3); the caller closes it."""
    data = np.ascontiguousarray(pictures, np.uint8)
    descriptor = memory.make('worldmodel pictures', _SHAPE.size + data.nbytes)
    try:
        # Written, not mapped: the system call releases the GIL.
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
    """Return a copy of a message's images, uint8 (T, H, W, 3). Closes the descriptor. Raises MessageError."""
    try:
        size = os.fstat(descriptor).st_size
        if not _SHAPE.size <= size <= MAX_PIXELS:
            raise MessageError(f'{size} bytes of pictures')
        data = memory.mapped(descriptor, size, writable=False)
        shape = (*_SHAPE.unpack(data[:_SHAPE.size].tobytes()), 3)
        # If one size is 0, the others need no bytes, but numpy limits them.
        if 0 in shape or int(np.prod(shape, dtype=object)) != size - _SHAPE.size:
            raise MessageError(f'{size - _SHAPE.size} bytes are no pictures of the shape {shape}')
        return data[_SHAPE.size:].reshape(shape).copy()
    finally:
        os.close(descriptor)

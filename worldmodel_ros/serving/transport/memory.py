"""
Anonymous memory that processes share by passing its descriptor; it is freed with the last of them.

Its size is sealed: truncating it under a process that reads it would kill that process.
"""
from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from .codec import MessageError

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make(name: str, size: int) -> int:
    """Return the descriptor of new zeroed memory of ``size`` bytes, whose size is sealed. ``name`` is shown in /proc."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int, writable: bool) -> np.ndarray:
    """
    Return the memory as uint8 (size,); it stays mapped as long as the array lives, even if the descriptor is closed.

    Raises MessageError if it is not such memory, or its size differs or could change.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        actual = os.fstat(descriptor).st_size
    except OSError as error:
        raise MessageError(f'what came with the message is no shared memory: {error.strerror}') from error
    if actual != size:
        raise MessageError(f'the shared memory has {actual} bytes, and not {size}')
    if seals & _FIXED_SIZE != _FIXED_SIZE:
        raise MessageError('the shared memory could be cut short: its size is not sealed')
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED, access), np.uint8)

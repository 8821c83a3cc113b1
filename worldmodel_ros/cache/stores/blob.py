"""Arrays as one blob that is named by its SHA-256: damaged blobs are refused."""
from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from .protocol import Blob, StoreError

_MAGIC = b'WMSLAB1\n'
_ALIGNMENT = 64       # bytes, alignment of the arrays
_MAX_HEADER = 2**16   # bytes
_TYPES = {name: np.dtype(name) for name in ('<f4', '<f8', '<i8', '|u1')}


class Corrupt(StoreError):
    """A blob whose content does not match its name."""


def encode(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[list[Blob], str]:
    """Return the parts of a blob, which refer to the arrays' memory, and its digest in hex. ``about``: JSON values."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    forms = [[name, array.dtype.str, array.shape] for name, array in contiguous.items()]
    text = json.dumps({'about': about, 'arrays': forms}, sort_keys=True).encode()
    text += b' ' * (-(len(_MAGIC) + 4 + len(text)) % _ALIGNMENT)
    parts: list[Blob] = [_MAGIC + len(text).to_bytes(4, 'little') + text]
    for array in contiguous.values():
        parts += [memoryview(array.reshape(-1).view(np.uint8)), bytes(-array.nbytes % _ALIGNMENT)]
    return parts, digest(*parts)


def digest(*parts: Blob) -> str:
    """Return the SHA-256 of the parts in hex."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


class Intact:
    """Blobs in this process's memory that are known to have their digest. Blobs are identified by object, not by content: one
    that is read again, into other memory, is not known. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[memoryview], str]] = {}

    def add(self, blob: memoryview, digest: str) -> None:
        """Record that a blob has a digest. Does nothing for a writable blob."""
        if blob.readonly:
            key = id(blob)
            self._known[key] = weakref.ref(blob, lambda _: self._known.pop(key, None)), digest

    def has(self, blob: memoryview, digest: str) -> bool:
        """Return whether a blob is known to have a digest."""
        reference, known = self._known.get(id(blob), (lambda: None, ''))
        return reference() is blob and known == digest


def decode(blob: memoryview, name: str, expected: str, intact: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what ``encode`` was given; the arrays are views of the blob. ``name``: for errors. ``intact``: the digest is known
    to be right. Raises Corrupt for an invalid blob, or one without the ``expected`` digest."""
    if not intact and digest(blob) != expected:
        raise Corrupt(f'{name} is damaged: its SHA-256 is not the one that it was stored with')
    try:
        if bytes(blob[:len(_MAGIC)]) != _MAGIC:
            raise ValueError('it begins otherwise')
        at = len(_MAGIC) + 4
        length = int.from_bytes(blob[len(_MAGIC):at], 'little')
        if length > _MAX_HEADER:
            raise ValueError(f'its header has {length} bytes')
        header = json.loads(bytes(blob[at:at + length]))
        at += length
        arrays = {}
        for array, dtype, shape in header['arrays']:
            count = int(np.prod(shape, dtype=object)) if shape else 1
            values = np.frombuffer(blob, _TYPES[dtype], count, at)
            arrays[array] = values.reshape(shape)
            at += values.nbytes + -values.nbytes % _ALIGNMENT
        return header['about'], arrays
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f'{name} is no blob of this version: {error}') from error

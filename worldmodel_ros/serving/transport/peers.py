"""Requests between a fleet's hosts, through their gateways: each binary frame holds a JSON object and any number of blobs."""
from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from .codec import MessageError

PATH = '/v1/fleet'
_LENGTH = struct.Struct('<I')
_LONGEST = 1 << 20  # bytes of the JSON object


def wrap(about: dict[str, Any], blobs: Sequence[bytes | bytearray | memoryview] = ()) -> bytes:
    """Return the frame of an object and its blobs."""
    head = json.dumps({**about, 'sizes': [len(blob) for blob in blobs]}).encode()
    return b''.join((_LENGTH.pack(len(head)), head, *blobs))


def unwrap(data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Return what ``wrap`` was given; the blobs share the memory of ``data``. Raises MessageError."""
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise MessageError(f'{len(view)} bytes are no request of a fleet')
    end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    if end > min(len(view), _LENGTH.size + _LONGEST):
        raise MessageError(f'an object of {end - _LENGTH.size} bytes in a frame of {len(view)}')
    try:
        about = json.loads(bytes(view[_LENGTH.size:end]))
        sizes = about.pop('sizes')
        sound = all(type(size) is int and size >= 0 for size in sizes) and sum(sizes) == len(view) - end
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError(f'a request of a fleet that is none: {error}') from error
    if not sound:
        raise MessageError(f'{len(view) - end} bytes of blobs, which are not what their sizes say')
    blobs = []
    for size in sizes:
        blobs.append(view[end:end + size])
        end += size
    return about, blobs

"""
MessagePack with NumPy arrays, in the format of openpi's clients, from untrusted senders.

An array is a map {__ndarray__, data, dtype, shape} and a NumPy scalar a map {__npgeneric__, data, dtype}, with keys of
bytes (openpi_client.msgpack_numpy 0.1.2). Nothing is ever unpickled. The structure is checked before anything is
allocated for it.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

_DTYPES = frozenset(f'{order}{kind}' for order in '<>|=' for kind in (
    'f2', 'f4', 'f8', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'b1'))
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 32  # of one dimension: if another one is 0, the number of bytes does not bound it
# Codes with a payload of a fixed size, and those followed by a length or count in the given format.
_FIXED = {0xca: 4, 0xcb: 8, **{0xcc + k: 1 << k for k in range(4)}, **{0xd0 + k: 1 << k for k in range(4)}}
_LENGTH = {0xc4: 'B', 0xc5: 'H', 0xc6: 'I', 0xd9: 'B', 0xda: 'H', 0xdb: 'I'}
_COUNT = {0xdc: ('H', 1), 0xdd: ('I', 1), 0xde: ('H', 2), 0xdf: ('I', 2)}
_PLAIN = {0xc0, 0xc2, 0xc3}


class WireError(ValueError):
    """Bytes that are not accepted; the text says why."""


@dataclass(frozen=True)
class Bounds:
    """Limits of one message: ``depth`` of nested containers, ``values`` in all of them, keys included."""

    depth: int = 8
    values: int = 20_000


def decode(data: bytes, bounds: Bounds = Bounds()) -> Any:
    """Return the value of a message, with read-only arrays that share its memory. Raises WireError."""
    _walk(data, bounds)
    try:
        return _with_arrays(msgspec.msgpack.decode(data))
    except WireError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f'no MessagePack: {error}') from error


def encode(value: Any) -> bytes:
    """Return the message of a value that consists of maps, lists, numbers, texts, bytes and arrays."""
    return _ENCODER.encode(value)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in 'fiub':
        return {b'__ndarray__': True, b'data': value.tobytes(), b'dtype': value.dtype.str, b'shape': value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in 'fiub':
        return value.item()
    raise TypeError(f'{type(value).__name__} is not sent')


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)


def _walk(data: bytes, bounds: Bounds) -> None:
    """Raise WireError for a message that is truncated, too deep or has too many values."""
    end, at, values = len(data), 0, 0
    lacking = [1]  # values that each open container still lacks
    while lacking:
        if not lacking[-1]:
            lacking.pop()
            continue
        lacking[-1] -= 1
        values += 1
        if values > bounds.values:
            raise WireError(f'more than {bounds.values} values: send arrays instead of lists of numbers')
        if at >= end:
            raise WireError('truncated')
        code, at = data[at], at + 1
        children = size = 0
        if code <= 0x7f or code >= 0xe0 or code in _PLAIN:
            continue
        if code <= 0x8f:
            children = 2 * (code & 0x0f)
        elif code <= 0x9f:
            children = code & 0x0f
        elif code <= 0xbf:
            size = code & 0x1f
        elif code in _FIXED:
            size = _FIXED[code]
        elif code in _LENGTH:
            size, at = _number(data, at, _LENGTH[code])
        elif code in _COUNT:
            form, each = _COUNT[code]
            children, at = _number(data, at, form)
            children *= each
        else:
            raise WireError(f'code {code:#04x}, an extension or none, is not taken')
        if size > end - at or children > end - at:  # each child takes at least a byte
            raise WireError('truncated')
        at += size
        if children:
            if len(lacking) > bounds.depth:
                raise WireError(f'more than {bounds.depth} containers in each other')
            lacking.append(children)
    if at != end:
        raise WireError(f'{end - at} bytes too many')


def _number(data: bytes, at: int, form: str) -> tuple[int, int]:
    size = struct.calcsize('>' + form)
    if len(data) - at < size:
        raise WireError('truncated')
    return struct.unpack_from('>' + form, data, at)[0], at + size


def _with_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_arrays(each) for each in value]
    if not isinstance(value, dict):
        return value
    if b'__ndarray__' in value:
        return _array(value)
    if b'__npgeneric__' in value:
        return _scalar(value)
    return {_key(key): _with_arrays(each) for key, each in value.items()}


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise WireError(f'a key of a map is a {type(key).__name__}, and must be a string')
    return key


def _array(value: dict) -> np.ndarray:
    data, shape, dtype = value.get(b'data'), value.get(b'shape'), _dtype(value)
    if not isinstance(data, bytes):
        raise WireError('an array without data')
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(
            type(size) is int and 0 <= size < _MAX_SIZE for size in shape):
        raise WireError('an array without a shape of whole numbers')
    count = dtype.itemsize
    for size in shape:  # in Python integers, which do not wrap around
        count *= size
    if count != len(data):
        raise WireError(f'an array of shape {shape} and {dtype} has {count} bytes, and {len(data)} came')
    return np.ndarray(shape, dtype, data)


def _scalar(value: dict) -> np.generic:
    number = value.get(b'data')
    if not isinstance(number, (int, float)):
        raise WireError('a NumPy scalar that is no number')
    try:
        return _dtype(value).type(number)
    except (OverflowError, ValueError) as error:
        raise WireError(f'a NumPy scalar of another size: {error}') from error


def _dtype(value: dict) -> np.dtype:
    name = value.get(b'dtype')
    if not isinstance(name, str) or name not in _DTYPES:
        raise WireError(f'an array of {str(name)[:20]!r}: only numbers are taken')
    return np.dtype(name)

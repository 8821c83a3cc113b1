"""
Messages as bytes: a fixed header, then the fields of a dataclass, one after the other, little-endian.

The reader trusts nothing: a message that is truncated, too long, of another version or of an unknown kind raises
MessageError with the reason, before any of it is used.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np

MAGIC = 0x31524D57  # 'WMR1'
VERSION = 9         # of the protocol; both sides must have the same
MAX_MESSAGE = 192 * 1024  # bytes
MAX_DIMENSIONS = 4
_HEADER = struct.Struct('<IHH')  # magic, version, kind
_COUNT = struct.Struct('<I')
_NO_ROWS = np.zeros((0, 0), np.float32)

T = TypeVar('T')
_KINDS: dict[int, type] = {}


class MessageError(ValueError):
    """Bytes that are not a message of this protocol, or a message that cannot be sent; the text says why."""


class VersionMismatch(MessageError):
    """The other side speaks another version of the protocol."""


class Codec(Protocol):
    """One kind of field."""

    def write(self, value: Any, out: bytearray) -> None:
        """Append the value's bytes."""

    def read(self, data: memoryview, at: int) -> tuple[Any, int]:
        """Return the value whose bytes begin at ``at``, and where they end. Raises MessageError."""


class _Number:
    def __init__(self, form: str) -> None:
        self._struct = struct.Struct(form)

    def write(self, value: Any, out: bytearray) -> None:
        out += self._struct.pack(value)

    def read(self, data: memoryview, at: int) -> tuple[Any, int]:
        end = _end(data, at, self._struct.size)
        return self._struct.unpack_from(data, at)[0], end


class _Text:
    def write(self, value: str, out: bytearray) -> None:
        encoded = value.encode()
        out += _COUNT.pack(len(encoded)) + encoded

    def read(self, data: memoryview, at: int) -> tuple[str, int]:
        size, at = _count(data, at)
        end = _end(data, at, size)
        try:
            return str(data[at:end], 'utf-8'), end
        except UnicodeDecodeError as error:
            raise MessageError(f'a text is not UTF-8: {error}') from error


class _Floats:
    """
    An array of float32, or of ``form``, of any shape; or None, which is read back as shape (0, 0). The bytes are the number
    of dimensions, the shape, and the values.
    """

    def __init__(self, form: str = '<f4') -> None:
        self._form = np.dtype(form)

    def write(self, value: np.ndarray | None, out: bytearray) -> None:
        value = _NO_ROWS if value is None else value
        array = np.ascontiguousarray(value, self._form).reshape(np.shape(value))
        out += bytes([array.ndim]) + struct.pack(f'<{array.ndim}I', *array.shape) + array.tobytes()

    def read(self, data: memoryview, at: int) -> tuple[np.ndarray, int]:
        start = _end(data, at, 1)
        dimensions = data[at]
        if dimensions > MAX_DIMENSIONS:
            raise MessageError(f'an array of {dimensions} dimensions: at most {MAX_DIMENSIONS} are allowed')
        at = _end(data, start, 4 * dimensions)
        shape = struct.unpack_from(f'<{dimensions}I', data, start)
        count = 1
        for size in shape:  # in Python integers: a product of hostile sizes must not wrap around
            count *= size
        end = _end(data, at, self._form.itemsize * count)
        # If one size is 0, the others need no bytes, but numpy limits them.
        if max(shape, default=0) > MAX_MESSAGE:
            raise MessageError(f'an array of shape {shape}: no size can be above {MAX_MESSAGE}')
        return np.frombuffer(data[at:end], self._form).astype(self._form.newbyteorder('=')).reshape(shape), end


class _Many:
    """A list of dataclasses of one kind."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def write(self, value: list, out: bytearray) -> None:
        out += _COUNT.pack(len(value))
        for item in value:
            _write_fields(item, out)

    def read(self, data: memoryview, at: int) -> tuple[tuple, int]:
        count, at = _count(data, at)
        if count > len(data) - at:  # each takes at least a byte
            raise MessageError(f'truncated: {count} items are announced, {len(data) - at} bytes are left')
        items = []
        for _ in range(count):
            item, at = _read_fields(self._kind, data, at)
            items.append(item)
        return tuple(items), at


def _codec(codec: Codec) -> Callable[..., Any]:
    return lambda default=MISSING: field(default=default, metadata={'codec': codec})


u8, u32, u64 = (_codec(_Number(form)) for form in ('<B', '<I', '<Q'))
i64, f64, flag = (_codec(_Number(form)) for form in ('<q', '<d', '<?'))
text, floats, doubles = _codec(_Text()), _codec(_Floats()), _codec(_Floats('<f8'))


def many(kind: type) -> Any:
    """Declare a field that is a tuple of dataclasses of one kind."""
    return field(metadata={'codec': _Many(kind)})


def message(kind: int) -> Callable[[type[T]], type[T]]:
    """Make a class the message of number ``kind``; its fields are declared with ``u8()``, ``text()``, ``floats()`` etc."""
    def register(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, eq=False)(cls)
        if kind in _KINDS:
            raise TypeError(f'{cls.__name__}: number {kind} is taken by {_KINDS[kind].__name__}')
        _KINDS[kind] = made
        made.KIND = kind
        return made
    return register


def pack(value: Any) -> bytes:
    """Return the bytes of a message. Raises MessageError if there are too many."""
    out = bytearray(_HEADER.pack(MAGIC, VERSION, value.KIND))
    _write_fields(value, out)
    if len(out) > MAX_MESSAGE:
        raise MessageError(f'{type(value).__name__} has {len(out)} bytes, {MAX_MESSAGE} are allowed')
    return bytes(out)


def unpack(data: bytes) -> Any:
    """Return the message in ``data``. Raises MessageError, VersionMismatch."""
    if len(data) < _HEADER.size:
        raise MessageError(f'truncated: {len(data)} bytes, and the header alone has {_HEADER.size}')
    magic, version, number = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MessageError(f'no message of this protocol: it begins with {magic:#010x}')
    if version != VERSION:
        raise VersionMismatch(f'the other side speaks version {version} of the protocol, this one version {VERSION}: '
                              'install the same release on both sides')
    kind = _KINDS.get(number)
    if kind is None:
        raise MessageError(f'unknown kind of message: {number}')
    try:
        value, end = _read_fields(kind, memoryview(data), _HEADER.size)
    except MessageError as error:
        raise MessageError(f'{kind.__name__}: {error}') from error
    if end != len(data):
        raise MessageError(f'{kind.__name__}: {len(data) - end} bytes too many')
    return value


@cache
def _layout(kind: type) -> tuple[tuple[str, Codec], ...]:
    return tuple((each.name, each.metadata['codec']) for each in fields(kind))


def _write_fields(value: Any, out: bytearray) -> None:
    for name, codec in _layout(type(value)):
        try:
            codec.write(getattr(value, name), out)
        except struct.error as error:
            raise MessageError(f'{type(value).__name__}.{name}: {error}') from error


def _read_fields(kind: type[T], data: memoryview, at: int) -> tuple[T, int]:
    values = []
    for _, codec in _layout(kind):
        value, at = codec.read(data, at)
        values.append(value)
    return kind(*values), at


def _count(data: memoryview, at: int) -> tuple[int, int]:
    end = _end(data, at, _COUNT.size)
    return _COUNT.unpack_from(data, at)[0], end


def _end(data: memoryview, at: int, size: int) -> int:
    if at + size > len(data):
        raise MessageError(f'truncated: {at + size - len(data)} bytes are missing')
    return at + size

"""Damages bytes: what any format may meet, and what knows numbers of a length that lies."""
from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

# Edges of the integers in a header: zero, signs, and sizes of which a product or a sum wraps around.
EDGES = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2 ** 15 - 1, 2 ** 15, 2 ** 16 - 1, 2 ** 16, 2 ** 24, 2 ** 31 - 1, 2 ** 31,
         2 ** 32 - 1, 2 ** 32, 2 ** 48, 2 ** 62, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.1, 1e-300, -1e-300, 1e9, 1e300, -1e300, float('inf'), float('-inf'), float('nan'))

Mutation = Callable[[bytes, Random, Sequence[bytes]], bytes]


def number(random: Random, size: int) -> bytes:
    """Return an integer of ``size`` bytes, little-endian: an edge, one off an edge, or any."""
    if random.random() < 0.3:
        value = random.getrandbits(8 * size)
    else:
        value = random.choice(EDGES) + random.choice((0, 0, 0, -1, 1))
    return (value % (1 << 8 * size)).to_bytes(size, 'little')


def real(random: Random, form: str = '<d') -> bytes:
    """Return a float: an edge, one of a sane size, or any bits."""
    if random.random() < 0.2:
        return random.getrandbits(64).to_bytes(8, 'little')[:struct.calcsize(form)]
    value = random.choice(FLOATS) if random.random() < 0.6 else random.uniform(-10.0, 10.0)
    if form == '<f' and abs(value) > 3e38:
        value = float('inf')
    return struct.pack(form, value)


def havoc(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return ``data`` after one to four faults, such as a disk, a wire or an attacker makes; ``corpus``: to splice with."""
    out = bytearray(data)
    for _ in range(1 + int(random.random() ** 2 * 4)):
        _FAULTS[int(random.random() * len(_FAULTS))](out, random, corpus)
    return bytes(out)


def _place(out: bytearray, random: Random, size: int = 1) -> int:
    return int(random.random() * max(1, len(out) - size + 1))


def _flip(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    if out:
        out[_place(out, random)] ^= 1 << random.getrandbits(3)


def _byte(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    if out:
        out[_place(out, random)] = random.getrandbits(8)


def _number(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    size = (1, 2, 4, 4, 8, 8)[int(random.random() * 6)]
    at = _place(out, random, size)
    out[at:at + size] = number(random, size)


def _truncate(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del out[_place(out, random):]


def _delete(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = _place(out, random)
    del out[at:at + 1 + int(random.random() ** 3 * 64)]


def _insert(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = _place(out, random)
    out[at:at] = random.randbytes(1 + int(random.random() ** 3 * 32))


def _repeat(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = _place(out, random)
    out[at:at] = out[at:at + 1 + int(random.random() ** 3 * 256)]


def _fill(out: bytearray, random: Random, _: Sequence[bytes]) -> None:
    at = _place(out, random)
    size = min(len(out) - at, 1 + int(random.random() ** 3 * 512))
    out[at:at + size] = bytes([random.choice((0, 255, random.getrandbits(8)))]) * size


def _splice(out: bytearray, random: Random, corpus: Sequence[bytes]) -> None:
    other = corpus[int(random.random() * len(corpus))]
    if other:
        start = int(random.random() * len(other))
        at = _place(out, random)
        if random.random() < 0.5:
            out[at:] = other[start:]
        else:
            piece = other[start:start + 1 + int(random.random() ** 2 * 256)]
            out[at:at + len(piece)] = piece


_FAULTS = (_flip, _byte, _number, _number, _truncate, _delete, _insert, _repeat, _fill, _splice)

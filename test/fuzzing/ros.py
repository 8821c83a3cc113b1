"""Messages of ROS as bytes, with fields that nobody expects: what any process of the network may publish."""
from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from rclpy.serialization import deserialize_message, serialize_message

from . import mutate

_SIZES = {'8': 1, '16': 2, '32': 4, '64': 8}
_WORDS = ('', 'red', 'linear.x', 'angular.z', 'forward', 'policy', 'rgb8', 'mono8', 'bayer_rggb8', 'yuv422', '16UC1', 'jpeg',
          'png', 'x' * 300, 'ä\U0001f916', '\0', '../..')


def read(kind: type, data: bytes) -> Any | None:
    """Return the message that has these bytes, as a subscription would; None where the middleware refuses them."""
    try:
        return deserialize_message(data, kind)
    except Exception as error:  # RMWError, of whichever middleware; and what comes before Python is not ours
        if type(error).__name__ != 'RMWError':
            raise
        return None


def damaged(kind: type) -> mutate.Mutation:
    """Return what damages the bytes of messages of a kind, or their fields."""
    def damage(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
        message = read(kind, data) if random.random() < 0.8 else None
        if message is None:
            return mutate.havoc(data, random, corpus)
        for _ in range(1 + int(random.random() ** 2 * 4)):
            change(message, random)
        return serialize_message(message)
    return damage


def change(message: Any, random: Random) -> None:
    """Give a field of a message, or of one within it, another value that its type allows."""
    fields = message.get_fields_and_field_types()
    name = random.choice(list(fields))
    kind, value = fields[name], getattr(message, name)
    if kind.startswith('sequence<'):
        setattr(message, name, _sequence(value, kind[9:].rstrip('>').split(',')[0], random))
    elif hasattr(value, 'get_fields_and_field_types'):
        change(value, random)
    else:
        setattr(message, name, _scalar(kind, value, random))


def _sequence(values: Any, kind: str, random: Random) -> Any:
    values = list(values)
    choice = random.random()
    if choice < 0.25 and values:
        del values[random.randrange(len(values)):]
    elif choice < 0.5 and values:
        values *= random.choice((2, 3, 100 if len(values) < 20 else 2))
    elif values:
        at = random.randrange(len(values))
        if hasattr(values[at], 'get_fields_and_field_types'):
            change(values[at], random)
        else:
            values[at] = _scalar(kind, values[at], random)
    elif '/' not in kind:
        values = [_scalar(kind, None, random) for _ in range(random.randrange(6))]
    return array.array('f', values) if kind == 'float' else array.array('B', values) if kind == 'uint8' else values


def _scalar(kind: str, value: Any, random: Random) -> Any:
    if kind == 'boolean':
        return random.random() < 0.5
    if kind == 'string':
        return random.choice(_WORDS) if random.random() < 0.7 else (value or '') + random.choice(_WORDS)
    if kind in ('double', 'float'):
        number = float.fromhex(random.choice(('0x1p-149', '0x1.fffffep127', '-0x1.fffffep127', '0x0p0', 'inf', 'nan', '-inf',
                                              '-0x0p0'))) if random.random() < 0.5 else random.uniform(-10.0, 10.0)
        return number * random.choice((1.0, 1.0, 1e200)) if kind == 'double' else number
    unsigned = kind.startswith('uint')
    size = _SIZES[kind.removeprefix('u').removeprefix('int')]
    if random.random() < 0.3:
        return max(0 if unsigned else -2 ** (8 * size - 1), min((value or 0) + random.randint(-8, 8), 2 ** (8 * size - 1) - 1))
    return int.from_bytes(mutate.number(random, size), 'little', signed=not unsigned)


def target_of(kind: type, handle: Callable[[Any], bool]) -> Callable[[bytes], bool]:
    """Return the ``run`` of a target that is a handler of messages."""
    def run(data: bytes) -> bool:
        message = read(kind, data)
        return message is not None and handle(message)
    return run

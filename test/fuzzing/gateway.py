"""What a client sends to the network gateway: either dialect's messages, up to what would be handed to the engine."""
from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
from camera_paths import camera, path

from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.gateway import camera as dialect
from worldmodel_ros.serving.gateway import openpi
from worldmodel_ros.serving.gateway.contract import Contract, ObservationError
from worldmodel_ros.serving.gateway.msgpack import WireError, decode, encode
from worldmodel_ros.serving.gateway.sessions import Refusal

from . import mutate
from .harness import Bytes

_CONTRACT = Contract(executed=(1, 0))
_WORDS = ('endpoint', 'infer', 'reset', 'session_id', 'step_id', 'deadline_ms', 'executed_actions', 'inference_delay', 'image',
          'camera', 'cameras', 'poses', 'intrinsics', 'extra_body', 'num_frames', 'frames_per_chunk', 'fps', 'event_id',
          'extensions', 'frames', 'uint8', 'rays', 'moment', 'observation', 'state', 'prompt', 'red')
_TYPES = ('<f4', '>f8', '|u1', '<i8', '|b1', '|O', '<U4', 'c16', '', 'f4')


def seeds() -> list[bytes]:
    """Return requests of both dialects, as their clients make them."""
    image, observation = np.full((6, 8, 3), 9, np.uint8), {'observation/state': np.float64([0.1, 0.2])}
    found = [
        {**observation, 'observation/image': image, 'prompt': 'drive to red'},
        {**observation, 'observation': {'image': image.transpose(2, 0, 1)}, 'session_id': 'arm', 'step_id': 7,
         'deadline_ms': 50.0, 'executed_actions': np.ones((3, 2), np.float32), 'inference_delay': 1},
        {**observation, 'observation/image': image, 'executed_actions': [[0.1, 0.2], [0.3, 0.4]], 'step_id': 1 << 40},
        {'endpoint': 'reset', 'session_id': 'arm'},
        {'prompt': 'walk', 'image': image, 'camera': camera(path([(0.2, 0.1)] * 2, pieces=1)), 'session_id': None,
         'extra_body': {'height': 480, 'width': 832, 'num_frames': 3, 'fps': 16, 'frames_per_chunk': 4, 'seed': 42}},
        {'prompt': '', 'cameras': {'poses': np.eye(4, dtype=np.float32)[None], 'intrinsics': np.float32([8, 8, 4, 3])},
         'event_id': 'turn', 'extensions': {'frames': 'jpeg', 'timings': True, 'rays': 'moment', 'poses': False}}]
    scalar = msgspec.msgpack.encode({'step_id': {b'__npgeneric__': True, b'data': 4, b'dtype': '<i8'}})
    return [*map(encode, found), scalar]


def run(data: bytes) -> bool:
    """Read a message as either dialect does; what is read has one form."""
    try:
        message = decode(data)
    except WireError:
        return False
    assert _same(decode(encode(message)), message), 'a message does not come out as it went in'
    accepted = 0
    try:
        request = openpi.Request.of(message, _CONTRACT)
        if request.endpoint == 'infer':
            _CONTRACT.image_of(message)
            assert _CONTRACT.goal_of(message, TINY) in ('', *TINY.goals)
            executed, _ = openpi._executed(request, message, _CONTRACT, TINY)
            assert executed.shape == (2,) and np.isfinite(executed).all()
        accepted += 1
    except ObservationError:
        pass
    try:
        asked = dialect.Request.of(message)
        if asked.endpoint == 'infer':
            assert asked.poses.shape == (len(asked.intrinsics), 4, 4) and np.isfinite(asked.poses).all()
            assert (asked.intrinsics[:, :2] > 0).all() and 0 < asked.together <= 64
        assert dialect.Extensions().taken(asked.extensions).frames in dialect.ENCODINGS
        accepted += 1
    except Refusal:
        pass
    return accepted > 0


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype.newbyteorder('=') == b.dtype.newbyteorder('=') and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or (a != a and b != b)


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a message with a value that lies, or damaged anyhow."""
    if random.random() < 0.4:
        return mutate.havoc(data, random, corpus)
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return mutate.havoc(data, random, corpus)
    for _ in range(1 + (random.random() < 0.3)):
        message = _changed(message, random, corpus)
    return msgspec.msgpack.encode(message)


def _changed(value: Any, random: Random, corpus: Sequence[bytes], depth: int = 0) -> Any:
    """The value with a change at one place of it."""
    if isinstance(value, dict) and value and random.random() < 0.9 - 0.1 * depth:
        out, key = dict(value), random.choice(list(value))
        choice = random.random()
        if choice < 0.1:
            del out[key]
        elif choice < 0.2:
            out[random.choice((*_WORDS, b'__ndarray__', b'data', b'shape', b'dtype', 7))] = _any(random, corpus)
        else:
            out[key] = _changed(value[key], random, corpus, depth + 1)
        return out
    if isinstance(value, list) and value and random.random() < 0.8:
        out = list(value)
        at = int(random.random() * len(out))
        out[at] = _changed(out[at], random, corpus, depth + 1)
        return out if random.random() < 0.8 else out + out[at:at + 1]
    if isinstance(value, bytes) and random.random() < 0.8:
        return mutate.havoc(value, random, corpus)
    return _any(random, corpus)


def _any(random: Random, corpus: Sequence[bytes]) -> Any:
    choice = int(random.random() * 11)
    if choice == 0:
        return random.choice(mutate.EDGES) - random.choice((0, 0, 1))
    if choice == 1:
        return random.choice(mutate.FLOATS)
    if choice == 2:
        return random.choice((*_WORDS, *_TYPES, 'x' * int(random.random() ** 4 * 6000)))
    if choice == 3:
        return random.choice((None, True, False, b'', [], {}))
    if choice == 4:
        return random.randbytes(int(random.random() ** 3 * 300))
    if choice == 5:
        return [_any(random, corpus) for _ in range(int(random.random() * 4))]
    if choice == 6:
        nested: Any = 1
        for _ in range(int(random.random() * 14)):
            nested = [nested] if random.random() < 0.5 else {'a': nested}
        return nested
    if choice == 7:
        return {b'__npgeneric__': True, b'data': random.choice(mutate.EDGES), b'dtype': random.choice(_TYPES)}
    shape = [int(random.random() * 5) for _ in range(int(random.random() * 4))]
    if choice == 8:
        shape = [random.choice(mutate.EDGES) for _ in shape]
    kind = random.choice(_TYPES)
    count = 1
    for size in shape:
        count = min(count * size, 400)
    return {b'__ndarray__': True, b'data': random.randbytes(count * random.choice((1, 4, 8))), b'dtype': kind, b'shape': shape}


# At most twice its size, and what the values that are no arrays are as Python's objects: 20,000 of them are taken.
TARGET = Bytes(seeds, run, inputs=1_000_000, mutate=damaged, factor=2.0, constant=1 << 20, measured=10)

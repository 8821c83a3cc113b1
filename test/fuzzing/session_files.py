"""Files of sessions: headers, tables and numbers that are damaged, with a checksum that is right all the same."""
from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.cache.pool import NumpyStorage
from worldmodel_ros.engine.memory import Memory
from worldmodel_ros.engine.session_file import Capture, Loaded, read
from worldmodel_ros.engine.session_folder import SessionFileError
from worldmodel_ros.model.presets import NO_SINKS, TINY

from . import mutate
from .harness import Bytes

SPEC = replace(TINY, name='smallest', image_size=(32, 32), vae_width=4, width=8, depth=2, heads=1, window_frames=8,
               latent_channels=4, **{**NO_SINKS, 'sink_frames': 4})
FINGERPRINT = 'a' * 64
_CHECKSUM = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')
_SHAPES = {'latent': (*SPEC.latent_size, SPEC.latent_channels), 'features': (SPEC.tokens, SPEC.width),
           'encoder_state': (1, 4 * SPEC.vae_width, *SPEC.latent_size),
           'sink_latents': (SPEC.sink_frames, *SPEC.latent_size, SPEC.latent_channels),
           'sink_actions': (SPEC.sink_frames, SPEC.actions)}
_VALUES: tuple[Any, ...] = (0, 1, -1, 8, 2 ** 31, 2 ** 63, 2 ** 70, 0.5, '', 'F32', 'I64', 'U8', 'F64', None, True, [], {},
                            [0, 0],
                            [2 ** 32, 2 ** 32], [-1])


def memory(sessions: int = 1) -> Memory:
    """Return the pages of a few sessions."""
    layers = len(SPEC.cache_layers)
    return Memory(SPEC, lambda layout, pages: NumpyStorage(layout, layers, SPEC.heads, SPEC.head_dim, pages), sessions)


def observe(of: Memory, cache: SequenceCache, time: int, values: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a frame into a session's cache, as a tick does; return the rest of the session's state."""
    of.roll(cache, time)
    k, v = (values.standard_normal((len(SPEC.cache_layers), SPEC.heads, 1, of.layout.tokens, SPEC.head_dim))
            .astype(np.float32) for _ in 'kv')
    with cache.stage() as staged:
        staged.write(time, k, v, True)
    return {'time': np.array([time])} | {
        name: values.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}


def written(state: dict[str, np.ndarray], cache: SequenceCache) -> bytes:
    """Return the file of a session."""
    capture, file = Capture(SPEC, lambda: FINGERPRINT, state, cache.fork()), io.BytesIO()
    for _ in capture.pieces():
        pass
    capture.write(file)
    return file.getvalue()


def loaded(data: bytes, of: Memory) -> Loaded:
    """Return a session that was read and filled. Raises SessionFileError."""
    found = read(io.BytesIO(data), len(data), SPEC, FINGERPRINT, of)
    for _ in found.pieces():
        pass
    return found


def seeds() -> list[bytes]:
    """Return sessions of one frame, of some, and of more than a window."""
    found = []
    for count in (1, 5, 20):
        of, values = memory(), np.random.default_rng(count)
        cache = of.open()
        for time in range(count):
            state = observe(of, cache, time, values)
        found.append(written(state, cache))
    return found


_MEMORY = memory()


def used(of: Memory) -> list[int]:
    """Return how many pages of each pool somebody holds."""
    return [pool.allocator.usage().used for pool in of.pools]


def run(data: bytes) -> bool:
    """Read a session, and fill its pages; what could be taken over has finite numbers, and every page is given back."""
    try:
        found = loaded(data, _MEMORY)
    except SessionFileError:
        return False
    assert all(np.isfinite(array).all() for array in found.state.values())
    found.close()
    assert not any(used(_MEMORY)), 'pages were lost'
    return True


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a file that is damaged anyhow, or one that is wrong by intent: its checksum is right."""
    choice = random.random()
    if choice < 0.25:
        return mutate.havoc(data, random, corpus)
    length = int.from_bytes(data[:8], 'little')
    text, body = data[8:8 + length], data[8 + length:]
    if choice < 0.65:
        body = _numbers(body, random) if random.random() < 0.7 else mutate.havoc(body, random, [body])
    else:
        text = _changed(text, random)
    return signed(struct.pack('<Q', len(text)) + text + body)


def signed(data: bytes) -> bytes:
    """Return a file with the checksum that is right for it, if it has any."""
    length = int.from_bytes(data[:8], 'little')
    found = _CHECKSUM.search(data, 8, 8 + length)
    if not found:
        return data
    at = found.start(1)
    blank = data[:at] + b'0' * 64 + data[at + 64:]
    return data[:at] + hashlib.sha256(blank).hexdigest().encode() + data[at + 64:]


def _numbers(body: bytes, random: Random) -> bytes:
    """The time comes first in a file and the table of slabs after the state: both are of whole numbers."""
    size = random.choice((4, 8))
    at = random.choice((0, 0, random.randrange(max(1, len(body) // 8)) * 8))
    value = mutate.number(random, 8) if size == 8 else mutate.real(random, '<f')
    return body[:at] + value + body[at + size:]


def _changed(text: bytes, random: Random) -> bytes:
    try:
        header = json.loads(text)
        owner = header[random.choice(list(header))] if random.random() < 0.8 else header
        key = random.choice(list(owner))
        if random.random() < 0.15:
            del owner[key]
        elif random.random() < 0.15:
            owner[random.choice(('x', 'slabs', 'time', 'pages.k'))] = owner[key]
        elif key != 'sha256':
            old = owner[key]
            owner[key] = [random.choice(_VALUES), *old[1:]] if isinstance(old, list) and random.random() < 0.5 else (
                random.choice(_VALUES))
        return json.dumps(header).encode()
    except (ValueError, TypeError, IndexError, AttributeError):
        return b'[' * 30_000 if random.random() < 0.1 else text[:-1]


TARGET = Bytes(seeds, run, inputs=100_000, mutate=damaged, constant=4 * 2 ** 20)

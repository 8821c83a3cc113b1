"""Checkpoints: model.json that says anything, and weights whose header, shapes or bytes are damaged."""
from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from small_model import SMALL, small_model

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError

from . import mutate, recordings
from .harness import Bytes

_LENGTH = struct.Struct('<Q')  # of model.json, and of the header in a file of weights
_SMALLEST = replace(SMALL, name='smallest', image_size=(16, 16), vae_width=4, width=8, depth=1, heads=1, window_frames=4,
                    latent_channels=4)
_VALUES: tuple[Any, ...] = (0, 1, -1, 2, 3, 7, 1000, 2 ** 16, 2 ** 31, 2 ** 63, 2 ** 70, 0.5, -0.0, 1e308, float('nan'),
                            float('inf'),
                            '', 'x', 'F32', 'I64', 'BF16', 'F8_E4M3', None, True, [], {}, [0, 0], [-1, 4], [2 ** 32, 2 ** 32],
                            [[1, 2], 3], ['red'])


def seeds() -> list[bytes]:
    """Return the smallest checkpoint, in float32 and bfloat16: model.json, with its length before it, and the weights."""
    torch.set_num_threads(1)
    found = []
    with recordings.folder() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            checkpoint.save(small_model(0, _SMALLEST), folder, {'trained': False}, dtype)
            file, = folder.glob('*.safetensors')
            found.append(_packed((folder / 'model.json').read_bytes(), file.read_bytes()))
    return found


def run(data: bytes) -> bool:
    """Load the two files."""
    description, weights = _unpacked(data)
    with recordings.folder() as folder:
        (folder / 'model.json').write_bytes(description)
        (folder / 'weights-01.safetensors').write_bytes(weights)
        try:
            checkpoint.load(Path(folder))
        except ModelError:
            return False
    return True


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a checkpoint of which one file says something else, or is damaged anyhow."""
    description, weights = _unpacked(data)
    choice = random.random()
    if choice < 0.5:
        return _packed(_json(description, random, corpus), weights)
    if choice < 0.6:
        return _packed(description, mutate.havoc(weights, random, corpus))
    length, = _LENGTH.unpack_from(weights.ljust(8, b'\0'))
    header, rest = weights[8:8 + length], weights[8 + length:]
    header = _json(header, random, corpus)
    claimed = _LENGTH.pack(len(header)) if random.random() < 0.9 else mutate.number(random, 8)
    return _packed(description, claimed + header + rest)


def _packed(description: bytes, weights: bytes) -> bytes:
    return _LENGTH.pack(len(description)) + description + weights


def _unpacked(data: bytes) -> tuple[bytes, bytes]:
    length, = _LENGTH.unpack_from(data.ljust(8, b'\0'))
    return data[8:8 + length], data[8 + length:]


def _json(text: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return JSON in which something has another value, is gone, is there in addition, or is nested absurdly."""
    if random.random() < 0.15:
        return mutate.havoc(text, random, corpus)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return mutate.havoc(text, random, corpus)
    for _ in range(1 + random.getrandbits(1)):
        owner: Any = content
        while isinstance(owner, (dict, list)) and owner:
            key = random.choice(list(owner)) if isinstance(owner, dict) else random.randrange(len(owner))
            if not isinstance(owner[key], (dict, list)) or not owner[key] or random.random() < 0.2:
                choice = random.random()
                if choice < 0.1:
                    del owner[key]
                elif choice < 0.2 and isinstance(owner, dict):
                    owner[random.choice(('x', 'format', key + 'x'))] = owner[key]
                else:
                    owner[key] = random.choice(_VALUES)
                break
            owner = owner[key]
    written = json.dumps(content).encode()
    if random.random() < 0.02:
        written = written.replace(b'0', b'[' * 100_000, 1)
    return written


TARGET = Bytes(seeds, run, inputs=20_000, mutate=damaged, constant=64 * 2 ** 20, resident=True)

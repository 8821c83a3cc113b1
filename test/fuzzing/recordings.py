"""Small recordings, and what reading one does: every message, then the model's ticks."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from bag_messages import ACTIONS, NS, TYPES, image_message, string

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.problems import BagError, MessageError
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.model.presets import TINY

START = 1_700_000_000 * NS
# Bytes that a recording of any size may take: the largest chunk that is unpacked, and what is read of it.
LARGEST = 320 * 2 ** 20


class Said(NamedTuple):
    """A message of a recording; ``data`` is CDR."""

    topic: str
    type: str
    at: int
    data: bytes


def messages(encoding: str = 'jpeg', count: int = 4) -> list[Said]:
    """Return what a robot says in a few steps, by the time of receipt [ns]."""
    random = np.random.default_rng(0)
    topic, kind = (('/camera/image_raw/compressed', 'sensor_msgs/msg/CompressedImage') if encoding in ('jpeg', 'png')
                   else ('/camera/image_raw', 'sensor_msgs/msg/Image'))
    found = [Said('/goal', 'std_msgs/msg/String', START, TYPES.serialize_cdr(string('red'), 'std_msgs/msg/String'))]
    twist = ACTIONS['TwistStamped']
    for k in range(count):
        at = START + k * NS // 10
        frame = random.integers(0, 256, (8, 8, 3), np.uint8)
        found += [Said(topic, kind, at + 5_000_000, TYPES.serialize_cdr(image_message(frame, at, encoding), kind)),
                  Said('/cmd_vel', twist.type, at + 30_000_000,
                       TYPES.serialize_cdr(twist.make((0.1 * k, -0.2), at), twist.type))]
    return [said._replace(data=bytes(said.data)) for said in found]


@contextmanager
def folder() -> Iterator[Path]:
    """Give a folder in memory, where there is one: a file is written for every input."""
    memory = Path('/dev/shm')
    with TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix='worldmodel_fuzz_') as path:
        yield Path(path)


def read(path: Path) -> bool:
    """Read a bag to its end; return whether there was anything in it."""
    try:
        with open_bag(path) as bag:
            for topic, raw, _ in bag.messages():
                try:
                    bag.deserialize(topic, raw)
                except MessageError:
                    pass
            for tick in read_drive(bag, find_mapping(bag, TINY), TINY):
                assert tick.image.shape == (*TINY.image_size, 3) and np.isfinite(tick.executed).all()
    except BagError:
        return False
    return True

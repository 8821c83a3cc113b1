"""SQLite bags: bytes damaged anywhere, pages and their headers, and rows of types that nobody expects."""
from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from bag_messages import TYPES
from rosbags.rosbag2 import StoragePlugin, Writer

from . import mutate, recordings
from .harness import Bytes

_PAGE = 4096  # bytes
_COLUMNS = {'topics': ('id', 'name', 'type', 'serialization_format', 'offered_qos_profiles'),
            'messages': ('id', 'topic_id', 'timestamp', 'data')}


def seeds() -> list[bytes]:
    """Return recordings of JPEG and of raw images."""
    return [_file(encoding) for encoding in ('jpeg', 'rgb8')]


def _file(encoding: str) -> bytes:
    with recordings.folder() as folder:
        with Writer(folder / 'bag', version=9, storage_plugin=StoragePlugin.SQLITE3) as writer:
            connections = {}
            for said in recordings.messages(encoding):
                if said.topic not in connections:
                    connections[said.topic] = writer.add_connection(said.topic, said.type, typestore=TYPES)
                writer.write(connections[said.topic], said.at, said.data)
        file, = (folder / 'bag').glob('*.db3')
        return file.read_bytes()


def run(data: bytes) -> bool:
    """Read the bytes as a bag's only file."""
    with recordings.folder() as folder:
        path = folder / 'drive.db3'
        path.write_bytes(data)
        return recordings.read(path)


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a file that is damaged anyhow, in the header of a page, or in its rows."""
    choice = random.random()
    if choice < 0.3:
        return mutate.havoc(data, random, corpus)
    if choice < 0.6:
        page = random.randrange(max(1, len(data) // _PAGE)) * _PAGE
        at = page + random.randrange(108 if page == 0 else 40)
        size = random.choice((1, 2, 4))
        return data[:at] + mutate.number(random, size) + data[at + size:]
    with recordings.folder() as folder:
        path = folder / 'drive.db3'
        path.write_bytes(data)
        try:
            _change(path, random)
        except (sqlite3.Error, OverflowError, MemoryError):  # damaged before
            return mutate.havoc(data, random, corpus)
        return path.read_bytes()


def _change(path: Path, random: Random) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for _ in range(1 + random.getrandbits(1)):
            table = random.choice(list(_COLUMNS))
            column = random.choice(_COLUMNS[table])
            value = random.choice((
                None, '', 'x' * 300, '/cmd_vel', 'a/msg/B', b'', b'\x28\xb5\x2f\xfd' + random.randbytes(20), 0.5,
                float('inf'), -1, random.choice(mutate.EDGES) % 2 ** 63, -2 ** 63, random.randbytes(9)))
            choice = random.random()
            if choice < 0.8:
                rows = [row for row, in database.execute(f'SELECT rowid FROM {table}')]
                database.execute(f'UPDATE {table} SET {column} = ? WHERE rowid = ?', (value, random.choice(rows or [0])))
            elif choice < 0.9:
                database.execute(f'ALTER TABLE {table} RENAME COLUMN {column} TO {column}_x')
            else:
                database.execute(f'DROP TABLE {table}')


TARGET = Bytes(seeds, run, inputs=20_000, mutate=damaged, constant=recordings.LARGEST,
               resident=True)

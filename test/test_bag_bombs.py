"""Compressed data that stands for far more than a recording has: it is refused by name, and the rest is read."""
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

import lz4.frame
import pytest
import zstandard
from bags import bag_file, simulated_drive, write_bag
from mcap_forms import write_mcap
from rosbags.rosbag2 import storage_mcap

from worldmodel_ros.bags import unpacking
from worldmodel_ros.bags.mcap_records import read_chunk
from worldmodel_ros.bags.problems import BagError
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.bags.unpacking import TooLarge, unpack

BOMB = 10**9      # bytes
MEMORY = 400e6    # bytes, with the interpreter and its libraries: less than the half of it
CHUNK = 6         # opcode
HEADER = struct.Struct('<BQ')


@lru_cache
def zstd_bomb(known: bool = True) -> bytes:
    """A gigabyte of zeros, in a hundred kilobytes or less; with its size in the header or without."""
    packer = zstandard.ZstdCompressor(level=3).compressobj(size=BOMB if known else -1)
    piece = bytes(10**7)
    packed = b''.join([*(packer.compress(piece) for _ in range(BOMB // len(piece))), packer.flush()])
    assert len(packed) <= 100_000
    return packed


@lru_cache
def lz4_bomb() -> bytes:
    packer = lz4.frame.LZ4FrameCompressor()
    piece = bytes(10**7)
    return b''.join([packer.begin(), *(packer.compress(piece) for _ in range(BOMB // len(piece))), packer.flush()])


BOMBS = {'zstd': zstd_bomb, 'zstd without a size': lambda: zstd_bomb(False), 'lz4': lz4_bomb}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return write_bag(tmp_path_factory.mktemp('bags') / 'whole', simulated_drive())


def with_bomb(path: Path, kind: str, says: int) -> tuple[int, int]:
    """Put a bomb in the place of the third chunk of an MCAP file without index, which says that it has so many bytes;
    return how many messages the file had, and how many were in that chunk."""
    data, position, chunks, messages = path.read_bytes(), 8, 0, []
    while position < len(data) - 8:
        opcode, length = HEADER.unpack_from(data, position)
        end = position + HEADER.size + length
        if opcode == CHUNK:
            messages.append(len(read_chunk(data[position:end]).messages))
            chunks += 1
            if chunks == 3:
                place = position, end
        position = end
    first, last = struct.unpack_from('<QQ', data, place[0] + HEADER.size)
    name, packed = kind.split()[0].encode(), BOMBS[kind]()
    record = struct.pack('<QQQII', first, last, says, 0, len(name)) + name + struct.pack('<Q', len(packed)) + packed
    path.write_bytes(data[:place[0]] + HEADER.pack(CHUNK, len(record)) + record + data[place[1]:])
    return sum(messages), messages[2]


def read_apart(bag: Path) -> tuple[int, float, list[str]]:
    """How many messages a process of its own reads, the most memory that it had [bytes], and the problems it met."""
    # Not ru_maxrss, which a process takes over from the one that started it.
    script = ('import sys; from worldmodel_ros.bags.source import open_bag\n'
              'with open_bag(sys.argv[1]) as bag:\n'
              '    print(sum(1 for _ in bag.messages()))\n'
              '    print(*[1024 * int(line.split()[1]) for line in open("/proc/self/status") if line[:6] == "VmHWM:"])\n'
              '    print(*[f"{p.kind}: {p.text}" for p in bag.problems], sep="\\n")')
    done = subprocess.run([sys.executable, '-c', script, str(bag)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, memory, *problems = done.stdout.splitlines()
    return int(count), float(memory), problems


@pytest.mark.parametrize('says', ['its size', 'little', 'exabytes'])
@pytest.mark.parametrize('kind', BOMBS)
def test_a_chunk_that_unpacks_to_a_gigabyte_costs_itself_only(kind, says, whole, tmp_path):
    path = write_mcap(tmp_path / 'a.mcap', whole, 'no index')
    count, lost = with_bomb(path, kind, {'its size': BOMB, 'little': 16_000, 'exabytes': 2**62}[says])
    read, memory, problems = read_apart(path)
    assert read == count - lost > 0
    assert memory < MEMORY
    assert any(text.startswith('too large: ') and '1 of ' in text and 'the others are read' in text for text in problems)


@pytest.mark.parametrize('kind', ['zstd', 'lz4'])
def test_a_bomb_in_a_file_with_an_index_is_refused_too(kind, whole, tmp_path):
    """Where the library reads chunks by the index, and would unpack what there is."""
    path = write_mcap(tmp_path / 'a.mcap', whole, f'{kind} chunks')
    with open_bag(path) as bag:
        count = sum(1 for _ in bag.messages())
    data = bytearray(path.read_bytes())
    # The first chunk's contents, in place: nothing behind it moves, and the index still holds.
    position = 8
    while data[position] != CHUNK:
        position += HEADER.size + HEADER.unpack_from(data, position)[1]
    length = HEADER.unpack_from(data, position)[1]
    start = position + HEADER.size + 32 + len(kind)
    room = position + HEADER.size + length - start - 8
    bomb = (zstandard.ZstdCompressor(level=3).compress(bytes(2 * 10**7)) if kind == 'zstd' else
            lz4.frame.compress(bytes(room * 150)))
    assert len(bomb) <= room, (len(bomb), room)
    data[start:start + 8] = struct.pack('<Q', len(bomb))
    data[start + 8:start + 8 + len(bomb)] = bomb
    path.write_bytes(data)
    with open_bag(path) as bag:
        assert 0 < sum(1 for _ in bag.messages()) < count
        assert [(p.kind, p.count) for p in bag.problems] == [('too large', 1)]


@pytest.mark.parametrize('kind', BOMBS)
def test_the_library_that_reads_by_the_index_unpacks_within_bounds(kind):
    unpacker = storage_mcap.DECOMPRESSORS[kind.split()[0]]
    for says in (16_000, BOMB, 2**62):
        with pytest.raises(TooLarge):
            unpacker(BOMBS[kind](), says)


@pytest.mark.parametrize('kind', ['zstd', 'zstd without a size'])
def test_a_message_that_unpacks_to_a_gigabyte_costs_itself_only(kind, tmp_path):
    bag = write_bag(tmp_path / 'bag', simulated_drive(), storage='sqlite3', compression='message')
    with closing_database(bag_file(bag)) as database:
        database.execute('UPDATE messages SET data = ? WHERE id IN (3, 5)', (BOMBS[kind](),))
        total, = database.execute('SELECT count(*) FROM messages').fetchone()
    read, memory, problems = read_apart(bag)
    assert read == total - 2
    assert memory < MEMORY
    assert any(text.startswith('packed message: ') and 'unpack to more than' in text for text in problems)


@contextmanager
def closing_database(path: Path):
    """A database whose changes are committed at the end."""
    with closing(sqlite3.connect(path)) as database, database:
        yield database


def test_damaged_packed_messages_are_counted_and_the_others_read(tmp_path):
    bag = write_bag(tmp_path / 'bag', simulated_drive(), storage='sqlite3', compression='message')
    with closing_database(bag_file(bag)) as database:
        database.execute("UPDATE messages SET data = x'28b52ffd20ff' WHERE id IN (3, 4, 5)")
        total, = database.execute('SELECT count(*) FROM messages').fetchone()
    with open_bag(bag) as opened:
        for _ in range(2):
            assert sum(1 for _ in opened.messages()) == total - 3
            assert sum(problem.count for problem in opened.problems if problem.kind == 'packed message') == 3


def test_a_file_that_is_packed_as_a_whole_fills_no_disk(whole, tmp_path, monkeypatch):
    path = tmp_path / 'a.mcap.zstd'
    real = write_mcap(tmp_path / 'a.mcap', whole, 'no index').read_bytes()
    path.write_bytes(zstandard.ZstdCompressor().compress(real) + zstd_bomb())
    (tmp_path / 'a.mcap').unlink()
    monkeypatch.setattr(unpacking, 'FILE_BASE', 10**7)
    with open_bag(path) as bag:
        assert sum(1 for _ in bag.messages()) > 0, 'what comes before is read'
        text = next(problem.text for problem in bag.problems if problem.kind == 'too large')
        assert 'unpacks to more than' in text and 'zstd -d' in text
    monkeypatch.setattr(unpacking, 'DISK_LEFT', 2**60)
    with pytest.raises(BagError, match='no room for it on the disk'):
        open_bag(path)


def test_a_frame_that_wants_much_memory_for_its_window_is_refused():
    packer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=31))
    packer = packer.compressobj()
    with pytest.raises(zstandard.ZstdError, match='memory'):
        unpack(packer.compress(bytes(2**20)) + packer.flush(), 'zstd', 2**22)


@pytest.mark.parametrize('pack', [zstandard.ZstdCompressor().compress, lz4.frame.compress])
def test_what_is_as_large_as_allowed_is_unpacked_and_a_byte_more_is_not(pack):
    compression = 'lz4' if pack is lz4.frame.compress else 'zstd'
    for size in (0, 1, 2**20, 2**20 + 1):
        assert unpack(pack(bytes(size)), compression, size) == bytes(size)
        with pytest.raises(TooLarge, match=f'unpack to more than {size}$'):
            unpack(pack(bytes(size + 1)), compression, size)

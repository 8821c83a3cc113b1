"""Stores of slabs: what each of them does, whatever it lies on, and what is found of it after a kill."""
import errno
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from worldmodel_ros.cache.stores import host
from worldmodel_ros.cache.stores.blob import Corrupt, decode, encode
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.host import HostStore, PinnedMemory
from worldmodel_ros.cache.stores.measured import FEWEST, FRESH, MeasuredStore
from worldmodel_ros.cache.stores.objects import ObjectStore
from worldmodel_ros.cache.stores.protocol import AlreadyStored, NotStored, StoreError, check_key
from worldmodel_ros.cache.stores.tiered import TieredStore

MAKERS = {
    'host': lambda path: HostStore(), 'pinned': lambda path: HostStore(PinnedMemory(2**20)),
    'files': FileStore,
    'memory files': lambda path: FileStore(path, durable=False),
    'objects': lambda path: ObjectStore(path.as_uri()),
    'objects in memory': lambda path: ObjectStore('memory:///'),
    'tiers': lambda path: TieredStore([FileStore(path / 'disk'), ObjectStore((path / 'bucket').as_uri())], 1000),
    'measured': lambda path: MeasuredStore(FileStore(path)),
}


@pytest.fixture(params=MAKERS)
def store(request, tmp_path):
    (tmp_path / 'bucket').mkdir()
    made = MAKERS[request.param](tmp_path)
    yield made
    made.close()


def put(store, **blobs):
    store.put([(key.replace('__', '/'), (blob,)) for key, blob in blobs.items()]).result()


def test_what_was_put_in_parts_is_there_as_one(store):
    store.put([('a/slabs/1', (b'one', bytearray(b'two'), memoryview(b'three'))), ('a/slabs/2', ())]).result()
    assert [bytes(blob) for blob in store.get(['a/slabs/2', 'a/slabs/1']).result()] == [b'', b'onetwothree']
    assert store.head(['a/slabs/1', 'a/slabs/2', 'a/slabs/3']).result() == [11, 0, None]


@pytest.mark.parametrize('kind', ['host', 'tiers'])
def test_other_threads_run_python_while_a_blob_is_copied(kind, tmp_path):
    store = HostStore() if kind == 'host' else TieredStore([HostStore()], 10**9)
    blob, ran, over = memoryview(np.ones(2 * 10**8, np.uint8)), [], threading.Event()

    def run():
        while not over.wait(0.0005):
            ran.append(time.perf_counter())
    other = threading.Thread(target=run)
    other.start()
    try:
        most = 0
        for number in range(8):  # on a busy machine it may get no core now and then; while Python is locked it never does
            begun = time.perf_counter()
            store.put([(f'a/slabs/{number}', (b'header', blob))]).result()
            ended = time.perf_counter()
            most = max(most, sum(begun < when < ended for when in ran))
            store.delete([f'a/slabs/{number}']).result()
            if most > 10:
                break
    finally:
        over.set()
        other.join()
    assert most > 10


def test_keys_are_listed_in_order_below_a_prefix_of_whole_names(store):
    put(store, b__2=b'x', b__10=b'x', b__c__1=b'x', bb__1=b'x')
    assert store.list('b').result() == ['b/10', 'b/2', 'b/c/1']
    assert store.list('nothing').result() == []


def test_what_is_not_there_is_said_and_its_deletion_is_no_error(store):
    put(store, a__1=b'x')
    with pytest.raises(NotStored, match='a/2'):
        store.get(['a/1', 'a/2']).result()
    store.delete(['a/1', 'a/2']).result()
    assert store.list('a').result() == [] and store.head(['a/1']).result() == [None]
    put(store, a__1=b'again')
    assert bytes(store.get(['a/1']).result()[0]) == b'again'


def test_of_many_that_make_one_key_exactly_one_does(store):
    together = threading.Barrier(8)

    def create(number):
        together.wait()
        try:
            store.put([('s/claims/1', (str(number).encode(),))], create=True).result()
            return number
        except AlreadyStored:
            return None
    with ThreadPoolExecutor(8) as threads:
        makers = [number for number in threads.map(create, range(8)) if number is not None]
    assert len(makers) == 1
    assert bytes(store.get(['s/claims/1']).result()[0]) == str(makers[0]).encode()


@pytest.mark.parametrize('key', ['', '/', 'a/', '/a', '../a', 'a/../b', '.parts/a', 'a//b', 'a b', 'a/b/c/d/e/f', 'x' * 129,
                                 'a\n'])
def test_a_key_that_is_none_is_refused_before_anything_is_done(key, store, tmp_path):
    with pytest.raises(ValueError, match='is no key'):
        check_key(key)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(ValueError, match='is no key'):
        store.put([(key, (b'x',))]).result()
    assert sorted(tmp_path.rglob('*')) == before


def test_blobs_of_a_folder_that_is_not_there_now_are_not_taken_for_lost(tmp_path):
    store = FileStore(tmp_path / 'store')
    store.put([('a/1', [b'x'])]).result()
    (tmp_path / 'store').rename(tmp_path / 'elsewhere')  # as where a disk is not mounted
    (tmp_path / 'store').mkdir()
    with pytest.raises(StoreError, match='is not there, or is another one') as caught:
        store.get(['a/1']).result()
    assert not isinstance(caught.value, NotStored)
    (tmp_path / 'store').rmdir()
    (tmp_path / 'elsewhere').rename(tmp_path / 'store')
    assert bytes(store.get(['a/1']).result()[0]) == b'x'


def test_files_are_this_users_alone_and_links_are_not_followed(tmp_path):
    store, outside = FileStore(tmp_path / 'store'), tmp_path / 'secret'
    outside.write_bytes(b'secret')
    put(store, a__1=b'x')
    assert (store.path / 'a/1').stat().st_mode & 0o777 == 0o600
    assert (store.path / 'a').stat().st_mode & 0o777 == 0o700
    (store.path / 'a/2').symlink_to(outside)
    with pytest.raises(StoreError):
        store.get(['a/2']).result()
    assert store.head(['a/2']).result() == [None]
    store.close()


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch):
    store = FileStore(tmp_path)

    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr('worldmodel_ros.cache.stores.files.os.fsync', full)
    with pytest.raises(StoreError, match='No space left'):
        put(store, a__1=b'x')
    assert [path for path in tmp_path.rglob('*') if path.is_file()] == []
    store.close()


KILLED = '''
import sys
from pathlib import Path
from worldmodel_ros.cache.stores.files import FileStore
store = FileStore(Path(sys.argv[1]))
print('ready', flush=True)
number = 0
while True:
    number += 1
    store.put([(f's/{number % 50:02d}/{k}', (bytes([number % 256]) * 300_000,)) for k in range(4)]).result()
'''


def test_a_folder_that_cannot_be_flushed_fails_the_put_as_any_other_error_of_the_disk(tmp_path, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(os, 'fsync', fsync)
    store = FileStore(tmp_path)
    with pytest.raises(StoreError, match='robot/claims/1 cannot be flushed to the disk: .*Input/output error'):
        store.put([('robot/claims/1', (b'me',))], create=True).result(60)
    store.close()


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blobs_alone(tmp_path):
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, '-c', KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        threading.Event().wait(0.05 + 0.037 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        store = FileStore(tmp_path)
        blobs = [bytes(blob) for blob in store.get(store.list('s').result()).result()]
        store.close()
        assert blobs
        for blob in blobs:
            assert len(blob) == 300_000 and blob == blob[:1] * 300_000


# --- tiers ---

def tiers(tmp_path, capacity):
    disk = FileStore(tmp_path / 'disk')
    return TieredStore([disk], capacity), disk


def test_what_is_read_from_the_disk_is_in_memory_afterwards(tmp_path):
    store, disk = tiers(tmp_path, 100)
    disk.put([('a/1', (b'x' * 40,))]).result()
    for _ in range(2):
        assert bytes(store.get(['a/1']).result()[0]) == b'x' * 40
    assert (store.hits, store.misses, store.host_nbytes) == (1, 1, 40)
    store.close()


def test_a_read_ends_when_the_next_store_is_closed(tmp_path):
    disk, bucket = FileStore(tmp_path / 'disk', durable=False), FileStore(tmp_path / 'bucket', durable=False)
    put(bucket, a__1=b'blob')
    bucket.close()
    with pytest.raises(RuntimeError, match='shutdown'):
        TieredStore([disk, bucket], 100).get(['a/1']).result(30.0)
    disk.close()


def test_what_host_memory_has_no_room_for_is_stored_and_read_all_the_same(tmp_path):
    def no_memory(nbytes):
        raise MemoryError
    store = TieredStore([FileStore(tmp_path, durable=False)], 1000, no_memory)
    store.put([('a/b', (b'blob',))]).result(60)
    assert bytes(store.get(['a/b']).result(60)[0]) == b'blob' and store.host_nbytes == 0
    store.close()


def test_the_session_that_is_expected_last_leaves_memory_first_and_is_still_on_the_disk(tmp_path):
    store, _ = tiers(tmp_path, 100)
    for session, when in (('soon', 1.0), ('late', 9.0), ('never', math.inf)):
        store.expect(session, when)
        store.put([(f'{session}/1', (b'x' * 30,))]).result()
    store.put([('new/1', (b'x' * 30,))]).result()
    assert store.host_nbytes == 90
    store.get(['soon/1', 'late/1', 'new/1']).result()
    assert store.misses == 0
    store.get(['never/1']).result()
    assert store.misses == 1
    store.put([('large/1', (b'x' * 101,))]).result()  # it would drive out all others
    assert store.host_nbytes <= 100 and len(store.get(['large/1']).result()[0]) == 101
    store.close()


# --- time ---

def test_what_is_read_lies_in_the_memory_that_it_was_given_and_stays_while_it_is_in_use(tmp_path):
    """As pages do that a GPU copies from page-locked memory while their session leaves the host's memory."""
    given = []

    def allocate(nbytes):
        given.append(np.zeros(nbytes, np.uint8))
        return memoryview(given[-1])
    store = TieredStore([FileStore(tmp_path, durable=False)], 10, allocate)
    store.put([('a/x', (b'0123', b'4567'))]).result()
    blob, = store.get(['a/x']).result()
    assert blob.readonly and np.shares_memory(np.frombuffer(blob, np.uint8), given[0])
    store.put([('b/x', (b'abcdefgh',))]).result()  # there is no room for both
    assert store.host_nbytes == 8 and bytes(blob) == b'01234567'
    again, = store.get(['a/x']).result()  # from the disk, and into other memory
    assert bytes(again) == b'01234567' == bytes(blob)
    assert again.readonly and np.shares_memory(np.frombuffer(again, np.uint8), given[-1])
    store.close()


@pytest.fixture
def page_locked(monkeypatch):
    """As on a machine with a GPU, whose driver has no more than two parts of 1 MiB."""
    left = [None, None]

    def empty(*size, pin_memory=False, empty=torch.empty, **options):
        if pin_memory and not left:
            raise RuntimeError('out of memory')
        if pin_memory:
            left.pop()
        return empty(*size, **options)
    monkeypatch.setattr(torch, 'empty', empty)
    monkeypatch.setattr(host, '_PART', 2**20)


def test_page_locked_memory_is_taken_at_once_given_out_and_taken_back(page_locked):
    memory = host.PinnedMemory(2**22)
    assert memory.nbytes == 2**21

    def locked(blob):
        return any(np.shares_memory(np.frombuffer(blob, np.uint8), part) for part in memory._parts)
    blobs = [memory(500_000) for _ in range(4)]
    for number, blob in enumerate(blobs):
        blob[:] = bytes([number]) * 500_000
    assert all(map(locked, blobs)) and not locked(memory(500_000)) and len(memory(500_000)) == 500_000
    array = np.frombuffer(blobs[1][10:20].toreadonly(), np.uint8)  # refers to it as arrays of a slab do
    del blob, blobs[:2]
    assert not locked(memory(1_000_000))  # there is room for it, in two pieces
    assert bytes(array) == b'\1' * 10
    del array
    assert locked(memory(1_000_000)) and [set(blob) for blob in blobs] == [{2}, {3}]
    for _ in range(100):
        assert locked(memory(1_000_000))
    blobs.clear()
    kept = memory(1)
    assert memory._free == [(0, 4096, 2**20), (1, 0, 2**20)] and locked(kept)


def test_without_page_locked_memory_it_is_ordinary_memory():
    if not torch.cuda.is_available():
        memory = host.PinnedMemory(2**20)
        assert memory.nbytes == 0 and len(memory(5)) == 5


def test_a_url_of_no_object_store_is_refused_in_one_line():
    with pytest.raises(StoreError, match=r'^s4://x is no object store such as s3://bucket/folder: [^\n]+$'):
        ObjectStore('s4://x')


def test_reading_is_predicted_from_what_was_measured_and_not_before(tmp_path):
    now = 0.0
    store = MeasuredStore(FileStore(tmp_path), lambda: now)
    store.put([('a/large', (bytes(1_000_000),)), ('a/small', (b'x',))]).result()
    for _ in range(FEWEST):
        assert store.predicted(1_000_000) is None
        store.get(['a/large']).result()
        store.get(['a/small']).result()
    one, many = store.predicted(1_000_000), store.predicted(100_000_000)
    assert 0 < one < many and many > 50 * (one - store.predicted(0))
    assert store.bandwidth > 0
    now = FRESH + 1.0  # a store that was slow is tried again
    assert store.predicted(1_000_000) is None
    store.close()


# --- blobs ---

ARRAYS = {'k': np.arange(24, dtype=np.float32).reshape(2, 3, 4), 'n': np.array([7], np.int64), 'b': np.zeros((0, 5), np.uint8)}


def test_arrays_come_back_as_they_were():
    parts, name = encode({'number': 3}, ARRAYS)
    about, arrays = decode(memoryview(b''.join(parts)), 'it', name)
    assert about == {'number': 3} and arrays.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], array)
        assert arrays[key].dtype == array.dtype


def test_any_bit_that_is_another_is_noticed():
    parts, name = encode({'number': 3}, ARRAYS)
    blob = bytearray(b''.join(parts))
    for at in range(len(blob)):
        blob[at] ^= 1 << at % 8
        with pytest.raises(Corrupt, match='it is damaged'):
            decode(memoryview(blob), 'it', name)
        blob[at] ^= 1 << at % 8
    for cut in (0, 1, len(blob) // 2, len(blob) - 1):
        with pytest.raises(Corrupt):
            decode(memoryview(blob[:cut]), 'it', name)

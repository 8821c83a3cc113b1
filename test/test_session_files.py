"""Saved sessions: what a peer may name, what a damaged file does (nothing), and what the engine's thread is spared."""
import contextlib
import hashlib
import json
import os
import threading
import time
from concurrent.futures import Future as Promise
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_model import SMALL, small_checkpoint, small_model

from worldmodel_ros.cache import snapshot
from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.engine import load, session_folder, session_transfer
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder, check_name
from worldmodel_ros.engine.session_transfer import Transfer
from worldmodel_ros.model import checkpoint

NAME = 's.safetensors'
SEEN = 9  # frames: more than the window


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def engine(model):
    return load(str(model), 'torch', sessions=4)


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8)


def driven(engine, count=SEEN):
    session = engine.open_session()
    for frame in frames(count):
        session.observe(frame, np.array([0.1, 0.2]))
    return session


def at_once(session):
    """Has the engine's thread, which is this one, do things as soon as they are asked for."""
    def call(function):
        promise = Promise()
        try:
            promise.set_result(function(session))
        except Exception as error:
            promise.set_exception(error)
        return promise
    return call


@pytest.fixture(scope='module')
def saved(engine, tmp_path_factory):
    """The bytes of a saved session."""
    path = tmp_path_factory.mktemp('saved') / NAME
    driven(engine).save(path)
    return path.read_bytes()


def signed(data: bytes) -> bytes:
    """A file whose checksum is right, whatever is in it."""
    length = 8 + int.from_bytes(data[:8], 'little')
    found = json.loads(data[8:length])['__metadata__']['sha256'].encode()
    blank = data[:length].replace(found, b'0' * 64)
    return data[:length].replace(found, hashlib.sha256(blank + data[length:]).hexdigest().encode()) + data[length:]


def changed(data: bytes, **values: np.ndarray) -> bytes:
    """A file with other numbers in some tensors, and the checksum of these."""
    length = 8 + int.from_bytes(data[:8], 'little')
    header, body = json.loads(data[8:length]), bytearray(data[length:])
    for name, array in values.items():
        begin, end = header[name.replace('__', '.')]['data_offsets']
        assert end - begin == array.nbytes
        body[begin:end] = array.tobytes()
    return signed(data[:length] + body)


def described(data: bytes, change) -> bytes:
    """A file with another header."""
    length = 8 + int.from_bytes(data[:8], 'little')
    header = json.loads(data[8:length])
    change(header)
    text = json.dumps(header).encode()
    return signed(len(text).to_bytes(8, 'little') + text + data[length:])


@contextlib.contextmanager
def unharmed(engine):
    """A session that is to be as it was, and to drive on."""
    session, untouched = driven(engine), driven(engine)
    used = engine.memory.pool.allocator.usage().used
    yield session
    assert engine.memory.pool.allocator.usage().used == used
    for each in (session, untouched):
        each.observe(frames(1, seed=5)[0], np.zeros(2))
    np.testing.assert_array_equal(session.plan('red'), untouched.plan('red'))
    actions = np.zeros((SMALL.chunk_frames, 2), np.float32)
    np.testing.assert_array_equal(session.imagine(actions).latents, untouched.imagine(actions).latents)


# --- names and the folder ---

@pytest.mark.parametrize('name', [
    '', '.', '..', NAME + '\n', '/etc/' + NAME, '../' + NAME, '..safetensors', '~/' + NAME, '~' + NAME, 'a/' + NAME,
    'a\\' + NAME, '.hidden.safetensors', '-rf.safetensors', 'a\0.safetensors', 'größe.safetensors', 'a b.safetensors',
    'weights.json', 'x' * 89 + '.safetensors', 'x' * 10**6])
def test_names_that_are_more_than_names_are_refused_with_what_is_allowed(name, tmp_path):
    folder = SessionFolder(tmp_path / 'sessions')
    for call in (lambda: folder.save(name, 1, lambda file: file.write(b'x')), lambda: folder.load(name, lambda *_: None)):
        with pytest.raises(SessionFileError, match='without a folder, at most 100 characters of a-z, A-Z, 0-9') as refused:
            call()
        assert len(str(refused.value)) < 500
    assert not list(tmp_path.rglob('*'))
    check_name('x' * 88 + '.safetensors')


def test_links_are_neither_read_nor_written_through(tmp_path):
    folder, outside = SessionFolder(tmp_path / 'sessions'), tmp_path / 'weights-01.safetensors'
    folder.path.mkdir()
    outside.write_bytes(b'weights')
    (folder.path / NAME).symlink_to(outside)
    os.mkfifo(folder.path / 'pipe.safetensors')
    (folder.path / 'folder.safetensors').mkdir()
    for name in (NAME, 'pipe.safetensors', 'folder.safetensors'):
        with pytest.raises(SessionFileError, match='links are not followed|is no file'):
            folder.load(name, lambda file, size: file.read())
        with pytest.raises(SessionFileError, match='is there, and is no file'):
            folder.save(name, 1, lambda file: file.write(b'x'))
    assert outside.read_bytes() == b'weights' and (folder.path / NAME).is_symlink()


def test_a_folder_has_room_for_so_many_sessions_and_so_many_bytes(tmp_path):
    folder = SessionFolder(tmp_path, max_files=2, max_mb=1e-3)
    for name in ('a.safetensors', 'b.safetensors'):
        assert folder.save(name, 400, lambda file: file.write(bytes(400))) == 400
    with pytest.raises(SessionFileError, match='2 sessions, and session_files_max is 2'):
        folder.save('c.safetensors', 1, lambda file: file.write(b'x'))
    folder.save('b.safetensors', 500, lambda file: file.write(bytes(500)))  # in place of the former one
    with pytest.raises(SessionFileError, match='session_disk_mb is 0.001'):
        folder.save('b.safetensors', 700, lambda file: file.write(bytes(700)))
    assert sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir()) == [
        ('a.safetensors', 400), ('b.safetensors', 500)]


@pytest.mark.parametrize('failing', ['write', 'fsync', 'replace'])
def test_a_save_that_fails_leaves_the_former_file_and_no_other(failing, tmp_path, monkeypatch):
    folder = SessionFolder(tmp_path)
    folder.save(NAME, 6, lambda file: file.write(b'former'))

    def fail(*_, **__):
        raise OSError(28, 'No space left on device')
    if failing != 'write':
        monkeypatch.setattr(session_folder.os, failing, fail)
    with pytest.raises(SessionFileError, match='No space left on device'):
        folder.save(NAME, 6, fail if failing == 'write' else lambda file: file.write(b'newer!'))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(NAME, b'former')]


def test_what_a_process_that_died_left_unfinished_is_removed_in_time(tmp_path):
    for name, age in (('.old.safetensors.1.2.part', 3600.0), ('.new.safetensors.1.2.part', 1.0)):
        (tmp_path / name).write_bytes(b'part')
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    SessionFolder(tmp_path).save(NAME, 1, lambda file: file.write(b'x'))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['.new.safetensors.1.2.part', NAME]


# --- damaged files ---

def test_a_saved_session_is_a_safetensors_file_and_goes_on_where_it_was(engine, saved, tmp_path):
    (tmp_path / NAME).write_bytes(saved)
    assert load_file(tmp_path / NAME)['time'] == [SEEN - 1]
    restored, session = engine.open_session(), driven(engine)
    took = Transfer(engine, at_once(restored)).load(SessionFolder(tmp_path), NAME)
    assert 'of the engine\'s thread' in took
    for frame in frames(2 * SMALL.window_frames, seed=3):
        for each in (session, restored):
            each.observe(frame, np.zeros(2))
        np.testing.assert_array_equal(session.plan('red'), restored.plan('red'))
    restored.save(tmp_path / NAME)


def test_a_flip_of_any_byte_is_noticed(engine, saved, tmp_path):
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(saved[:8], 'little')
    places = [*range(header), *rng.integers(header, len(saved), 150).tolist(), len(saved) - 1]
    with unharmed(engine) as session:
        transfer = Transfer(engine, at_once(session))
        for place in places:
            damaged = bytearray(saved)
            damaged[place] ^= 1 << int(rng.integers(8))
            (tmp_path / NAME).write_bytes(damaged)
            with pytest.raises(SessionFileError):
                transfer.load(SessionFolder(tmp_path), NAME)


def test_a_file_that_is_cut_off_or_has_more_is_refused(engine, saved, tmp_path):
    with unharmed(engine) as session:
        for length in (0, 1, 7, 8, 9, 100, len(saved) // 2, len(saved) - 1):
            (tmp_path / NAME).write_bytes(saved[:length])
            with pytest.raises(SessionFileError, match='not a saved session'):
                session.load(tmp_path / NAME)
        (tmp_path / NAME).write_bytes(saved + b'\0')
        with pytest.raises(SessionFileError, match='not a saved session'):
            session.load(tmp_path / NAME)


NUMBERS = {
    'NaN in the latent': lambda d: changed(d, latent=np.full(tensor(d, 'latent').shape, np.nan, np.float32)),
    'infinite features': lambda d: changed(d, features=np.full(tensor(d, 'features').shape, np.inf, np.float32)),
    'NaN in the pages': lambda d: changed(d, pages__k=np.full(tensor(d, 'pages.k').shape, np.nan, np.float32)),
    'a time before the first': lambda d: changed(d, time=np.array([-1])),
    'a time that overflows': lambda d: changed(d, time=np.array([2**62])),
    'a time that will overflow, of slabs that agree with it': lambda d: changed(
        d, time=tensor(d, 'time') + 2**31, slabs=tensor(d, 'slabs') + [[2**31, 0, 0, 0]]),
    'another time than the pages': lambda d: changed(d, time=np.array([SEEN])),
    'slabs of nowhere': lambda d: changed(d, slabs=tensor(d, 'slabs') - [[2**62, 0, 0, 0]]),
    'slabs in no order': lambda d: changed(d, slabs=np.ascontiguousarray(tensor(d, 'slabs')[::-1])),
    'a slab twice': lambda d: changed(d, slabs=np.maximum(tensor(d, 'slabs'), tensor(d, 'slabs')[1])),
    'slabs of long ago': lambda d: changed(d, slabs=tensor(d, 'slabs') - [[1, 0, 0, 0]], time=np.array([SEEN + 10])),
    'a gap': lambda d: changed(d, slabs=tensor(d, 'slabs') - [[1 - (n > 0), 0, 0, 0] for n in range(len(tensor(d, 'slabs')))]),
    'more valid frames than there are': lambda d: changed(d, slabs=tensor(d, 'slabs') + [[0, 2**40, 0, 0]]),
    'frames that nobody observed': lambda d: changed(d, slabs=tensor(d, 'slabs') - [[0, 0, 1, 0]]),
    'a tier that is not there': lambda d: changed(d, slabs=tensor(d, 'slabs') + [[0, 0, 0, 1]]),
}


def tensor(data: bytes, name: str) -> np.ndarray:
    length = 8 + int.from_bytes(data[:8], 'little')
    entry = json.loads(data[8:length])[name]
    dtype = {'F32': np.float32, 'I64': np.int64}[entry['dtype']]
    begin, end = entry['data_offsets']
    return np.frombuffer(data[length + begin:length + end], dtype).reshape(entry['shape'])


@pytest.mark.parametrize('damage', NUMBERS)
def test_numbers_that_no_session_has_change_nothing_though_their_checksum_is_right(damage, engine, saved, tmp_path):
    assert signed(saved) == saved
    (tmp_path / NAME).write_bytes(NUMBERS[damage](saved))
    with unharmed(engine) as session, pytest.raises(SessionFileError, match='not a saved session'):
        session.load(tmp_path / NAME)


HEADERS = {
    'time is a float': lambda h: h['time'].update(dtype='F64'),
    'features of another type': lambda h: h['features'].update(dtype='I32'),
    'features of another shape': lambda h: h['features'].update(shape=h['features']['shape'][::-1]),
    'a tensor of exabytes': lambda h: h['latent'].update(shape=[2**60, 2**60]),
    'no numbers in a dimension beyond all': lambda h: h['latent'].update(shape=[2**70, 0], data_offsets=[0, 0]),
    'offsets beyond the end': lambda h: h['latent'].update(data_offsets=[0, 2**63]),
    'tensors on top of each other': lambda h: h['latent'].update(data_offsets=h['features']['data_offsets']),
    'a tensor more': lambda h: h.update(more={'dtype': 'U8', 'shape': [0], 'data_offsets': [0, 0]}),
    'a tensor less': lambda h: h.pop('encoder_state'),
    'bool for a number': lambda h: h['time'].update(shape=[True]),
    'a list for a description': lambda h: h.update(time=[]),
    'no checksum': lambda h: h['__metadata__'].update(checksum=h['__metadata__'].pop('sha256')),
}


@pytest.mark.parametrize('damage', HEADERS)
def test_a_header_that_is_not_that_of_a_session_changes_nothing_and_takes_no_memory(damage, engine, saved, tmp_path):
    length = 8 + int.from_bytes(saved[:8], 'little')
    header = json.loads(saved[8:length])
    HEADERS[damage](header)
    text = json.dumps(header).encode()
    (tmp_path / NAME).write_bytes(len(text).to_bytes(8, 'little') + text + saved[length:])
    with unharmed(engine) as session, pytest.raises(SessionFileError, match='not a saved session'):
        session.load(tmp_path / NAME)


@pytest.mark.parametrize('text', [b'[' * 60_000, b'{}', b'[]', b'null', b'{"__metadata__": 1}', b'\xff' * 100,
                                  b'{"a": ' + b'9' * 5000 + b'}'])
def test_a_header_that_is_no_header_is_refused(text, engine, tmp_path):
    (tmp_path / NAME).write_bytes(len(text).to_bytes(8, 'little') + text)
    with pytest.raises(SessionFileError, match='not a saved session'):
        engine.open_session().load(tmp_path / NAME)


def test_a_file_larger_than_the_model_needs_is_not_even_read(engine, tmp_path):
    with (tmp_path / NAME).open('wb') as file:
        file.truncate(2**40)  # a hole, which takes no disk
    reads = []
    with pytest.raises(SessionFileError, match=f'{2**40} bytes, and a session of this model at most'):
        SessionFolder(tmp_path).load(NAME, lambda file, size: engine.read_session(
            SimpleNamespace(read=reads.append, readinto=reads.append), size))
    assert not reads


def test_a_session_of_other_weights_is_refused(saved, tmp_path, engine):
    checkpoint.save(small_model(seed=7), tmp_path / 'other', {'trained': False})
    other = load(str(tmp_path / 'other'), 'torch')
    assert other.fingerprint != engine.fingerprint
    (tmp_path / NAME).write_bytes(saved)
    with unharmed(other) as session, pytest.raises(SessionFileError, match='its preset or its weights are others'):
        session.load(tmp_path / NAME)


def test_a_session_of_a_former_format_is_refused_with_what_to_do(engine, saved, tmp_path):
    (tmp_path / NAME).write_bytes(described(saved, lambda header: header['__metadata__'].update(format='2')))
    with unharmed(engine) as session, pytest.raises(SessionFileError, match='format 2, which has no checksum.*save a new'):
        session.load(tmp_path / NAME)


# --- next to ticks ---

def test_what_is_saved_is_the_session_at_one_moment_though_it_goes_on_meanwhile(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, 'PIECE', 1)  # a page at a time
    session, still = driven(engine), driven(engine)
    capture, upcoming = session.capture(), iter(frames(200, seed=4))
    for _ in capture.pieces():
        session.observe(next(upcoming), np.zeros(2))
    with (tmp_path / NAME).open('wb') as file:
        capture.write(file)
    restored = engine.open_session()
    restored.load(tmp_path / NAME)
    np.testing.assert_array_equal(restored.plan('red'), still.plan('red'))


def test_pages_that_a_session_needed_meanwhile_are_not_saved_as_if_they_were_its_own(model, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, 'PIECE', 1)
    engine = load(str(model), 'torch', sessions=1)
    session = driven(engine)
    hoard = engine.memory.pool.allocator.lease()
    hoard.allocate(engine.memory.pool.allocator.usage().free - 1)
    pieces = session.capture().pieces()
    next(pieces)
    with pytest.raises(OutOfPages):
        for frame, _ in zip(frames(9, seed=2), pieces):
            session.observe(frame, np.zeros(2))


def test_nothing_but_the_fork_and_the_takeover_is_done_by_the_thread_of_the_engine(engine, tmp_path, monkeypatch):
    folder, session = SessionFolder(tmp_path), driven(engine)
    waits, threads = [], {}

    def noting(name, function):
        def call(*arguments, **options):
            threads.setdefault(name, set()).add(threading.current_thread())
            return function(*arguments, **options)
        return call
    storage = engine.memory.pool.storage
    for owner, name in ((storage, 'dump'), (storage, 'load'), (storage, 'finite'), (hashlib, 'sha256'),
                        (session_folder.os, 'fsync'), (session, 'capture'), (session, 'restore')):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    over = threading.Event()

    def work():
        while not over.is_set() or waits:
            if waits:
                function, promise = waits.pop(0)
                promise.set_result(function(session))
            time.sleep(0.0005)
    own = threading.Thread(target=work)
    own.start()

    def call(function):
        promise = Promise()
        waits.append((function, promise))
        return promise
    try:
        Transfer(engine, call).save(folder, NAME)
        Transfer(engine, call).load(folder, NAME)
    finally:
        over.set()
        own.join()
    assert {name: ran == {own} for name, ran in threads.items()} == {
        'dump': False, 'load': False, 'finite': False, 'sha256': False, 'fsync': False, 'capture': True, 'restore': True}
    assert all(own not in ran for name, ran in threads.items() if name not in ('capture', 'restore'))


def test_a_load_that_nobody_waits_for_any_more_does_not_come_late(engine, saved, tmp_path):
    (tmp_path / NAME).write_bytes(saved)
    asked = []

    def never(function):
        promise = Promise()
        promise.set_running_or_notify_cancel()
        asked.append(function)
        return promise
    with unharmed(engine) as session:
        with pytest.raises(SessionFileError, match='it has begun, and was not finished within 0.2 s'):
            Transfer(engine, never, patience=0.2).load(SessionFolder(tmp_path), NAME)
        with pytest.raises(SessionFileError, match='given up'):
            asked[0](session)


def test_without_memory_next_to_questions_a_load_says_so(model, saved, tmp_path):
    engine = load(str(model), 'torch', sessions=1)
    (tmp_path / NAME).write_bytes(saved)
    session = driven(engine)
    hoard = engine.memory.pool.allocator.lease()
    hoard.allocate(engine.memory.pool.allocator.usage().free - 1)
    with pytest.raises(SessionFileError, match='no memory next to the questions in progress: try again'):
        Transfer(engine, at_once(session)).load(SessionFolder(tmp_path), NAME)
    session.observe(frames(1)[0], np.zeros(2))


def test_storages_of_a_device_are_copied_by_its_thread_in_pieces(engine, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(engine.memory.pool.storage, 'on_host', False)
    monkeypatch.setattr(snapshot, 'PIECE', engine.memory.pool.storage.page_bytes * 2)
    session, folder = driven(engine), SessionFolder(tmp_path)
    took = Transfer(engine, at_once(session)).save(folder, NAME)
    assert (tmp_path / NAME).read_bytes() == saved
    # The fork, then two pages at a time, then the end.
    assert f' in {1 + -(-SMALL.window_frames // 2) + 1} parts' in took
    Transfer(engine, at_once(session)).load(folder, NAME)
    assert session_transfer.PATIENCE == 5.0

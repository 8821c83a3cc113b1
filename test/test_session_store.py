"""Sessions in stores: what is stored of them, what comes back, and that nothing damaged does."""
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.cache.stores import blob
from worldmodel_ros.cache.stores.blob import Corrupt
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.cache.stores.objects import ObjectStore
from worldmodel_ros.cache.stores.protocol import AlreadyStored, NotStored, StoreError
from worldmodel_ros.cache.stores.tiered import TieredStore
from worldmodel_ros.engine import load, session_store
from worldmodel_ros.engine.session_folder import SessionFileError
from worldmodel_ros.engine.session_store import (
    Fenced, SessionLog, check_session, claim, claim_next, forget, manifests, owner_of, read_newest)

SESSIONS = 17
WINDOW = 16
STORES = {'host': lambda path: HostStore(), 'files': FileStore, 'objects': lambda path: ObjectStore(path.as_uri()),
          'tiers': lambda path: TieredStore([FileStore(path)], 10**8)}


@pytest.fixture(scope='module')
def engine():
    return load('tiny', 'onnx', sessions=SESSIONS)


@pytest.fixture
def store(tmp_path):
    made = FileStore(tmp_path, durable=False)
    yield made
    made.close()


def frames(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)


def drive(session, count, seed=0):
    for number, frame in enumerate(frames(count, seed)):
        session.observe(frame, np.array([0.1, 0.02 * number], np.float32))
    return session


def stored(log, session, **about):
    checkpoint = log.checkpoint(session.capture(), about)
    for _ in checkpoint.pieces():
        pass
    return checkpoint.write()


def resumed(engine, store, name='robot', into=None):
    """A session that goes on from a store."""
    session, coming = engine.open_session(), engine.stored_session(store)
    try:
        manifest, wrong = read_newest(store, name, coming)
        for _ in coming.pieces():
            pass
        session.restore(coming)
    finally:
        coming.close()
    return session, manifest, wrong


@pytest.mark.parametrize('way', ['store', 'file'])
def test_pages_that_are_filled_wait_for_passes_that_still_write_to_them(engine, store, tmp_path, monkeypatch, way):
    session, said = drive(engine.open_session(), 5), []
    stored(SessionLog(store, 'robot', 1), session)
    session.save(tmp_path / 'file')
    storage, written = type(engine.memory.pool.storage), {'store': 'load_later', 'file': 'load'}[way]
    load_pages = getattr(storage, written)
    monkeypatch.setattr(storage, written, lambda *what: said.append('written') or load_pages(*what))
    monkeypatch.setattr(engine.memory, 'before_writing', lambda: said.append('waited'))
    if way == 'store':
        resumed(engine, store)[0].close()
    else:
        other = engine.open_session()
        other.load(tmp_path / 'file')
        other.close()
    session.close()
    assert 'written' in said
    assert all(before == 'waited' for before, what in zip(said, said[1:]) if what == 'written') and said[0] == 'waited'


def chunk(session):
    """All that a session answers with: the plan, and every number of the future that it leads to."""
    plan = session.plan('red')
    future = session.imagine(plan)
    return plan, future.latents, future.collision_risk, np.array(list(future.progress.values())), session.decode(future)


def assert_equal(one, other):
    for left, right in zip(chunk(one), chunk(other), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize('kind', STORES)
@pytest.mark.parametrize('seen, groups', [(3, 1), (WINDOW + 5, 3)])
def test_a_session_that_comes_back_answers_bit_for_bit_as_if_it_had_never_gone(engine, kind, seen, groups, tmp_path):
    store = STORES[kind](tmp_path)
    session = drive(engine.open_session(), seen)
    manifest = stored(SessionLog(store, 'robot', 1, groups), session, note='here')
    again, found, wrong = resumed(engine, store)
    assert found == manifest and wrong == [] and found.about == {'note': 'here'}
    assert again.frames_seen == seen
    assert_equal(session, again)
    for each in (session, again):
        drive(each, WINDOW + 2, seed=5)
    assert_equal(session, again)
    store.close()


def test_only_what_is_new_is_stored(engine, store):
    session, log = drive(engine.open_session(), WINDOW + 1), SessionLog(store, 'robot', 1)
    first = stored(log, session)
    whole = log.nbytes
    drive(session, 1, seed=1)
    checkpoint = log.checkpoint(session.capture(), {})
    assert len(list(checkpoint.pieces())) == 0  # one turn of the engine's thread
    second = checkpoint.write()
    page = first.slabs[0].nbytes
    assert whole >= WINDOW * page and log.nbytes - whole < 2 * page
    assert second.version == first.version + 1
    assert first.slabs[1:] == second.slabs[:-1]


@pytest.mark.parametrize('groups', [1, 3])
def test_what_no_manifest_names_any_more_is_deleted_but_with_history(engine, store, groups):
    session = drive(engine.open_session(), WINDOW)
    logs = [SessionLog(store, 'robot', 1, groups), SessionLog(store, 'logbook', 1, groups, history=True)]
    for seed in range(4):
        drive(session, 1, seed)
        written = [stored(log, session) for log in logs]
    assert len(store.list('robot/manifests').result()) == 2
    assert len(store.list('robot/slabs').result()) == groups * (len(written[0].slabs) + 1)
    assert len(store.list('robot/states').result()) == 2
    assert len(store.list('logbook/slabs').result()) == groups * (len(written[1].slabs) + 3)
    forget(store, 'robot')
    assert store.list('robot').result() == []
    with pytest.raises(NotStored, match='robot is not in the store'):
        resumed(engine, store)


class Losing(FileStore):
    """A store whose answer to a put is lost: before or after it has done it, or after another claimant was faster."""

    lost = ''

    def put(self, items, create=False):
        if create and self.lost:
            if self.lost == 'another':
                super().put([(key, (b'{"owner": "b"}',)) for key, _ in items], create=True).result()
            elif self.lost == 'after':
                super().put(items, create=True).result()
            raise StoreError('the connection was lost')
        return super().put(items, create)


@pytest.mark.parametrize('lost, error, owner', [
    ('before', 'connection was lost', (0, '')), ('after', '', (1, 'a')), ('another', 'is there already', (1, 'b'))])
def test_a_claim_whose_answer_is_lost_is_known_all_the_same(tmp_path, lost, error, owner):
    store = Losing(tmp_path, durable=False)
    store.lost = lost
    with pytest.raises(StoreError, match=error) if error else contextlib.nullcontext():
        claim(store, 'robot', 1, 'a')
    assert owner_of(store, 'robot') == owner
    store.close()


@pytest.mark.parametrize('damaged', [b'', b'[]', b'{}', b'\xff'])
def test_a_claim_that_is_damaged_counts_and_the_session_can_be_opened(store, damaged):
    claim(store, 'robot', 1, 'a')
    (store.path / 'robot/claims/00000001').write_bytes(damaged)
    assert owner_of(store, 'robot') == (1, 'unknown')
    assert claim_next(store, 'robot', 'b') == 2 and owner_of(store, 'robot') == (2, 'b')


@pytest.mark.parametrize('damaged', [False, True])
def test_nothing_that_former_owners_stored_is_left_once_it_is_no_longer_named(engine, store, damaged):
    session, log = drive(engine.open_session(), WINDOW), SessionLog(store, 'robot', 1)
    for generation in (2, 3, 4):
        for seed in range(2):
            manifest = stored(log, drive(session, 1, seed))
        if damaged:
            place = store.path / manifests_of(store)[0]
            place.write_bytes(place.read_bytes()[:-1] + b'?')
        log = SessionLog(store, 'robot', generation, known=manifest)
    for seed in range(2):
        stored(log, drive(session, 1, seed))
    named = set().union(*(each.keys for each in manifests(store, 'robot')))
    assert len(manifests_of(store)) == 2
    if not damaged:  # what a damaged one named is not known
        assert {*store.list('robot/states').result(), *store.list('robot/slabs').result()} == named
    assert resumed(engine, store)[2] == []


def manifests_of(store):
    return store.list('robot/manifests').result()


def test_a_former_owner_of_another_name_keeps_what_it_has_stored(engine, store):
    known = stored(SessionLog(store, 'scene', 1), drive(engine.open_session(), WINDOW))
    session, _, _ = resumed(engine, store, 'scene')
    log = SessionLog(store, 'robot', 2, known=known)
    for seed in range(3):
        stored(log, drive(session, 1, seed))
    assert resumed(engine, store, 'scene')[1] == known


def test_an_earlier_state_that_is_loaded_from_a_file_is_stored_again(engine, store, tmp_path):
    stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), WINDOW))
    session, manifest, _ = resumed(engine, store)
    session.save(tmp_path / 'file')
    log = SessionLog(store, 'robot', 2, known=manifest)
    for seed in range(WINDOW + 3):
        stored(log, drive(session, 1, seed))
    session.load(tmp_path / 'file')
    stored(log, session)
    again, _, wrong = resumed(engine, store)
    assert wrong == [] and again.frames_seen == WINDOW


def test_who_goes_on_stores_only_what_is_new_and_in_another_session_too(engine, store):
    stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), WINDOW))
    for name in ('robot', 'other'):
        session, manifest, _ = resumed(engine, store)
        drive(session, 1, seed=3)
        log = SessionLog(store, name, 2, index=engine.slab_index, known=manifest)
        later = stored(log, session)
        assert log.nbytes < 2 * manifest.slabs[0].nbytes
        assert later.slabs[:-1] == manifest.slabs[-len(later.slabs) + 1:]
        assert_equal(session, resumed(engine, store, name)[0])


def test_who_has_come_back_stores_no_slab_again_that_it_has_not_changed(engine, store, monkeypatch):
    log = SessionLog(store, 'robot', 1)
    manifest = stored(log, drive(engine.open_session(), WINDOW))
    session, twin, coming = engine.open_session(), drive(engine.open_session(), WINDOW), engine.stored_session(store)
    coming.read(manifest)
    for _ in coming.pieces():
        pass
    session.restore(coming)
    log.came_back(manifest, coming.uses)
    storage, dumped, before = engine.memory.pool.storage, [], log.nbytes
    monkeypatch.setattr(storage, 'dump', lambda ids, dump=storage.dump: dumped.append(ids) or dump(ids))
    for each in (session, twin):
        drive(each, 1, seed=3)
    later = stored(log, session)
    assert len(dumped) == 1  # nothing else is copied from the pages, or hashed
    assert log.nbytes - before < 2 * manifest.slabs[0].nbytes
    assert later.slabs[:-1] == manifest.slabs[-len(later.slabs) + 1:]
    engine.slab_index.__init__()
    assert_equal(twin, resumed(engine, store)[0])


@pytest.fixture
def slow_device(engine, monkeypatch):
    """Pages that are filled only when somebody waits for them, as those of a device that copies by itself may be, and while
    ``go_on`` is set. ``started``: those that are being filled."""
    storage, device = engine.memory.pool.storage, SimpleNamespace(started=[], go_on=threading.Event())
    device.go_on.set()

    def load_later(ids, groups):
        storage.clear(ids)

        def start():
            device.started.append(ids)

            def wait():
                assert device.go_on.wait(30.0)
                device.started[:] = [each for each in device.started if each is not ids]
                storage.load(ids, {name: np.concatenate([each[name] for each in groups], 1) for name in groups[0]})
            return wait
        return start
    monkeypatch.setattr(storage, 'load_later', load_later)
    engine.slab_index.__init__()
    return device


def test_a_session_takes_over_pages_only_when_the_device_has_filled_them(engine, store, slow_device):
    session = drive(engine.open_session(), 5)
    stored(SessionLog(store, 'robot', 1), session)
    again = resumed(engine, store)[0]  # of a caller that does not wait itself
    assert slow_device.started == []
    assert_equal(session, again)


def test_nobody_shares_pages_that_the_device_has_yet_to_fill(engine, store, slow_device):
    manifest = stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), 5))
    first, second, third = (engine.stored_session(store) for _ in range(3))
    first.read(manifest)
    for _ in first.pieces():
        pass
    second.read(manifest)
    assert second.shared_slabs == 0
    first.settle()
    third.read(manifest)
    assert slow_device.started == [] and third.shared_slabs == 5
    for each in (first, second, third):
        each.close()


def test_a_session_is_read_where_there_is_no_room_for_others_to_give_up_the_pages_that_it_would_share(engine, store):
    engine.slab_index.__init__()
    session = drive(engine.open_session(), 5)
    manifest = stored(SessionLog(store, 'robot', 1, index=engine.slab_index), session)
    everything, coming, taken = engine.memory.pool.allocator.lease(), engine.stored_session(store), []
    with pytest.raises(OutOfPages):
        while True:
            taken.append(everything.allocate(1))
    try:
        coming.read(manifest)
        assert (coming.shared_slabs, coming.left) == (0, 5)
        with pytest.raises(OutOfPages):
            list(coming.pieces())
        drive(session, 2 * WINDOW)  # all of its pages are others now
    finally:
        coming.close()
        everything.release(np.concatenate(taken))


@pytest.mark.parametrize('way', ['closed', 'read again'])
def test_pages_that_the_device_still_writes_to_are_not_given_to_another(engine, store, slow_device, way, monkeypatch):
    log, session = SessionLog(store, 'robot', 1), drive(engine.open_session(), WINDOW)
    coming, lease_of = engine.stored_session(store), []
    coming.read(stored(log, session))
    for _ in coming.pieces():
        pass
    assert slow_device.started == []  # the engine's thread has not even started it
    slow_device.go_on.clear()
    filling = threading.Thread(target=coming.settle)
    filling.start()
    while len(slow_device.started) < WINDOW:
        time.sleep(0.001)
    held = coming._cache.lease(0)
    let_go = type(held._allocator)._let_go
    monkeypatch.setattr(type(held._allocator), '_let_go', lambda self, lease, ids: (
        lease_of.append(len(slow_device.started)) if lease is held else None, let_go(self, lease, ids))[1])
    later = stored(log, drive(session, 2, seed=4))
    timer = threading.Timer(0.05, slow_device.go_on.set)
    timer.start()
    if way == 'closed':
        coming.close()
    else:
        coming.read(later)  # two slabs have left its window
    filling.join()
    engine.memory.pool.allocator.usage()  # takes what was given back
    assert lease_of and not any(lease_of)
    coming.close()


def test_pages_that_are_given_up_before_the_device_has_begun_to_fill_them_stay_as_they_are(engine, store, slow_device):
    manifest = stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), 3))
    coming = engine.stored_session(store)
    coming.read(manifest)
    for _ in coming.pieces():
        pass
    slow_device.go_on.clear()  # would never end
    coming.close()
    coming.settle()
    assert slow_device.started == []


@pytest.mark.parametrize('kind, hashed', [('host', 0), ('tiers', 0), ('files', 4)])
def test_what_stays_in_this_process_is_hashed_once_and_what_is_read_from_a_disk_each_time(engine, tmp_path, kind, hashed,
                                                                                          monkeypatch):
    store = STORES[kind](tmp_path)
    twin, session = (drive(engine.open_session(), 3) for _ in range(2))
    stored(SessionLog(store, 'robot', 1), session)
    session.close()
    engine.slab_index.__init__()
    digests = []
    monkeypatch.setattr(blob, 'digest', lambda *parts, digest=blob.digest: digests.append(digest(*parts)) or digests[-1])
    assert_equal(twin, resumed(engine, store)[0])
    assert len(digests) == hashed  # three slabs and the state
    store.close()


def test_memory_that_was_checked_is_no_excuse_for_what_came_in_its_place():
    known, checked = blob.Intact(), memoryview(b'what was checked')
    known.add(checked, 'digest')
    assert known.has(checked, 'digest') and not known.has(checked, 'other')
    assert not known.has(memoryview(b'what was checked'), 'digest')
    known.add(memoryview(bytearray(3)), 'digest')  # may be written to, and is gone
    del checked
    assert not known._known


def test_pages_that_have_another_use_by_now_are_stored_whatever_their_slab_was(engine, store):
    log = SessionLog(store, 'robot', 1)
    manifest, session = stored(log, drive(engine.open_session(), 3)), engine.open_session()
    for _ in range(2):  # a first life in pages that a second one gets, with other frames of the same numbers
        coming = engine.stored_session(store)
        coming.read(manifest)
        for _ in coming.pieces():
            pass
        session.restore(coming)
        log.came_back(manifest, coming.uses)
        session.reset()
        drive(session, 3, seed=8)
    later = stored(log, session)
    assert not {slab.content for slab in later.slabs} & {slab.content for slab in manifest.slabs}
    assert_equal(session, resumed(engine, store)[0])


# --- layer groups ---

def keys_of(manifest):
    return {len(slab.keys) for slab in manifest.slabs}


def test_a_slab_has_as_many_layer_groups_as_its_size_is_worth(engine, store, monkeypatch):
    session = drive(engine.open_session(), 2)
    slab = stored(SessionLog(store, 'robot', 1), session).slabs[0]
    assert len(slab.keys) == 1  # a small model's
    layers = next(iter(engine.memory.pool.storage.forms().values()))[0][0]
    for nbytes, groups in ((slab.nbytes // 3, 2), (1, min(8, layers))):
        monkeypatch.setattr(session_store, '_GROUP', nbytes)
        name = f'robot{groups}'
        assert keys_of(stored(SessionLog(store, name, 1), session)) == {groups}
        engine.slab_index.__init__()
        assert_equal(session, resumed(engine, store, name)[0])


def test_who_goes_on_from_slabs_of_one_group_stores_none_of_them_again_and_new_ones_in_several(engine, store):
    manifest = stored(SessionLog(store, 'robot', 1, groups=1), drive(engine.open_session(), WINDOW))
    engine.slab_index.__init__()
    session, coming = engine.open_session(), engine.stored_session(store)
    coming.read(manifest)
    for _ in coming.pieces():
        pass
    session.restore(coming)
    log = SessionLog(store, 'robot', 2, groups=3, index=engine.slab_index, known=manifest)
    log.came_back(manifest, coming.uses)
    drive(session, 1, seed=3)
    later = stored(log, session)
    assert later.slabs[:-1] == manifest.slabs[-len(later.slabs) + 1:] and len(later.slabs[-1].keys) == 3
    engine.slab_index.__init__()
    assert_equal(session, resumed(engine, store)[0])


def test_slabs_of_several_groups_are_shared_and_those_that_are_known_are_not_stored_again(engine, store):
    live = drive(engine.open_session(), 5)
    manifest = stored(SessionLog(store, 'robot', 1, groups=3, index=engine.slab_index), live)
    coming = engine.stored_session(store)
    coming.read(manifest)
    assert coming.shared_slabs == 5 and coming.read_nbytes == manifest.state_nbytes
    coming.close()
    log = SessionLog(store, 'other', 1, groups=3, known=manifest)  # dumps and hashes them: it was not told their pages
    assert stored(log, resumed(engine, store)[0]).slabs == manifest.slabs
    assert store.list('other/slabs').result() == []


@pytest.mark.parametrize('change', ['other order', 'one missing', 'one twice', 'none'])
def test_layer_groups_that_are_not_all_layers_in_order_are_refused(engine, store, change):
    manifest = stored(SessionLog(store, 'robot', 1, groups=2), drive(engine.open_session(), 2))
    first, *rest = manifest.slabs
    one, two = first.keys
    keys = {'other order': (two, one), 'one missing': (one,), 'one twice': (one, one), 'none': ()}[change]
    engine.slab_index.__init__()
    coming = engine.stored_session(store)
    with pytest.raises(Corrupt, match='not all of its layers, in order'):
        coming.read(replace(manifest, slabs=(replace(first, keys=keys), *rest)))
    coming.close()


@pytest.mark.parametrize('kind', ['files', 'host', 'tiers'])
@pytest.mark.parametrize('groups', [1, 3])
@pytest.mark.parametrize('damage', [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_never_taken_over(engine, tmp_path, kind, groups, damage):
    store = STORES[kind](tmp_path)
    session = drive(engine.open_session(), 3)
    checkpoint = SessionLog(store, 'robot', 1, groups, engine.slab_index).checkpoint(session.capture(), {})
    for _ in checkpoint.pieces():
        pass
    checkpoint._slabs[1][2]['v'][0, -1, -1, -1, -1] = damage  # in the last layer
    manifest = checkpoint.write()
    for _ in range(2):  # what was read once is not trusted either
        coming = engine.stored_session(store)
        with pytest.raises(Corrupt, match='slab 1 has numbers that are not finite'):
            coming.read(manifest)
        coming.close()
    store.close()


@pytest.mark.parametrize('busy', [('_hashing',), ('_hashing', '_urgent')])
def test_a_session_of_which_one_slab_is_new_does_not_queue_behind_others(engine, store, busy):
    session, log = drive(engine.open_session(), WINDOW), SessionLog(store, 'robot', 1, groups=3)
    engine.slab_index.__init__()
    coming = engine.stored_session(store)
    coming.read(stored(log, session))
    for _ in coming.pieces():
        pass
    drive(session, 1, seed=1)
    go_on = threading.Event()
    others = [getattr(session_store, threads).submit(go_on.wait, 60.0) for threads in busy for _ in range(16)]
    try:
        before = time.monotonic()
        manifest = stored(log, session)
        assert len(manifest.slabs[-1].keys) == 3
        coming.read(manifest)
        assert time.monotonic() - before < 30.0 and not any(other.done() for other in others)
    finally:
        go_on.set()
        coming.close()


def test_a_slab_that_could_not_be_stored_is_stored_with_the_next_checkpoint(engine):
    class Failing(HostStore):
        broken = True

        def put(self, items, create=False):
            if self.broken and any('/slabs/01/' in key for key, _ in items):
                raise StoreError('the network is away')
            return super().put(items, create)
    store = Failing()
    session, log = drive(engine.open_session(), 2), SessionLog(store, 'robot', 1, groups=2)
    with pytest.raises(StoreError, match='the network is away'):
        stored(log, session)
    store.broken = False
    stored(log, session)
    engine.slab_index.__init__()
    assert_equal(session, resumed(engine, store)[0])


# --- damage ---

def test_every_blob_that_is_damaged_is_noticed_and_the_complete_session_before_it_comes_back(engine, store):
    session, log = drive(engine.open_session(), 4), SessionLog(store, 'robot', 1, groups=2)
    before = stored(log, session)
    twin = drive(engine.open_session(), 4)
    drive(session, 1, seed=2)
    newest = stored(log, session)
    key, _ = newest.encode()
    new = sorted((newest.keys - before.keys) | {key})
    assert len(new) == 4  # two layer groups of a slab, the state, the manifest
    engine.slab_index.__init__()  # what is in memory needs no reading, and so cannot be found damaged
    rng = np.random.default_rng(0)
    for name in new:
        file = store.path / name
        whole = file.read_bytes()
        for damage in ('flip', 'cut', 'gone'):
            if damage == 'flip':
                at = int(rng.integers(len(whole)))
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1:])
            elif damage == 'cut':
                file.write_bytes(whole[:len(whole) // 2])
            else:
                file.unlink()
            engine.slab_index.__init__()
            back, found, wrong = resumed(engine, store)
            assert found == before and back.frames_seen == 4
            assert (wrong == []) == (damage == 'gone' and name == key), wrong
            assert_equal(back, twin)
        file.write_bytes(whole)
    assert resumed(engine, store)[1] == newest


def test_a_session_of_which_nothing_is_whole_is_refused_and_no_pages_are_lost(engine, store):
    manifest = stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), 2))
    engine.slab_index.__init__()
    (store.path / manifest.slabs[0].keys[0]).write_bytes(b'')
    used = engine.memory.pool.allocator.usage().used
    with pytest.raises(NotStored, match='is damaged: its SHA-256'):
        resumed(engine, store)
    assert engine.memory.pool.allocator.usage().used == used


def test_a_blob_that_is_whole_and_another_than_its_manifest_says_is_refused(engine, store):
    manifest = stored(SessionLog(store, 'robot', 1), drive(engine.open_session(), 3))
    one, two, *_ = manifest.slabs
    swapped = [type(one)(**{**vars(one), 'keys': two.keys}), *manifest.slabs[1:]]
    engine.slab_index.__init__()
    coming = engine.stored_session(store)
    with pytest.raises(Corrupt, match='another slab than its manifest says'):
        coming.read(type(manifest)(**{**vars(manifest), 'slabs': tuple(swapped)}))
    with pytest.raises(Corrupt, match='table of slabs'):
        coming.read(type(manifest)(**{**vars(manifest), 'slabs': manifest.slabs[:-1]}))
    with pytest.raises(SessionFileError, match='of other weights'):
        coming.read(type(manifest)(**{**vars(manifest), 'fingerprint': '0' * 64}))
    coming.close()


WRITER = '''
import sys
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import SessionLog
from test_session_store import drive, stored
engine = load('tiny', 'onnx', sessions=1)
store, session = FileStore(Path(sys.argv[1])), engine.open_session()
log = SessionLog(store, 'robot', 1, groups=3)
seed = 0
while True:
    drive(session, 1, seed)
    manifest = stored(log, session, seed=seed)
    print(seed, flush=True)
    seed += 1
'''


@pytest.mark.slow
def test_a_process_that_is_killed_in_mid_write_leaves_its_last_complete_session(engine, tmp_path):
    for attempt in range(4):
        path = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, '-c', WRITER, str(path), str(Path(__file__).parent)],
                                   stdout=subprocess.PIPE, text=True)
        said = -1
        for _ in range(3 + 5 * attempt):
            said = int(process.stdout.readline())
        time.sleep(0.013 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].split()
        said = int(rest[-1]) if rest else said
        store = FileStore(path)
        back, manifest, wrong = resumed(engine, store)
        assert wrong == []
        assert manifest.about['seed'] in (said, said + 1)  # what was said to be stored, or one more
        twin = engine.open_session()
        for seed in range(manifest.about['seed'] + 1):
            drive(twin, 1, seed)
        assert_equal(back, twin)
        store.close()


# --- owners ---

@pytest.mark.parametrize('kind', STORES)
def test_one_owner_at_a_time_and_the_former_one_can_store_nothing_more(engine, kind, tmp_path):
    store = STORES[kind](tmp_path)
    assert owner_of(store, 'robot') == (0, '')
    assert claim_next(store, 'robot', 'a') == 1
    session, log = drive(engine.open_session(), 2), SessionLog(store, 'robot', 1)
    stored(log, session)
    claim(store, 'robot', 2, 'b')
    with pytest.raises(AlreadyStored):
        claim(store, 'robot', 2, 'a')
    with pytest.raises(Fenced, match='owned by b'):
        claim(store, 'robot', 1, 'a')
    assert owner_of(store, 'robot') == (2, 'b')
    with pytest.raises(Fenced):
        stored(log, session)
    with pytest.raises(Fenced):
        log.require_own()
    assert claim_next(store, 'robot', 'a') == 3
    assert len(list(manifests(store, 'robot'))) == 1
    store.close()


def test_what_a_fenced_owner_still_writes_is_older_than_all_of_the_new_one(engine, store):
    session = drive(engine.open_session(), 2)
    old, new = SessionLog(store, 'robot', 1), SessionLog(store, 'robot', 2)
    for _ in range(3):
        stored(old, session)
    twin = drive(engine.open_session(), 2)
    newer = stored(new, drive(session, 1, seed=8))
    stored(old, twin)  # nothing is claimed: as if the claim came between its look and its put
    assert next(manifests(store, 'robot')) == newer


@pytest.mark.parametrize('name', ['', '..', 'a/b', '.a', 'a' * 65, 'a b', 'a\n'])
def test_a_name_that_is_none_is_refused(name, store):
    with pytest.raises(ValueError, match='is no name of a session'):
        check_session(name)
    with pytest.raises(ValueError, match='is no name of a session'):
        SessionLog(store, name, 1)


# --- sharing ---

def test_sixteen_sessions_on_one_prefix_hold_no_more_pages_than_one(engine, store):
    allocator = engine.memory.pool.allocator
    scene = drive(engine.open_session(), WINDOW + 3)
    stored(SessionLog(store, 'scene', 1), scene)
    gc.collect()  # sessions of other tests give their pages back with it
    before = allocator.usage().used
    first = resumed(engine, store, 'scene')[0]
    one = allocator.usage().used - before
    others = [resumed(engine, store, 'scene')[0] for _ in range(15)]
    assert one > 0
    assert allocator.usage().used - before <= 1.1 * one
    # Each goes on by itself: what it writes is its own, and what it read is as it was.
    twins = [first, *others]
    for seed, session in enumerate(twins[:4]):
        drive(session, 2, seed)
    for seed, session in enumerate(twins[:4]):
        alone = drive(drive(engine.open_session(), WINDOW + 3), 2, seed) if allocator.usage().free > 200 else None
        if alone:
            assert_equal(session, alone)
    assert_equal(twins[4], scene)


def test_a_live_session_shares_with_who_is_restored_from_what_it_stored(engine, store):
    live = drive(engine.open_session(), 5)
    manifest = stored(SessionLog(store, 'robot', 1, index=engine.slab_index), live)
    coming = engine.stored_session(store)
    coming.read(manifest)
    assert coming.shared_slabs == 5 and coming.read_nbytes == manifest.state_nbytes
    coming.close()


def test_pages_that_were_given_to_another_are_not_found(engine, store):
    session = drive(engine.open_session(), 3)
    manifest = stored(SessionLog(store, 'robot', 1, index=engine.slab_index), session)
    twin = drive(engine.open_session(), 3)
    session.reset()
    drive(session, 3, seed=9)  # takes the pages that were freed
    coming = engine.stored_session(store)
    coming.read(manifest)
    assert coming.shared_slabs == 0
    coming.close()
    assert_equal(resumed(engine, store)[0], twin)


def test_shared_pages_do_not_promise_room_that_is_not_there(engine, store):
    """Sessions that share a prefix may all go apart: their guarantees hold nevertheless."""
    small = load('tiny', 'onnx', sessions=3)
    stored(SessionLog(store, 'scene', 1), drive(small.open_session(), WINDOW))
    sessions = [resumed(small, store, 'scene')[0] for _ in range(3)]
    extra = []
    with pytest.raises(RuntimeError):
        for _ in range(10):
            extra.append(small.open_session())
    twins = [*sessions, *extra]
    for seed, session in enumerate(twins):
        drive(session, WINDOW + 2, seed)  # none is short of pages
    usage = small.memory.pool.allocator.usage()
    assert usage.used <= usage.pages


def test_a_later_manifest_is_read_on_top_of_an_earlier_one(engine, store):
    session, log = drive(engine.open_session(), WINDOW + 1), SessionLog(store, 'robot', 1)
    first = stored(log, session)
    engine.slab_index.__init__()
    coming = engine.stored_session(store)
    coming.read(first)
    for _ in coming.pieces():
        pass
    drive(session, 2, seed=4)
    last = stored(log, session)
    coming.read(last)
    assert coming.read_nbytes == last.state_nbytes + 2 * last.slabs[0].nbytes
    for _ in coming.pieces():
        pass
    target = engine.open_session()
    target.restore(coming)
    assert_equal(session, target)


def test_a_store_that_fails_says_so_and_the_session_goes_on(engine, tmp_path):
    class Failing(HostStore):
        def put(self, items, create=False):
            if any('/states/' in key for key, _ in items):
                raise StoreError('the network is away')
            return super().put(items, create)
    session, failing = drive(engine.open_session(), 2), Failing()
    with pytest.raises(StoreError, match='the network is away'):
        stored(SessionLog(failing, 'robot', 1), session)
    assert failing.list('robot/manifests').result() == []
    drive(session, 1)

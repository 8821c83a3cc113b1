"""What a server keeps of its sessions: with a real service and a real model, and stores that a test can break."""
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.cache.stores.protocol import AlreadyStored, StoreError
from worldmodel_ros.clocks import Moment
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import Fenced, claim, manifests, owner_of
from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings
from worldmodel_ros.serving.fleet.move import MoveError, move
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.messages import ServiceFull, Tick
from worldmodel_ros.serving.service.service import Service, ServiceSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def served():
    """A service, and its engine."""
    engine = load('tiny', 'onnx', sessions=7)
    service = Service(engine, settings=ServiceSettings(sessions=6, pictures=False))
    service.start()
    yield service, engine
    service.stop()


class Robot:
    """A listener that ticks."""

    def __init__(self, service, seed=0):
        self.service, self.replies, self.come = service, [], threading.Condition()
        self.rng, self.number, self.sequence = np.random.default_rng(seed), 0, 0

    def replied(self, reply):
        with self.come:
            self.replies.append(reply)
            self.come.notify_all()

    def pictured(self, picture):
        pass

    def failed(self, reason, error):
        raise error

    def tick(self):
        self.sequence += 1
        image = self.rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        executed = self.rng.uniform(-0.2, 0.5, 2).astype(np.float32)
        self.service.tick(self.number, Tick(image, executed, time.monotonic() + 600.0, self.sequence, self.sequence, 1, 'red'))
        with self.come:
            assert self.come.wait_for(lambda: self.replies and self.replies[-1].sequence == self.sequence, 120.0)
        reply = self.replies[-1]
        assert reply.tier is not Tier.NONE, reply.reason
        return reply


def keeper_of(served, store, address='/here', **settings):
    service, engine = served
    engine.slab_index.__init__()
    return Keeper(service, engine, store, address, KeeperSettings(**{'period': 0.0, 'patience': 60.0, **settings}))


def opened(keeper, served, name='robot', seed=0, robot=None):
    robot = robot or Robot(served[0], seed)
    kept = keeper.open(robot, name, name)
    robot.number = kept.number
    return robot, kept


def test_a_session_that_ends_is_stored_and_goes_on_where_it_ended(served):
    store = HostStore()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    twin, other = opened(keeper, served, 'twin')
    for each in (robot, twin):
        each.tick()
        each.tick()
    keeper.end(kept)
    keeper.end(kept)  # twice is once
    robot, kept = opened(keeper, served, robot=robot)
    assert (kept.frames, kept.generation) == (2, 2)
    np.testing.assert_array_equal(robot.tick().plan, twin.tick().plan)
    keeper.end(kept)
    keeper.end(other)
    keeper.close()


def test_a_session_whose_robot_is_gone_is_neither_claimed_nor_read(served):
    store = HostStore()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.tick()
    keeper.end(kept)
    assert keeper.open(robot, 'robot', 'robot', lambda: False) is None
    assert owner_of(store, 'robot') == (1, '/here') and served[0].stats()['sessions'] == 0
    keeper.close()


def test_it_is_stored_while_it_ticks_and_no_more_often_than_it_is_to_be(served):
    store = HostStore()
    keeper = keeper_of(served, store, period=1e6)
    robot, kept = opened(keeper, served)
    robot.tick()
    keeper.ticked(kept)
    keeper.ticked(kept)
    keeper.submit(lambda: None).result(60)
    end = time.monotonic() + 60
    while not keeper.status().get('stored') and time.monotonic() < end:
        time.sleep(0.01)
    keeper.ticked(kept)
    assert keeper.status()['stored'] == 1 and len(list(manifests(store, 'robot'))) == 1
    keeper.end(kept)
    keeper.close()


@pytest.mark.parametrize('settings, why', [({'within': 0.0}, 'would take'), ({'longest_gap': 0.0}, 'has not ticked for')])
def test_a_session_that_takes_too_long_or_is_too_old_begins_anew_and_is_not_read(served, settings, why, caplog, tmp_path):
    store = FileStore(tmp_path, durable=False)
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.tick()
    keeper.end(kept)
    for _ in range(5):
        keeper.store.get(store.list('robot/slabs').result()).result()
    strict = keeper_of(served, store, **settings)
    strict.store = keeper.store  # with what was measured
    time.sleep(0.01)
    _, kept = opened(strict, served)
    assert kept.frames == 0 and strict.status()['refused'] == 1 and why in caplog.text
    strict.end(kept, store=False)
    keeper.close()
    strict.close()
    store.close()


@pytest.mark.parametrize('passes, set_by, boot, older, frames', [
    (5.0, -86_400.0, 'this', False, 1), (5.0, 3600.0, 'this', False, 1), (310.0, 0.0, 'this', False, 0),
    (290.0, 0.0, 'next', False, 1), (310.0, 0.0, 'next', False, 0), (0.0, -20.0, 'next', False, 1),
    (0.0, -40.0, 'next', False, 0), (290.0, 0.0, 'this', True, 1), (310.0, 0.0, 'this', True, 0)])
def test_a_session_goes_on_if_its_last_tick_is_not_long_ago_whatever_sets_the_clock(
        served, monkeypatch, passes, set_by, boot, older, frames):
    """``passes`` s go by, in part while the session is open; then the clock is set. ``older``: it was stored by a server that
    wrote down the wall clock only."""
    clocks = SimpleNamespace(at=1.7e9, since_boot=6000.0, boot='this')
    monkeypatch.setattr(Moment, 'now', lambda: Moment(**vars(clocks)))
    if older:
        monkeypatch.setattr(Moment, 'to_dict', lambda moment: {'at': moment.at})
    store = HostStore()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.service = SimpleNamespace(tick=lambda number, tick: keeper.tick(kept, tick))
    robot.tick()
    keeper.end(kept)
    kept = keeper.open(robot, 'robot', 'robot')
    clocks.at, clocks.since_boot = clocks.at + passes, clocks.since_boot + passes
    keeper.end(kept)  # it has not ticked since it was opened
    clocks.at, clocks.boot = clocks.at + set_by, boot
    clocks.since_boot = clocks.since_boot if boot == 'this' else 20.0
    kept = keeper.open(robot, 'robot', 'robot')
    assert (kept.frames, keeper.status().get('refused', 0)) == (frames, not frames)
    keeper.end(kept)
    keeper.close()


def test_a_store_that_fails_costs_what_is_stored_and_nothing_else(served, caplog):
    class Failing(HostStore):
        broken = False

        def put(self, items, create=False):
            if self.broken:
                raise StoreError('no route to the bucket')
            return super().put(items, create)
    store = Failing()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.tick()
    store.broken = True
    keeper.ticked(kept)
    end = time.monotonic() + 60
    while not keeper.status().get('not_stored') and time.monotonic() < end:
        time.sleep(0.01)
    assert 'no route to the bucket' in caplog.text
    robot.tick()
    keeper.end(kept)
    keeper.close()


def test_who_is_fenced_stores_nothing_more(served):
    store = HostStore()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.tick()
    keeper.checkpoint(kept)
    before = store.list('robot/manifests').result()
    claim(store, 'robot', kept.generation + 1, '/elsewhere')
    with pytest.raises(Fenced):
        keeper.checkpoint(kept)
    with pytest.raises(AlreadyStored):
        keeper.reclaim(kept)
    keeper.end(kept)
    assert store.list('robot/manifests').result() == before
    keeper.close()


# --- moves ---

class Asked:
    """In place of the connection to another server: its keeper, in this process."""

    def __init__(self, keeper, fails=''):
        self.keeper, self.fails = keeper, fails

    def ask(self, kind, patience, *values):
        step = kind.__name__
        if step == 'Prepare':
            if self.fails == 'prepare':
                raise MoveError('it is full')
            self.keeper.prepare(*values)
        else:
            if self.fails == 'take over':
                raise MoveError('it was killed')
            self.keeper.take_over(*values)
            if self.fails == 'answer':
                raise MoveError('it has not answered for 1 s')

    def close(self):
        pass


class Moving:
    def __init__(self):
        self.did = []

    def hold(self, patience):
        self.did.append('hold')

    def release(self):
        self.did.append('release')

    def send_to(self, address, generation):
        self.did.append((address, generation))


@pytest.fixture
def device(served, monkeypatch):
    """Pages as those of a device, which the engine's thread alone may copy and give away, and of which two servers have none in
    common. ``dumped``, ``filled``: pages of each slab that was copied, and that was filled."""
    storage, did = served[1].memory.pool.storage, SimpleNamespace(dumped=[], filled=[])

    def by_the_engine(method, done):
        def call(ids, *arrays):
            assert threading.current_thread().name == 'service'
            done.append(ids)
            return method(ids, *arrays)
        return call
    monkeypatch.setattr(served[1].slab_index, 'share', lambda *what: None)
    monkeypatch.setattr(storage, 'on_host', False)
    monkeypatch.setattr(storage, 'dump', by_the_engine(storage.dump, did.dumped))
    monkeypatch.setattr(storage, 'load_later', by_the_engine(storage.load_later, did.filled))
    return did


class Reads(HostStore):
    """``read``: keys of slabs that were read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, keys):
        self.read += [key for key in keys if '/slabs/' in key]
        return super().get(keys)


def used(served):
    return served[1].memory.pool.allocator.usage().used


def test_pages_of_a_device_are_filled_before_the_robot_is_held_and_then_only_what_is_new(served, device, monkeypatch):
    store, turns, at_border = Reads(), [], served[0]._at_border
    monkeypatch.setattr(served[0], '_at_border', lambda job: turns.append(type(job)) or at_border(job))
    here, there = keeper_of(served, store), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    twin, other = opened(here, served, 'twin')
    for _ in range(5):
        robot.tick()
        twin.tick()
    here.checkpoint(kept)
    there.prepare('robot')
    assert len(device.filled) == len(store.read) == 5
    before = used(served)
    for each in (robot, twin):
        each.tick()
    dumped = len(device.dumped)
    here.checkpoint(kept, held=True)
    assert len(device.dumped) == dumped + 1
    there.prepare('robot')
    there.prepare('robot')  # nothing is new
    assert len(device.filled) == len(store.read) == 6
    assert used(served) == before + 3  # a slab of each session, and of what was prepared
    robot.tick()
    twin.tick()
    turns.clear()
    here.checkpoint(kept, held=True)
    there.take_over('robot', 2)
    assert len(turns) == 2  # each of which may come after a batch of others
    assert len(device.filled) == len(store.read) == 7
    kept.fenced = 'moved'
    here.end(kept)
    kept = there.open(robot, 'robot', 'robot')
    robot.number = kept.number
    np.testing.assert_array_equal(robot.tick().plan, twin.tick().plan)
    there.end(kept)
    here.end(other)
    here.close()
    there.close()
    assert used(served) == 0


@pytest.mark.parametrize('ends', ['in time', 'closed', 'opened', 'failed'])
def test_a_session_that_was_prepared_and_does_not_come_gives_its_pages_back(served, device, ends, caplog):
    store = HostStore()
    here, there = keeper_of(served, store), keeper_of(served, store, '/there', prepared=0.2 if ends == 'in time' else 600.0)
    robot, kept = opened(here, served)
    for _ in range(3):
        robot.tick()
    here.end(kept)
    assert used(served) == 0
    there.prepare('robot')
    assert used(served) == 3
    if ends == 'in time':
        end = time.monotonic() + 60
        while used(served) and time.monotonic() < end:
            time.sleep(0.01)
    elif ends == 'opened':  # its robot has come by itself
        kept = there.open(robot, 'robot', 'robot')
        assert kept.frames == 3 and len(device.filled) == 3 and used(served) == 3
        there.end(kept)
    elif ends == 'failed':
        key = store.list('robot/states').result()[0]
        store.delete([key]).result()
        with pytest.raises(StoreError):
            there.prepare('robot')
    if ends == 'closed':
        there.close()
    assert used(served) == 0
    here.close()
    if ends != 'closed':
        there.close()


def goes_on(keeper, robot):
    """The robot opens its session there, drives for a tick, and ends it."""
    kept = keeper.open(robot, 'robot', 'robot')
    robot.number = kept.number
    robot.tick()
    keeper.end(kept)


def test_pages_of_a_prepared_session_are_for_who_needs_them_and_it_comes_all_the_same(served, device):
    store, allocator = HostStore(), served[1].memory.pool.allocator
    here, there = keeper_of(served, store), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    for _ in range(3):
        robot.tick()
    here.end(kept)
    there.prepare('robot')
    usage = allocator.usage()
    branches = allocator.lease()
    ids = branches.allocate(usage.pages - usage.guaranteed - 1)  # of which two were held
    assert allocator.usage().used == len(ids) and len(device.filled) == 3
    branches.release(ids)
    there.take_over('robot', 2)
    assert len(device.filled) == 6
    goes_on(there, robot)
    here.close()
    there.close()
    assert used(served) == 0


def test_a_server_that_is_full_says_so_before_the_robot_is_held(served):
    store = HostStore()
    keeper = keeper_of(served, store)
    robot, kept = opened(keeper, served)
    robot.tick()
    keeper.checkpoint(kept)
    others = [opened(keeper, served, f'other{number}')[1] for number in range(5)]
    with pytest.raises(ServiceFull):
        keeper.prepare('robot')
    for each in (kept, *others):
        keeper.end(each)
    keeper.close()


@pytest.mark.parametrize('late', [0, 1])
def test_a_robot_is_held_while_what_it_has_ticked_last_is_copied_and_no_more(served, device, monkeypatch, late):
    """``late``: ticks that come after the target has been prepared."""
    store = Reads()
    here, there = keeper_of(served, store, period=1e6), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    for _ in range(4):
        robot.tick()
    rounds = iter([3, 1])  # ticks while the target reads
    before = {}

    class Ticking(Asked):
        def ask(self, kind, patience, *values):
            if kind.__name__ == 'TakeOver':
                before['filled'] = len(device.filled), len(store.read)
            super().ask(kind, patience, *values)
            for _ in range(next(rounds, 0) if kind.__name__ == 'Prepare' else 0):
                robot.tick()

    class Held(Moving):
        def hold(self, patience):
            for _ in range(late):
                robot.tick()
            here.ticked(kept)
            assert not kept.storing  # the move does
    monkeypatch.setattr('worldmodel_ros.serving.fleet.move.Peer', lambda address, files: Ticking(there))
    kept.stored_at = -math.inf
    moved = move(here, kept, Held(), '/there')
    assert set(moved.parts) == {'capture', 'copy', 'write'} and sum(moved.parts.values()) <= moved.held
    assert [len(device.filled) - before['filled'][0], len(store.read) - before['filled'][1]] == [late, late]
    here.end(kept)
    goes_on(there, robot)
    here.close()
    there.close()


@pytest.mark.parametrize('fails, did, owner', [
    ('', ['hold', ('/there', 2)], (2, '/there')),
    ('prepare', [], (1, '/here')),
    ('take over', ['hold', 'release'], (2, '/here')),
    ('answer', ['hold', ('/there', 2)], (2, '/there'))])  # it owns the session, though its answer was lost
def test_however_a_move_ends_exactly_one_server_owns_the_session(served, monkeypatch, fails, did, owner):
    store = HostStore()
    here, there = keeper_of(served, store), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    twin, other = opened(here, served, 'twin')
    for each in (robot, twin):
        each.tick()
        each.tick()
    monkeypatch.setattr('worldmodel_ros.serving.fleet.move.Peer', lambda address, files: Asked(there, fails))
    moving = Moving()
    stays = owner[1] == '/here'
    if stays:
        with pytest.raises(MoveError):
            move(here, kept, moving, '/there')
        assert kept.generation == owner[0]
    else:
        moved = move(here, kept, moving, '/there')
        assert moved.generation == 2 and 0 < moved.held <= moved.total
        here.end(kept)
        kept = there.open(robot, 'robot', 'robot')
        robot.number = kept.number
        assert kept.generation == 2
    assert moving.did == did and owner_of(store, 'robot') == owner
    np.testing.assert_array_equal(robot.tick().plan, twin.tick().plan)
    keeper = here if stays else there
    keeper.checkpoint(kept)  # it is the owner, and may store
    keeper.end(kept)
    here.end(other)
    here.close()
    there.close()


@pytest.mark.parametrize('already', [False, True])  # by the time it is held: then nothing more can be stored
def test_a_session_that_a_third_server_owns_by_the_end_of_a_move_is_served_here_no_more(served, monkeypatch, already):
    store = HostStore()
    here, there = keeper_of(served, store), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    robot.tick()

    class Passed(Asked):
        def ask(self, kind, patience, *values):
            try:
                super().ask(kind, patience, *values)
            finally:
                if kind.__name__ == 'TakeOver':
                    claim(store, 'robot', 3, '/elsewhere')
    monkeypatch.setattr('worldmodel_ros.serving.fleet.move.Peer', lambda address, files: Passed(there, 'answer'))
    moving = Moving()
    if already:
        moving.hold = lambda patience: moving.did.append('hold') or claim(store, 'robot', 2, '/elsewhere')
    moved = move(here, kept, moving, '/there')
    assert moving.did == ['hold', ('/there', 2)] and kept.fenced
    assert (moved.stored == 0.0 and not moved.parts) == already
    here.end(kept)
    here.close()
    there.close()


def test_a_session_whose_robot_does_not_come_is_stored_and_gives_its_place_back(served):
    store = HostStore()
    here, there = keeper_of(served, store), keeper_of(served, store, '/there')
    robot, kept = opened(here, served)
    robot.tick()
    here.checkpoint(kept)
    assert not there.expects('robot')
    taken = there.take_over('robot', 2)
    assert there.expects('robot') and not there.expects('another')
    kept.fenced = 'moved'
    here.end(kept)
    assert there.status()['parked'] == 1
    there.give_up(kept)  # another one, such as that of an earlier move
    assert there.status()['parked'] == 1
    there.give_up(taken)
    assert not there.expects('robot')
    assert there.status()['parked'] == 0 and served[0].stats()['sessions'] == 0
    _, kept = opened(there, served, robot=robot)
    assert (kept.frames, kept.generation) == (1, 3)
    there.end(kept)
    here.close()
    there.close()

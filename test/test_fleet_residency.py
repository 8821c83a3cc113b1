"""More sessions than there are pages for: a real service, a real model, and real pages that come and go."""
import threading
import time

import numpy as np
import pytest

from benchmarks.fleet_robots import Robot as FleetRobot, ServerProcess
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.cache.stores.protocol import StoreError
from worldmodel_ros.engine import load
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings
from worldmodel_ros.serving.fleet.residency import Place, Residency
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.messages import ServiceFull, Tick
from worldmodel_ros.serving.service.service import Service, ServiceSettings

pytestmark = pytest.mark.slow
PLACES, ROBOTS = 2, 8


@pytest.fixture(scope='module')
def served():
    """A service of more sessions than it has pages for, its engine, and one with a session for each twin."""
    engine = load('tiny', 'onnx', sessions=PLACES + 1)
    service = Service(engine, settings=ServiceSettings(sessions=ROBOTS, pictures=False))
    service.start()
    yield service, engine, load('tiny', 'onnx', sessions=ROBOTS)
    service.stop()


@pytest.fixture
def keeper(served):
    service, engine, _ = served
    engine.slab_index.__init__()
    keeper = Keeper(service, engine, HostStore(), '/here', KeeperSettings(period=1e6, patience=30.0, places=PLACES))
    yield keeper
    for record in list(keeper.residency._records.values()):
        keeper.end(record.session, store=False)
    keeper.close()


class Robot:
    """A listener that ticks, and a twin that never leaves."""

    def __init__(self, keeper, served, number):
        self.keeper, self.spec, self.twin = keeper, served[0].spec, served[2].open_session()
        self.replies, self.come = {}, threading.Condition()
        self.rng, self.sequence, self.kept = np.random.default_rng(number), 0, None
        self.name = f'robot{number}'
        self.open()

    def open(self):
        self.kept = self.keeper.open(self, self.name, self.name)

    def replied(self, reply):
        with self.come:
            self.replies[reply.sequence] = reply
            self.come.notify_all()
        self.keeper.ticked(self.kept)

    def pictured(self, picture):
        pass

    def failed(self, reason, error):
        raise error

    def send(self, due=600.0):
        self.sequence += 1
        self.image = self.rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        self.executed = self.rng.uniform(-0.2, 0.5, 2).astype(np.float32)
        self.keeper.tick(self.kept, Tick(self.image, self.executed, time.monotonic() + due, self.sequence, self.sequence, 1,
                                         'red'))
        return self.sequence

    def reply(self, sequence):
        with self.come:
            assert self.come.wait_for(lambda: sequence in self.replies, 60.0)
        return self.replies[sequence]

    def tick(self):
        """A frame, and its plan; compares it with the twin's."""
        reply = self.reply(self.send())
        assert reply.tier is not Tier.NONE, reply.reason
        self.twin.observe(self.image, self.executed)
        np.testing.assert_array_equal(reply.plan, self.twin.plan('red'))

    @property
    def place(self):
        return self.keeper.residency._records[self.kept].place


def one_that_is_away(robots):
    """Wait until none of the robots is expected any more, and return one of those whose sessions have left."""
    residency, end = robots[0].keeper.residency, time.monotonic() + 30.0
    while time.monotonic() < end:
        with residency._changed:
            records = [residency._records[robot.kept] for robot in robots]
            away = [robot for robot, record in zip(robots, records) if record.place is Place.AWAY]
            settled = all(record.place in (Place.AWAY, Place.HERE) and record.due(time.monotonic()) == np.inf
                          for record in records)
        if away and settled:
            return away[0]
        time.sleep(0.002)
    raise AssertionError(f'they are {[robot.place for robot in robots]}')


def test_four_times_as_many_sessions_as_there_are_pages_for_go_on_bit_for_bit(keeper, served):
    robots = [Robot(keeper, served, number) for number in range(ROBOTS)]
    for _ in range(3):
        for robot in robots:
            robot.tick()
    status = keeper.status()['residency']
    assert (status['sessions'], status['places']) == (ROBOTS, PLACES) and status['here'] <= PLACES
    assert status['came'] >= ROBOTS and 'failed' not in status
    # No more than the places' windows, and one that was being filled.
    memory = served[1].memory
    assert memory.pool.allocator.usage().used <= (PLACES + 1) * memory.guaranteed_pages[0]


def test_a_session_that_leaves_again_stores_only_what_it_has_seen_since(keeper, served):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 2)]
    for robot in robots * 6:
        robot.tick()
    one = one_that_is_away(robots)
    before, seen = one.kept.log.nbytes, len(one.kept.manifest.slabs)
    written = []
    put = keeper.store.put
    keeper.store.put = lambda items, create=False: written.extend(key for key, _ in items) or put(items, create)
    one.tick()
    for robot in robots * 2:  # until it has left again
        if robot is not one:
            robot.tick()
    end = time.monotonic() + 30.0
    while one.place is not Place.AWAY and time.monotonic() < end:
        robots[(robots.index(one) + 1) % len(robots)].tick()
    slabs = [key for key in written if key.startswith(f'{one.name}/slabs/')]
    assert one.place is Place.AWAY and seen >= 6 and len(slabs) == 1
    assert one.kept.log.nbytes - before < 2 * one.kept.manifest.slabs[0].nbytes + one.kept.manifest.state_nbytes
    one.tick()


def test_a_session_with_a_frame_in_flight_does_not_leave_and_is_not_stored_in_vain(keeper, served, monkeypatch):
    robot, written = Robot(keeper, served, 0), []
    robot.tick()
    monkeypatch.setattr(keeper.store, 'put', lambda items, create=False: written.append(items))
    monkeypatch.setattr(served[0], 'settled', lambda number: False)
    assert not keeper.residency._transfers.leave(robot.kept)
    assert not written


def test_a_tick_whose_session_would_come_too_late_is_refused_before_anything_is_done(keeper, served):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 3:
        robot.tick()
    one = one_that_is_away(robots)
    keeper.residency._took.extend([0.5] * 100)  # by what was measured
    reply = one.reply(one.send(due=0.1))
    assert reply.tier is Tier.NONE and 'would have its pages in' in reply.reason
    assert reply.predicted - reply.finish > 0.3
    assert keeper.status()['residency']['refused'] == 1
    # It comes all the same, so that the next tick finds it.
    end = time.monotonic() + 30.0
    while one.place is not Place.HERE and time.monotonic() < end:
        time.sleep(0.002)
    assert one.reply(one.send()).tier is not Tier.NONE


def test_a_session_that_is_damaged_while_it_is_away_begins_again_and_its_robot_is_answered(keeper, served, caplog):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 2:
        robot.tick()
    one = one_that_is_away(robots)
    keeper.store.delete(keeper.store.list(f'{one.name}/slabs').result()).result()
    reply = one.reply(one.send())
    assert reply.tier is not Tier.NONE
    fresh = one.twin
    fresh.reset()
    fresh.observe(one.image, one.executed)
    np.testing.assert_array_equal(reply.plan, fresh.plan('red'))
    assert f'{one.name} begins again' in caplog.text
    one.tick()


def unreachable(keys):
    raise StoreError('the store does not answer')


def test_a_session_goes_on_when_its_store_was_away_for_a_moment(keeper, served, monkeypatch, caplog):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 2:
        robot.tick()
    one = one_that_is_away(robots)
    seen = one.kept.stored_frames
    with monkeypatch.context() as patched:
        patched.setattr(keeper.store, 'get', unreachable)
        for _ in range(2):
            assert one.reply(one.send()).tier is Tier.NONE
    assert one.place is Place.AWAY
    end = time.monotonic() + 30.0
    while one.reply(one.send()).tier is Tier.NONE and time.monotonic() < end:
        time.sleep(0.05)
    assert served[0].frames_seen(one.kept.number) > seen == 2
    assert 'cannot be read now: the store does not answer' in caplog.text and 'begins again' not in caplog.text


def test_a_session_begins_again_when_its_store_is_away_for_long(keeper, served, monkeypatch, caplog):
    monkeypatch.setattr('worldmodel_ros.serving.fleet.keeper._UNREACHABLE_S', 0.0)
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 2:
        robot.tick()
    one = one_that_is_away(robots)
    monkeypatch.setattr(keeper.store, 'get', unreachable)
    assert one.reply(one.send()).tier is not Tier.NONE
    assert served[0].frames_seen(one.kept.number) == 1
    assert f'{one.name} begins again: the store does not answer' in caplog.text


def test_questions_and_checkpoints_of_a_session_that_is_away(keeper, served):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 2:
        robot.tick()
    one = one_that_is_away(robots)
    assert keeper.checkpoint(one.kept) is one.kept.manifest  # it does not come for that
    assert one.place is Place.AWAY
    actions = np.full((4, 2), 0.1, np.float32)
    answer = keeper.ask(one.kept, Question((Branch('ahead', 4, actions),), 'red', time.monotonic() + 60.0)).result(60)
    assert answer.complete
    branch = dict(answer.branches)['ahead']
    expected = None
    generator = one.twin.what_if(actions, 2)
    while expected is None:
        try:
            next(generator)
        except StopIteration as end:
            expected = end.value
    np.testing.assert_array_equal(branch.frames, expected.frames)


def test_a_session_that_ends_while_it_is_away_is_in_the_store_and_goes_on(keeper, served):
    robots = [Robot(keeper, served, number) for number in range(PLACES + 1)]
    for robot in robots * 2:
        robot.tick()
    one = one_that_is_away(robots)
    keeper.end(one.kept)
    one.open()
    assert (one.kept.frames, one.kept.generation) == (2, 2)
    one.tick()


def test_a_session_that_is_needed_stays_and_who_comes_meanwhile_is_told_that_there_is_no_room(served):
    service, engine, _ = served
    keeper = Keeper(service, engine, HostStore(), '/here', KeeperSettings(period=1e6, patience=0.3, places=PLACES))
    robots = [Robot(keeper, served, number) for number in range(PLACES)]
    for robot in robots:
        robot.tick()
    with keeper.here(robots[0].kept), keeper.here(robots[1].kept):
        with pytest.raises(ServiceFull, match='none could leave'):
            Robot(keeper, served, 7)
        assert [robot.place for robot in robots] == [Place.HERE] * PLACES
    late = Robot(keeper, served, 8)
    late.tick()
    for robot in (*robots, late):
        keeper.end(robot.kept, store=False)
    keeper.close()


def test_who_is_expected_last_leaves_first_and_who_is_overdue_is_expected_no_more(served):
    class Recording:
        """What would leave, and stays."""
        def __init__(self):
            self.left = []

        def leave(self, session):
            self.left.append(session)
            return False

        def come(self, session):
            raise AssertionError('no one is away')
    transfers, told = Recording(), {}
    residency = Residency(3, transfers, lambda session, tick: residency.answered(session), lambda *_: None,
                          lambda session, when: told.__setitem__(session, when))
    tick = Tick(np.zeros((64, 64, 3), np.uint8), np.zeros(2, np.float32), 0.0, 1)
    for session in 'abc':
        residency.add(session)
    begun = time.monotonic()
    for session, period in (('a', 20.0), ('b', 60.0), ('c', 0.01)):
        residency._records[session].ticked = begun - period
        residency.tick(session, tick)
    assert told['a'] == pytest.approx(begun + 20.0, abs=1.0) and told['b'] == pytest.approx(begun + 60.0, abs=1.0)
    now = time.monotonic()
    with residency._changed:
        assert residency._victim(now, now).session == 'b'
        assert residency._victim(now + 1.0, now).session == 'c'  # it has stopped: nothing is expected of it
        assert residency._victim(now, now + 100.0) is None
    residency.close()
    with pytest.raises(ValueError, match='at least one'):
        Residency(0, transfers, None, None)


class Blocked:
    """Transfers that do not end until they are let go; notes what was begun."""

    def __init__(self):
        self.begun, self.let_go = [], threading.Event()

    def leave(self, session):
        self.begun.append(('leave', session))
        return self.let_go.wait(60.0)

    def come(self, session):
        self.begun.append(('come', session))
        self.let_go.wait(60.0)


@pytest.fixture
def blocked():
    """Residency of three places whose own thread decides nothing, and its transfers, of 0.2 s each by what was measured."""
    transfers = Blocked()
    residency = Residency(3, transfers, lambda *_: None, lambda *_: None)
    residency._decide, decide = lambda now: None, residency._decide
    residency.decide = decide
    residency._took.extend([0.2] * 10)
    residency._left.extend([0.2] * 10)
    yield residency, transfers
    transfers.let_go.set()
    residency.close()


def add(residency, session, place, due, now, interval=2.0):
    """A session whose next tick is expected in ``due`` s."""
    residency.add(session)
    record = residency._records[session]
    record.place, record.ticked = place, now + due - interval
    record.intervals.extend([interval, interval])


def transfers_begun(residency, transfers, now):
    """What has been begun, and is at ``now``."""
    with residency._changed:
        residency.decide(now)
        expected = sum(record.place in (Place.COMING, Place.LEAVING) for record in residency._records.values())
    end = time.monotonic() + 30.0
    while len(transfers.begun) < expected and time.monotonic() < end:
        time.sleep(0.001)
    return transfers.begun


@pytest.mark.parametrize('interval, fetched', [(2.0, 'in time'), (0.1, 'late')])
def test_a_session_is_fetched_for_a_tick_that_it_can_be_in_time_for_at_once_where_ticks_come_faster_than_it(
        blocked, interval, fetched):
    residency, transfers = blocked
    now = time.monotonic()
    add(residency, 'late', Place.AWAY, 0.1, now, interval)  # too late for its next tick
    add(residency, 'in time', Place.AWAY, 0.4, now)
    for session in 'ab':
        add(residency, session, Place.HERE, 0.05, now)
    assert transfers_begun(residency, transfers, now) == [('come', fetched)]


def test_a_refused_tick_has_its_session_fetched_ahead_of_the_next_one_and_not_at_once(blocked):
    residency, transfers = blocked
    now = time.monotonic()
    for session, due in (('refused', 0.0), ('never seen', 0.0), ('in time', 0.4)):
        add(residency, session, Place.AWAY, due, now)
    residency._records['never seen'].intervals.clear()
    residency._records['never seen'].ticked = -float('inf')
    tick = Tick(np.zeros((64, 64, 3), np.uint8), np.zeros(2, np.float32), now + 0.05, 1)
    residency.tick('refused', tick)
    assert transfers_begun(residency, transfers, now) == [('come', 'in time')]
    residency.tick('never seen', tick)  # nothing tells when its next one comes
    assert transfers_begun(residency, transfers, now) == [('come', 'in time'), ('come', 'never seen')]


def test_no_more_transfers_are_begun_than_there_are_threads_for_them(blocked):
    residency, transfers = blocked
    now = time.monotonic()
    for number, due in enumerate((0.3, 0.4, 0.5)):  # as many as there are places
        add(residency, number, Place.AWAY, due, now)
    assert sorted(transfers_begun(residency, transfers, now)) == [('come', 0), ('come', 1)]
    residency.decide(now)
    assert [record.place for record in residency._records.values()].count(Place.AWAY) == 1


def test_who_is_here_goes_for_one_that_is_expected_sooner(blocked):
    residency, transfers = blocked
    now = time.monotonic()
    add(residency, 'away', Place.AWAY, 0.3, now)
    add(residency, 'sooner', Place.HERE, 0.25, now)
    for session, due in (('later', 0.5), ('soon', 0.05)):
        add(residency, session, Place.HERE, due, now)
    assert residency._lead > 0.5
    assert transfers_begun(residency, transfers, now) == [('leave', 'later')]


@pytest.mark.waiting(seconds=13)
def test_work_with_a_session_that_ends_does_not_stop_the_others(blocked):
    residency, _ = blocked
    done = threading.Event()
    with residency.here('ended', 1.0):
        threading.Thread(target=lambda: (residency.status(), done.set()), daemon=True).start()
        assert done.wait(5.0)


def test_a_session_that_cannot_be_stored_is_not_copied_and_hashed_again_and_again():
    class Full:
        tried = 0

        def leave(self, session):
            self.tried += 1
            raise StoreError('No space left on device')
    transfers = Full()
    residency = Residency(1, transfers, lambda *_: None, lambda *_: None)
    residency.add('one')
    with pytest.raises(ServiceFull, match='none could leave'), residency.opening(0.5):
        pass
    residency.close()
    assert transfers.tried == 1


def test_robots_of_a_server_process_with_pages_for_two_go_on_bit_for_bit(served, tmp_path):
    server = ServerProcess(tmp_path / 'engine.sock', tmp_path / 'store', 6, ('--backend', 'onnx', '--resident', '2')).wait()
    robots = []
    try:
        for number in range(4):
            robots.append(FleetRobot(number, server.path, served[2], session=f'robot{number}'))
        for _ in range(3):
            for robot in robots:
                answer = robot.tick(due=60.0, patience=60.0)
                assert answer.tier is not Tier.NONE, answer.reason
                np.testing.assert_array_equal(answer.plan, robot.twin_answers(answer.tier)[0])
        residency = server.status()['store']['residency']
        assert (residency['places'], residency['sessions']) == (2, 4) and residency['came'] > 0
    finally:
        for robot in robots:
            robot.close()
        code = server.stop()
    assert code == 0


def test_a_server_tells_of_places_that_make_no_sense():
    from worldmodel_ros.serving.server.process import Options
    with pytest.raises(ValueError, match='--store'):
        Options(resident=2)
    with pytest.raises(ValueError, match='resident is -1'):
        Options(resident=-1, store='/dev/shm')
    assert Options(resident=2, store='/dev/shm').resident == 2

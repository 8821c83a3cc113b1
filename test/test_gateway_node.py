"""A robot's node on another machine: it drives by the engine behind a gateway, and falls back to its own model."""
import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import trustme
from fake_service import FakeService, wait_for
from gateway_rig import TIMEOUT, Running, client, gateway
from test_gateway_security import write
from test_serve_failover import DEADLINE, OWN, SERVER, Robot, by
from websockets.asyncio.client import connect as dial
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.client.link import Unavailable, open_link
from worldmodel_ros.serving.client.network import Endpoint, EndpointError
from worldmodel_ros.serving.gateway.accounts import Account, Accounts, digest
from worldmodel_ros.serving.gateway.security import server_context
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import ConnectionLost
from worldmodel_ros.serving.transport.network import PATH, RemoteClock, Stamps, unwrap, wrap

TOKEN = 'the token of a robot'


@contextlib.contextmanager
def robot(url, **options):
    made = Robot(Endpoint(url, **options))
    try:
        yield made
    finally:
        made.worker.stop()


def test_a_node_drives_by_the_engine_behind_a_gateway(tmp_path):
    service = FakeService()
    with gateway(tmp_path, service) as running, robot(running.url('')) as driving:
        driving.drive_with_server()
        answers = [driving.tick() for _ in range(5)]
        assert {by(answer) for answer in answers} == {SERVER}
        assert {answer.tier for answer in answers} == {Tier.TWO_STEP} and driving.worker.backend == 'fake of the server'
        wait_for(lambda: driving.predictions)
        assert driving.predictions[0].future.frames.shape == (4, 64, 64, 3)
        assert (service.ticks[-1].image == driving.sequence).all() and service.ticks[-1].goal == 'red'
        branches = Branch('left', 3, np.zeros((3, 2), np.float32)), Branch('far', 8, np.ones((8, 2), np.float32))
        asked = Question(branches, 'red', time.monotonic() + 5.0)
        answer = driving.worker.ask(asked).result(TIMEOUT)
        assert [(name, len(future.frames)) for name, future in answer.branches] == [('left', 3), ('far', 8)]
        with pytest.raises(QuestionError, match='older ones'):
            driving.worker.ask(replace(asked, stamp=-1)).result(TIMEOUT)
        with pytest.raises(SessionFileError, match="engine's own machine"):
            driving.worker.save(SessionFolder(tmp_path / 'files'), 'name.safetensors')
        status, = running.gateway.sessions.all()
        assert status.status()['dialect'] == 'node' and status.counts['tier_two_step'] == len(service.ticks)
    wait_for(lambda: len(service.closed) == 1)


def test_tls_and_a_token_let_a_node_in_and_nothing_else_does(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    for name, each in (('ca.pem', authority), ('other.pem', stranger)):
        each.cert_pem.write_to_path(tmp_path / name)
    tls = server_context(*write(authority.issue_cert('127.0.0.1'), tmp_path, 'host'), None)
    accounts = Accounts((Account('robot', digest(TOKEN)),))
    (tmp_path / 'token').write_text(TOKEN + '\n')
    (tmp_path / 'wrong').write_text('guess')
    with gateway(tmp_path, accounts=accounts, tls=tls) as running:
        good = {'token': str(tmp_path / 'token'), 'ca': str(tmp_path / 'ca.pem')}
        link = open_link(Endpoint(running.url(''), **good), '/robot', TINY)
        assert link.spec == TINY
        link.connection.close()
        for change, reason in (({'token': str(tmp_path / 'wrong')}, '401'), ({'token': ''}, '401'),
                               ({'ca': str(tmp_path / 'other.pem')}, 'certificate'), ({'ca': ''}, 'certificate'),
                               ({'token': str(tmp_path / 'none')}, 'has no token'),
                               ({'ca': str(tmp_path / 'none')}, 'cannot be')):
            with pytest.raises(Unavailable, match=reason):
                open_link(Endpoint(running.url(''), **{**good, **change}), '/robot', TINY)
        with robot(running.url(''), **good) as driving:
            driving.drive_with_server()
            assert by(driving.tick()) == SERVER


@pytest.mark.parametrize('url, reason', [
    ('ws://10.0.0.5:8000', 'use wss'), ('http://localhost:80', 'is no wss'), ('wss://', 'is no wss'),
    ('wss://a:b', 'is no wss'),
    ('wss://host/path', 'is no wss'), ('wss://user:word@host', 'is no wss')])
def test_an_address_that_is_none_or_not_safe_is_refused(url, reason):
    with pytest.raises(EndpointError, match=reason):
        Endpoint(url)


def test_what_is_no_gateway_leaves_the_robot_with_its_own_model(tmp_path):
    with robot('ws://127.0.0.1:9') as driving:  # nobody listens
        wait_for(lambda: 'cannot be reached' in driving.worker.degraded_reason)
        assert by(driving.tick()) == OWN
    other, reason = replace(TINY, step_period=0.2), 'serves another robot: step_period'
    with gateway(tmp_path, FakeService(other)) as running, pytest.raises(Unavailable, match=reason):
        open_link(Endpoint(running.url('')), '/robot', TINY)


@pytest.mark.realtime
def test_when_the_gateway_is_gone_the_own_model_drives_at_once_and_the_server_comes_back(tmp_path):
    service = FakeService(sessions=4)
    with gateway(tmp_path, service) as running, robot(running.url('')) as driving:
        driving.drive_with_server()
        driving.tick()
        for connection in list(running.gateway._clients):
            running.call(connection.transport.abort)  # as a process does that is killed
        running.stop()
        wait_for(lambda: driving.worker.degraded_reason)
        assert by(driving.tick()) == OWN
        back = Running(running.server.path, port=running.port)
        try:
            wait_for(lambda: 'is back' in driving.worker.degraded_reason, 10.0)
            for _ in range(60):
                if not driving.worker.degraded_reason:
                    break
                driving.tick()
            driving.drive_with_server()
            assert by(driving.tick()) == SERVER
        finally:
            back.stop()


@pytest.mark.realtime
def test_an_engine_that_dies_behind_the_gateway_is_told_to_the_node_at_once(tmp_path):
    service = FakeService()
    with gateway(tmp_path, service) as running, robot(running.url('')) as driving:
        driving.drive_with_server()
        service.answer = 'nothing'
        observation = driving.see(deadline=5.0)
        wait_for(lambda: service.ticks)
        running.server.stop()
        wait_for(lambda: any(answer.sequence == observation.sequence for answer in driving.answers), 2.0)
        assert by(driving.answers[-1]) == OWN, 'the observation is handed on'
        running.server.start()


class Elsewhere:
    """A way to a gateway on a machine whose clock is ``ahead`` s ahead, ``there`` and ``back`` s long."""

    def __init__(self, url, ahead=0.0, there=0.0, back=0.0):
        self.ahead, self.there, self.back = ahead, there, back
        self._target, self._ready = url, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serve(self._between, '127.0.0.1', 0, max_size=None, compression=None) as server:
            self.url = f'ws://127.0.0.1:{server.sockets[0].getsockname()[1]}'
            self._ready.set()
            await self._stop.wait()

    async def _between(self, connection):
        async with dial(self._target + PATH, max_size=None, compression=None, proxy=None) as other:
            await asyncio.gather(self._carry(connection, other, self.there, self._towards),
                                 self._carry(other, connection, self.back, self._homewards))

    async def _carry(self, source, sink, delay, change):
        queue = asyncio.Queue()

        async def deliver():
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await sink.send(change(data))
        task = asyncio.create_task(deliver())
        try:
            async for data in source:
                queue.put_nowait((time.monotonic() + delay, data))
        except ConnectionClosed:
            pass
        finally:
            task.cancel()
            await sink.close()

    def _towards(self, data):
        """What the gateway is told is by its own clock; here, all run by one."""
        message, stamps, pixels = unwrap(data)
        if isinstance(message, (messages.Tick, messages.Question)):
            message = replace(message, due=message.due - self.ahead)
        return wrap(message, replace(stamps, echo_sent=stamps.echo_sent and stamps.echo_sent - self.ahead), pixels)

    def _homewards(self, data):
        message, stamps, pixels = unwrap(data)
        for name in ('predicted', 'finish'):
            if hasattr(message, name):
                message = replace(message, **{name: getattr(message, name) + self.ahead})
        return wrap(message, replace(stamps, sent=stamps.sent + self.ahead,
                                     echo_received=stamps.echo_received and stamps.echo_received + self.ahead), pixels)


@pytest.mark.realtime
@pytest.mark.parametrize('ahead', [0.0, 1e5, -3e4])
def test_a_deadline_is_one_by_the_other_machines_clock_and_leaves_time_for_the_way_back(tmp_path, ahead):
    service = FakeService()
    with gateway(tmp_path, service) as running:
        way = Elsewhere(running.url(''), ahead, there=0.02, back=0.02)
        with robot(way.url) as driving:
            driving.drive_with_server()
            for _ in range(6):
                assert by(driving.tick()) == SERVER
            clock = driving.worker._link.connection.clock
            assert clock.offset == pytest.approx(ahead, abs=0.01) and 0.035 < clock.round_trip < 0.1
            before = len(service.ticks)
            observation = driving.see()
            wait_for(lambda: len(service.ticks) > before)
            left = observation.due - driving.responder.settings.reserve - service.ticks[-1].due
            assert 0.02 <= left == pytest.approx(clock.back + 0.001, abs=0.01), 'the answer must leave so much earlier'
        way.close()


def test_the_other_clock_is_estimated_from_the_quickest_exchange():
    random, clock = np.random.default_rng(0), RemoteClock()
    ahead, now = 4321.0, 100.0
    for _ in range(40):
        there, back = 0.004 + random.exponential(0.01), 0.004 + random.exponential(0.01)
        sent, held = now, random.uniform(0.0, 0.05)
        arrived = sent + there
        clock.take(Stamps(arrived + held + ahead, sent, arrived + ahead), arrived + held + back)
        now += 0.1
    assert clock.offset == pytest.approx(ahead, abs=0.004) and clock.round_trip < 0.015
    assert clock.there(clock.here(5.0)) == pytest.approx(5.0) and clock.back > 0.5 * clock.round_trip
    before = clock.offset
    clock.take(Stamps(50.0), 60.0)  # an answer to nothing tells nothing
    assert clock.offset == before


@pytest.mark.parametrize('data, reason', [
    (b'', 'no frame'), (wrap(None, Stamps(float('nan'))), 'not finite'),
    (wrap(messages.Hello('r'), Stamps(1.0))[:-1], 'bytes in'),
    (wrap(None, Stamps(1.0)) + b'abc', 'without a shape'), (wrap(None, Stamps(1.0)) + bytes(15), 'no pictures'),
    (wrap(None, Stamps(1.0), np.zeros((1, 2, 3, 3), np.uint8))[:-1], 'no pictures')])
def test_a_frame_that_lies_is_refused(data, reason):
    with pytest.raises(MessageError, match=reason):
        unwrap(data)


def test_frames_come_out_as_they_went_in():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 3), dtype=np.uint8)
    message, stamps, read = unwrap(wrap(messages.Rejected('full'), Stamps(1.5, 2.5, 3.5), pixels))
    assert message.reason == 'full' and stamps == Stamps(1.5, 2.5, 3.5) and np.array_equal(read, pixels)


TICK = messages.Tick(1, 0, 0, 1, 'red', 1e9, True, np.zeros(2, np.float32))
QUESTION = messages.Question(1, '', 1e9, 0, (messages.Branch('left', 2, None),), 2)
FRAME = np.zeros((1, 64, 64, 3), np.uint8)


@pytest.mark.parametrize('frames', [
    [b'nonsense'], [wrap(messages.Welcome('', '', '{}', 8), Stamps(1.0))], [wrap(TICK, Stamps(1.0), FRAME)],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(TICK, Stamps(1.0))],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(TICK, Stamps(1.0), FRAME[:, :32])],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(replace(TICK, due=float('nan')), Stamps(1.0), FRAME)],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(replace(QUESTION, due=float('nan')), Stamps(1.0))],
    [wrap(messages.Hello('r'), Stamps(1.0)), *[wrap(TICK, Stamps(1.0), FRAME)] * 2],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(messages.Hello('r'), Stamps(1.0))],
    [wrap(messages.Hello('r'), Stamps(1.0)), wrap(replace(TICK, executed=np.zeros(9, np.float32)), Stamps(1.0), FRAME)]])
def test_a_stranger_at_the_nodes_path_ends_its_own_connection_alone(tmp_path, frames):
    service = FakeService(sessions=4)
    with gateway(tmp_path, service) as running, robot(running.url('')) as driving:
        driving.drive_with_server()
        with client(running, PATH) as stranger, pytest.raises(ConnectionClosed):
            for frame in frames:
                stranger.send(frame)
            while True:
                stranger.recv(TIMEOUT)
        assert by(driving.tick(deadline=DEADLINE)) == SERVER
        wait_for(lambda: len(service.listeners) == 1)


def test_a_node_that_connects_again_has_the_place_of_its_own_connection_that_died_unnoticed(tmp_path):
    accounts = Accounts(tuple(Account(name, digest(name), sessions=1, openings=0.0) for name in ('one', 'two')))
    with gateway(tmp_path, FakeService(sessions=2), accounts=accounts) as running:
        endpoints = []
        for name in ('one', 'two'):
            (tmp_path / name).write_text(name)
            endpoints.append(Endpoint(running.url(''), token=str(tmp_path / name)))
        first, other = (open_link(endpoint, '/robot', TINY, 'uuid') for endpoint in endpoints)
        again = open_link(endpoints[0], '/robot', TINY, 'uuid')
        with pytest.raises(ConnectionLost):
            first.connection.receive(TIMEOUT)
        with pytest.raises(Unavailable, match='1 sessions are open, which is the limit of one'):
            open_link(endpoints[0], '/robot', TINY, 'uuid of another node')
        assert len(running.service.listeners) == 2 and len(running.service.closed) == 1
        for link in (again, other, first):
            link.connection.close()
        wait_for(lambda: not running.service.listeners and not running.gateway._clients)


def test_sessions_of_nodes_are_those_of_their_account(tmp_path):
    accounts = Accounts((Account('one', digest('one'), sessions=1, openings=0.0),))
    (tmp_path / 'token').write_text('one')
    with gateway(tmp_path, accounts=accounts) as running:
        endpoint = Endpoint(running.url(''), token=str(tmp_path / 'token'))
        link = open_link(endpoint, '/first', TINY)
        with pytest.raises(Unavailable, match='1 sessions are open, which is the limit of one'):
            open_link(endpoint, '/second', TINY)
        link.connection.close()

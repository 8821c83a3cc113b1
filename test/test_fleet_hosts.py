"""Sessions that move between hosts: two servers behind their gateways, mutual TLS, one store that the first host keeps."""
import contextlib
import json
import socket
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from fake_service import wait_for as waits
from hypothesis import given, strategies as st

from benchmarks.fleet_robots import FleetFiles, Host, Robot
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.protocol import AlreadyStored, NotStored, StoreError
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import owner_of
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.client.link import Unavailable, open_link
from worldmodel_ros.serving.fleet.hosts import HostLink, RemoteStore, ask
from worldmodel_ros.serving.fleet.move import MoveError, ask_move
from worldmodel_ros.serving.gateway.accounts import Accounts, digest
from worldmodel_ros.serving.transport import messages, peers
from worldmodel_ros.serving.transport.codec import MessageError

pytestmark = pytest.mark.slow
wait_for = partial(waits, timeout=60.0, period=0.02)
STRANGER = 'a token of another account'
FIRST, SECOND = '127.0.0.1', '127.0.0.2'


class Wire:
    """A TCP connection's way, on which a test cuts or spoils what goes to the one who dialled, after so many bytes."""

    def __init__(self, host, port):
        self._to = host, port
        self._listening = socket.create_server((FIRST, 0))
        self.port = self._listening.getsockname()[1]
        self.spoil = self.cut = None  # bytes from now on
        self.faults = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(self._to)
                threading.Thread(target=self._carry, args=(here, there, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(there, here, True), daemon=True).start()

    def _carry(self, source, target, back):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if back and self.spoil is not None:
                    if self.spoil < len(data):
                        data = bytearray(data)
                        data[self.spoil] ^= 1
                        self.spoil, self.faults = 20_000, self.faults + 1
                    else:
                        self.spoil -= len(data)
                if back and self.cut is not None:
                    if self.cut < len(data):
                        self.cut, self.faults = 20_000, self.faults + 1
                        break
                    self.cut -= len(data)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope='module')
def engine():
    return load('tiny', 'onnx', sessions=8)


@pytest.fixture(scope='module')
def hosts(tmp_path_factory):
    """Two hosts; the second one's store is the first one's, over a wire that tests spoil."""
    folder = tmp_path_factory.mktemp('hosts')
    fleet = FleetFiles(folder, [{'name': 'stranger', 'sha256': digest(STRANGER)}])
    (folder / 'stranger').write_text(STRANGER)
    started = []
    try:
        started.append(Host(fleet, 'a', FIRST, options=('--backend', 'onnx')))
        wire = Wire(FIRST, started[0].port)
        started.append(Host(fleet, 'b', SECOND, f'wss://{FIRST}:{wire.port}', options=('--backend', 'onnx')))
        started[1].wire = wire
        for host in started:
            host.server.wait()
        yield started
    finally:
        codes = [host.stop() for host in started]
    assert codes == [(0, 0), (0, 0)], [host.server.log() for host in started]


@pytest.fixture
def store(hosts):
    made = FileStore(hosts[0].folder / 'store')
    yield made
    made.close()


def assert_like_twin(robot, answer):
    assert answer.tier in (Tier.TWO_STEP, Tier.ONE_STEP), answer.reason
    plan, risk, frames = robot.twin_answers(answer.tier)
    np.testing.assert_array_equal(answer.plan, plan)
    if answer.frames is not None:  # the session may have moved just after the answer
        np.testing.assert_array_equal(answer.collision_risk, risk)
        np.testing.assert_array_equal(answer.frames, frames)


def drive(robot, ticks=1):
    for _ in range(ticks):
        assert_like_twin(robot, robot.tick(due=60.0, shown=True, patience=120.0))


def move_while_driving(robot, here, target):
    generation, refused = robot.generation, []

    def moving():
        try:
            ask_move(here.server.path, robot.session, target.url)
        except MoveError as error:
            refused.append(error)
    thread = threading.Thread(target=moving)
    thread.start()
    while robot.generation == generation and not refused:
        drive(robot)
        robot.idle(0.03)
    thread.join()
    assert not refused, refused
    assert robot.generation == generation + 1


def test_a_session_moves_to_another_host_and_back_bit_for_bit(hosts, engine, store):
    """The robot begins at its own host's socket, and goes on over the network."""
    first, second = hosts
    robot = Robot(1, first.server.path, engine, files=first.files)
    drive(robot, 3)
    for here, there in ((first, second), (second, first)):
        move_while_driving(robot, here, there)
        assert str(robot.server) == there.url
        assert owner_of(store, robot.session) == (robot.generation, there.url)
        drive(robot, 3)
        assert robot.session not in [each.get('session') for each in here.server.status()['robots']]
    robot.close()


def test_a_robot_of_the_network_goes_on_in_its_own_session_and_an_old_owner_is_not_believed(hosts, engine):
    robot = Robot(2, hosts[1].endpoint, engine, files=hosts[1].files)
    drive(robot, 3)
    generation = robot.generation
    robot.connect(hosts[1].endpoint)
    assert robot.generation == generation + 1 and robot.link.frames == 3
    drive(robot, 2)
    robot.close()
    with pytest.raises(Unavailable, match='owned by another server'):
        open_link(hosts[1].endpoint, '/robot', None, robot.session, generation + 10, 5.0)


@pytest.mark.parametrize('fault', ['spoil', 'cut'])
def test_a_transfer_that_is_spoilt_or_cut_keeps_the_session_where_it_is(hosts, engine, store, fault):
    first, second = hosts
    robot = Robot(3, first.server.path, engine, files=first.files)
    drive(robot, 4)
    generation, faults = robot.generation, second.wire.faults
    setattr(second.wire, fault, 20_000)  # bytes of each answer of the store, from now on
    try:
        with pytest.raises(MoveError, match='cannot take it|did not take it over'):
            ask_move(first.server.path, robot.session, second.url, patience=60.0)
    finally:
        setattr(second.wire, fault, None)
    assert second.wire.faults > faults
    drive(robot, 2)
    assert robot.server == first.server.path and robot.generation == generation
    assert owner_of(store, robot.session)[1] == first.url
    move_while_driving(robot, first, second)  # and now it can
    drive(robot, 2)
    robot.close()


def test_a_slab_that_is_damaged_in_the_store_is_not_taken_over(hosts, engine):
    first, second = hosts
    robot = Robot(4, first.server.path, engine, files=first.files)
    drive(robot, 3)
    slabs = wait_for(lambda: list((first.folder / 'store' / robot.session / 'slabs').rglob('*-*')))
    for slab in slabs:
        data = bytearray(slab.read_bytes())
        data[len(data) // 2] ^= 1
        slab.write_bytes(data)
    with pytest.raises(MoveError, match='cannot take it'):
        ask_move(first.server.path, robot.session, second.url, patience=60.0)
    drive(robot, 2)
    assert robot.server == first.server.path
    robot.close()


def test_a_host_that_is_not_there_takes_nothing(hosts, engine):
    robot = Robot(5, hosts[0].server.path, engine, files=hosts[0].files)
    drive(robot, 2)
    with pytest.raises(MoveError, match='cannot be reached'):
        ask_move(hosts[0].server.path, robot.session, f'wss://{FIRST}:9', patience=60.0)
    with pytest.raises(MoveError, match='it is here already'):
        ask_move(hosts[0].server.path, robot.session, hosts[0].url)
    drive(robot, 2)
    robot.close()


def test_who_has_no_certificate_of_the_fleet_has_no_store_and_no_session_of_others(hosts, engine):
    first = hosts[0]
    robot = Robot(6, first.server.path, engine)
    drive(robot, 2)
    for files in ((first.files[0], first.files[1], ''), (str(first.folder / 'stranger'), *first.files[1:])):
        store = RemoteStore(Endpoint(first.url, *files))
        with pytest.raises(StoreError):
            store.list(robot.session).result()
        store.close()
    link = open_link(Endpoint(first.url, str(first.folder / 'stranger'), *first.files[1:]), '/robot', None, robot.session)
    assert (link.frames, link.generation) == (0, 0)  # one of its own
    link.connection.close()
    drive(robot, 2)
    robot.close()


def test_the_store_of_another_host_is_a_store(hosts):
    store = RemoteStore(hosts[0].endpoint)
    try:
        store.put([('x/a', (b'one ', b'two')), ('x/b', (b'',))]).result()
        assert [bytes(blob) for blob in store.get(['x/b', 'x/a']).result()] == [b'', b'one two']
        assert store.list('x').result() == ['x/a', 'x/b']
        assert store.head(['x/a', 'x/c']).result() == [7, None]
        store.put([('x/claims/1', (b'me',))], create=True).result()
        with pytest.raises(AlreadyStored):
            store.put([('x/claims/1', (b'you',))], create=True).result()
        store.delete(['x/a', 'x/b', 'x/claims/1', 'x/c']).result()
        with pytest.raises(NotStored):
            store.get(['x/a']).result()
        with pytest.raises(ValueError, match='is no key'):
            store.get(['../a']).result()
    finally:
        store.close()


def test_nothing_but_what_a_move_needs_is_asked_of_a_server(hosts):
    link = HostLink(hosts[0].endpoint)
    try:
        assert isinstance(ask(link, messages.StatusRequest(), 5.0), messages.Status)
        with pytest.raises(MessageError, match='is nothing that one host asks'):
            ask(link, messages.Done(1, ''), 5.0)
        for target in ('/a/socket', 'ws://127.0.0.1:1', 'auto'):  # where no certificate would be checked
            with pytest.raises(MessageError, match='to gateways alone'):
                ask(link, messages.Move(1, 'session', target), 5.0)
        assert 'is not open here' in ask(link, messages.Move(2, 'session', 'wss://127.0.0.9:1'), 5.0).refusal
    finally:
        link.close()


def test_an_account_of_a_fleet_needs_a_certificate(tmp_path):
    (tmp_path / 'accounts.yaml').write_text(yaml.safe_dump({'accounts': [
        {'name': 'fleet', 'sha256': digest(STRANGER), 'fleet': True}]}))
    with pytest.raises(ValueError, match='known by a certificate'):
        Accounts.read(Path(tmp_path / 'accounts.yaml'))


@given(st.binary(max_size=80) | st.builds(
    lambda sizes, rest: len(head := json.dumps({'sizes': sizes}).encode()).to_bytes(4, 'little')
    + head + rest,
    st.lists(st.integers(-2, 5) | st.booleans() | st.none(), max_size=4) | st.text(max_size=3), st.binary(max_size=9)))
def test_bytes_that_are_no_request_are_refused_and_nothing_else(data):
    try:
        about, blobs = peers.unwrap(data)
    except MessageError:
        return
    assert isinstance(about, dict) and peers.unwrap(peers.wrap(about, blobs))[1] == blobs


@given(st.lists(st.binary(max_size=9), max_size=4))
def test_a_request_comes_as_it_was_sent(blobs):
    about, came = peers.unwrap(peers.wrap({'what': 'put', 'keys': ['a/b']}, blobs))
    assert about == {'what': 'put', 'keys': ['a/b']} and [bytes(blob) for blob in came] == blobs

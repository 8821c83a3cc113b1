"""A front that knows other hosts: who is sent there, and what becomes of a host that does not answer."""
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_service import wait_for as waits

from benchmarks.fleet_robots import FleetFiles, Host, HostGateway, Robot
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import owner_of
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.serving.client.link import Unavailable, ask_status, open_link
from worldmodel_ros.serving.client.network import Endpoint, NetworkConnection
from worldmodel_ros.serving.fleet import front as fronts
from worldmodel_ros.serving.fleet.front import SETTINGS, Front
from worldmodel_ros.serving.fleet.move import MoveError, ask_move
from worldmodel_ros.serving.fleet.process import Options
from worldmodel_ros.serving.fleet.router import Claim, NoRoom
from worldmodel_ros.serving.fleet.scaling import Homecoming
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket, connect

OWN, SECOND_OWN = Path('/nowhere/0.sock'), Path('/nowhere/1.sock')
OTHER, THIRD = 'wss://127.0.0.2:8000', 'wss://127.0.0.3:8000'
FIRST, SECOND = '127.0.0.1', '127.0.0.2'
wait_for = partial(waits, timeout=60.0, period=0.02)


def status(tick_ms=20.0, sessions=8, robots=(), preset='tiny', **more):
    """As a server tells it, whose ticks in two steps take so long."""
    times = [{'network': f'{preset}/observe', 'batch': 1, 'p50_ms': tick_ms / 2},
             {'network': f'{preset}/denoise', 'batch': 1, 'p50_ms': tick_ms / 4}]
    return {'pid': 1, 'preset': {'name': preset}, 'store': {}, 'robots': [
        {'session': session, 'generation': generation} for session, generation in robots],
            'service': {'backend': 'none', 'step_times': times, 'most_sessions': sessions}, **more}


class Fleet:
    """A front whose looks at servers are answered from here. ``hosts``: a status, an error, or what gives one."""

    def __init__(self, folder, own, hosts, settings=SETTINGS, sessions=8, home='', servers=1):
        self.own, self.hosts = own, hosts
        self.listening = ListeningSocket(folder / 'front.sock')
        self.front = Front(self.listening, [OWN, SECOND_OWN][:servers], sessions, settings=settings,
                           hosts=[Endpoint(host) for host in hosts], home=home)

    def of(self, number):
        return self.front.status()['fleet']['servers'][number]

    def alive(self):
        return [server['alive'] for server in self.front.status()['fleet']['servers']]


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    made = []

    def make(*arguments, **options):
        made.append(Fleet(tmp_path, *arguments, **options))
        return made[0]

    def answer_of_host(link):
        said = made[0].hosts[link.endpoint.url] if made else Unavailable('not yet')
        said = said() if callable(said) else said
        if isinstance(said, Exception):
            raise said
        return said
    monkeypatch.setattr(fronts, 'POLL', 0.01)
    monkeypatch.setattr(fronts, '_status', lambda path: made[0].own if made else None)
    monkeypatch.setattr(fronts, 'ask_host_status', answer_of_host)
    yield make
    for each in made:
        each.front.close()
        each.listening.close()


def test_robots_go_to_another_host_only_where_no_own_server_has_slack_and_they_can_go_there(fleet):
    made = fleet(status(), {OTHER: status()})
    wait_for(lambda: all(made.alive()))
    places = [made.front.place(f's{number}', mobile=True) for number in range(8)]
    assert [str(place) for place in places] == [str(OWN)] * 4 + [OTHER] * 4  # 85 % of the time is 4 ticks of 20 ms
    with pytest.raises(NoRoom):
        made.front.place('one more', mobile=True)
    assert made.front.room() == ({0: 0}, {0: 4})  # what decides whether servers are started here


def test_robots_without_a_certificate_stay_on_this_host(fleet):
    made = fleet(status(tick_ms=60.0), {OTHER: status(tick_ms=60.0)})
    wait_for(lambda: all(made.alive()))
    assert made.front.place('a') == OWN
    with pytest.raises(NoRoom):
        made.front.place('b')
    assert str(made.front.place('b', mobile=True)) == OTHER


@pytest.mark.parametrize('tick_ms, most', [(10.0, 8), (40.0, 2), (200.0, 0)])
def test_a_host_takes_what_its_own_ticks_leave_time_for(fleet, tick_ms, most):
    """An own server takes 20 ms for a tick, and is full with four robots."""
    made = fleet(status(), {OTHER: status(tick_ms=tick_ms, sessions=8)})
    wait_for(lambda: all(made.alive()))
    placed = []
    for number in range(13):
        try:
            placed.append(str(made.front.place(f's{number}', mobile=True)))
        except NoRoom:
            break
    assert placed == [str(OWN)] * 4 + [OTHER] * most


def test_a_host_has_memory_for_as_many_sessions_as_it_says_whatever_an_own_server_has(fleet):
    made = fleet(status(tick_ms=1.0), {OTHER: status(tick_ms=1.0, sessions=3, robots=[('of its own', 5)])}, sessions=2)
    wait_for(lambda: all(made.alive()) and made.of(1)['sessions'] == 1)
    placed = [str(made.front.place(f's{number}', mobile=True)) for number in range(4)]
    assert placed == [str(OWN)] * 2 + [OTHER] * 2
    with pytest.raises(NoRoom):
        made.front.place('one more', mobile=True)


@pytest.mark.parametrize('said, problem', [
    (Unavailable('it cannot be reached'), 'it cannot be reached'),
    ({'pid': 2, 'fleet': {}}, 'before the front of a fleet'),
    ({name: value for name, value in status().items() if name != 'store'}, 'keeps no sessions'),
    (status(preset='base'), 'another model'),
    (status(robots=[('x', 'y')]), 'cannot be understood'),
    ({'service': {'step_times': [3]}}, 'cannot be understood'),
    (status(tick_ms=float('nan')), 'cannot be understood'),
    (status(tick_ms=0.0), 'cannot be understood'),
    (status(sessions='many'), 'cannot be understood'),
    ({'service': 7}, 'cannot be understood')])
def test_a_host_that_is_of_no_use_gets_nobody_and_the_status_says_why(fleet, said, problem):
    made = fleet(status(tick_ms=60.0), {OTHER: said, THIRD: status(tick_ms=60.0)})
    wait_for(lambda: made.alive() == [True, False, True] and problem in made.of(1)['problem'])
    assert made.of(1)['host'] and made.of(1)['socket'] == OTHER and not made.of(0)['host']
    made.front.place('a', mobile=True)
    assert str(made.front.place('b', mobile=True)) == THIRD
    with pytest.raises(NoRoom):
        made.front.place('c', mobile=True)


def test_what_was_at_a_host_that_is_lost_is_placed_again_and_it_gets_nobody_until_it_answers(fleet):
    made = fleet(status(tick_ms=60.0), {OTHER: status(tick_ms=60.0), THIRD: Unavailable('not yet')})
    wait_for(lambda: made.alive() == [True, True, False])
    made.front.place('a', mobile=True)
    assert str(made.front.place('b', mobile=True)) == OTHER
    made.hosts |= {OTHER: Unavailable('gone'), THIRD: status(tick_ms=60.0)}
    wait_for(lambda: made.alive() == [True, False, True])
    assert str(made.front.place('b', mobile=True)) == THIRD
    made.hosts[OTHER] = status(tick_ms=60.0)
    wait_for(lambda: made.alive() == [True, True, True])
    assert str(made.front.place('c', mobile=True)) == OTHER


def test_a_host_that_hangs_holds_up_neither_robots_nor_looks_at_own_servers(fleet):
    hangs, entered = threading.Event(), threading.Event()

    def hang():
        entered.set()
        hangs.wait(20.0)
        return Unavailable('at last')
    made = fleet(status(), {OTHER: hang})
    try:
        wait_for(entered.is_set)
        start = time.monotonic()
        wait_for(lambda: made.alive()[0])
        assert made.front.place('a', mobile=True) == OWN
        made.own = None
        wait_for(lambda: not made.alive()[0])
        assert time.monotonic() - start < 10.0 and not hangs.is_set()
    finally:
        hangs.set()


def test_a_front_that_comes_back_learns_what_other_hosts_run_and_moves_nothing_from_there(fleet):
    made = fleet(status(), {OTHER: status(robots=[('a', 3)])}, settings=replace(SETTINGS, high=0.1, low=0.05, full=0.2))
    wait_for(lambda: made.front.status()['fleet']['claims'] == [{'session': 'a', 'server': 1, 'generation': 3}])
    with pytest.raises(MoveError, match='for that host to move'):
        made.front.move('a', 'auto')
    assert str(made.front.place('a', mobile=True)) == OTHER


def session_is_where(monkeypatch):
    """Return the own server that has session a, with its generation, as statuses say from now on; it may be changed."""
    has_it = {OWN: 5}
    monkeypatch.setattr(fronts, '_status', lambda path: status(robots=[('a', has_it[path])] if path in has_it else []))
    return has_it


def test_a_move_asks_the_server_that_has_the_session_where_the_first_one_has_just_handed_it_on(fleet, monkeypatch):
    made = fleet(status(), {OTHER: status()}, servers=2)
    has_it = session_is_where(monkeypatch)
    wait_for(lambda: all(made.alive()) and made.of(0)['sessions'] == 1)
    assert made.front.place('a', mobile=True) == OWN
    asked = []

    def ask(source, session, target, **_):
        asked.append((source, session, target))
        if source == OWN:
            has_it.clear()
            has_it[SECOND_OWN] = 6
            raise MoveError('session a is not open here')
    monkeypatch.setattr(fronts, 'ask_move', ask)
    made.front.move('a', OTHER)
    assert asked == [(OWN, 'a', OTHER), (SECOND_OWN, 'a', OTHER)]


@pytest.mark.parametrize('target', ['auto', str(SECOND_OWN)])
def test_a_session_that_has_moved_although_its_server_refused_is_not_moved_on(fleet, monkeypatch, target):
    made = fleet(status(), {}, servers=2)
    has_it = session_is_where(monkeypatch)
    wait_for(lambda: all(made.alive()) and made.of(0)['sessions'] == 1)
    asked = []

    def ask(source, *_, **__):
        asked.append(source)
        has_it.clear()
        has_it[SECOND_OWN] = 6
        raise MoveError('session a is not open here')
    monkeypatch.setattr(fronts, 'ask_move', ask)
    made.front.move('a', target)
    assert asked == [OWN] and made.of(1)['sessions'] == 1


@pytest.mark.parametrize('home, moved', [('wss://127.0.0.1:8000', True), ('', False)])
def test_a_session_comes_back_when_an_own_server_has_had_time_for_a_while(fleet, monkeypatch, home, moved):
    asked = []

    def move(source, session, target):
        asked.append((str(source), session, target))
        made.hosts[OTHER] = status(tick_ms=40.0, robots=[('of its own', 1)])
        made.own = status(tick_ms=60.0, robots=[(session, 2)])
    monkeypatch.setattr(fronts, 'ask_move', move)
    monkeypatch.setattr(fronts, 'Homecoming', lambda low: Homecoming(low, calm=0.3))
    made = fleet(status(tick_ms=60.0), {OTHER: status(tick_ms=40.0, robots=[('of its own', 1)])}, home=home)
    wait_for(lambda: all(made.alive()) and made.of(1)['sessions'] == 1)
    assert made.front.place('a') == OWN
    made.own = status(tick_ms=60.0, robots=[('a', 1)])
    assert str(made.front.place('b', mobile=True)) == OTHER
    made.hosts[OTHER] = status(tick_ms=40.0, robots=[('of its own', 1), ('b', 1)])
    time.sleep(0.8)
    assert not asked  # there is no time for it here
    made.own = status(tick_ms=60.0)
    time.sleep(0.2)
    with made.front._lock:
        made.front._router.release('a')  # it has left
    if moved:
        wait_for(lambda: asked, timeout=10.0)
    time.sleep(0.8)
    assert asked == ([(OTHER, 'b', home)] if moved else [])  # once, and what is the other host's own stays there
    assert made.front.counts['returned'] == moved


def test_a_session_that_cannot_come_back_does_not_keep_the_others_away(fleet, monkeypatch):
    asked = []

    def refused(source, session, target):
        asked.append(session)
        raise MoveError(f'session {session} is not open here')
    monkeypatch.setattr(fronts, 'ask_move', refused)
    monkeypatch.setattr(fronts, 'Homecoming', lambda low: Homecoming(low, calm=0.05))
    made = fleet(status(tick_ms=60.0), {OTHER: status(tick_ms=20.0)}, home='wss://127.0.0.1:8000')
    wait_for(lambda: all(made.alive()))
    made.front.place('a')
    for session in 'bcd':
        assert str(made.front.place(session, mobile=True)) == OTHER
    with made.front._lock:
        made.front._router.release('a')  # it has left
    wait_for(lambda: len(asked) >= 6, timeout=10.0)
    assert sorted(asked[:3]) == sorted(asked[3:6]) == ['b', 'c', 'd']


def test_a_host_that_is_lost_while_a_session_comes_back_from_it_is_used_again_later(fleet, monkeypatch):
    def killed(source, session, target):
        made.hosts[OTHER] = Unavailable('killed')
        wait_for(lambda: not made.alive()[1])
        raise MoveError('it has not answered')
    monkeypatch.setattr(fronts, 'ask_move', killed)
    made = fleet(status(tick_ms=60.0), {OTHER: status(tick_ms=60.0)}, home='wss://127.0.0.1:8000')
    wait_for(lambda: all(made.alive()))
    made.front.place('a')
    assert str(made.front.place('b', mobile=True)) == OTHER
    with made.front._lock:
        made.front._router.release('a')  # it has left
    with pytest.raises(MoveError, match='has not answered'):
        made.front.move('b', 'auto')
    assert made.front.status()['fleet']['claims'] == []
    made.hosts[OTHER] = status(tick_ms=40.0)
    wait_for(lambda: all(made.alive()), timeout=5.0)
    assert made.of(1)['sessions'] == 0 and made.of(1)['load'] == 0.0


def test_a_robot_that_cannot_go_to_another_host_is_not_sent_there_by_who_names_that_host(fleet, monkeypatch):
    asked = []
    monkeypatch.setattr(fronts, 'ask_move', lambda *arguments: asked.append(arguments))
    made = fleet(status(), {OTHER: status()})
    wait_for(lambda: all(made.alive()))
    made.front.place('stays')
    made.front.place('goes', mobile=True)
    with pytest.raises(MoveError, match='stays on this host'):
        made.front.move('stays', OTHER)
    made.front.move('goes', OTHER)
    assert asked == [(OWN, 'goes', OTHER)]


def test_a_session_can_be_moved_again_after_looks_at_the_servers_failed(fleet, monkeypatch):
    asked = []
    monkeypatch.setattr(fronts, 'ask_move', lambda *arguments: asked.append(arguments))
    made = fleet(status(), {OTHER: status()})
    wait_for(lambda: all(made.alive()))
    made.front.place('a', mobile=True)

    def failing(path):
        raise OSError(24, 'Too many open files')
    with monkeypatch.context() as patch:
        patch.setattr(fronts, '_status', failing)
        with pytest.raises(OSError, match='Too many'):
            made.front.move('a', OTHER)
    made.front.move('a', OTHER)
    assert len(asked) == 2


def test_a_session_that_cannot_move_does_not_keep_others_on_a_server_that_has_too_many(fleet, monkeypatch):
    asked = []

    def refused(source, session, target):
        asked.append(session)
        raise MoveError(f'session {session} cannot be read')
    monkeypatch.setattr(fronts, 'ask_move', refused)
    made = fleet(status(), {OTHER: status()}, settings=replace(SETTINGS, high=0.7))
    wait_for(lambda: all(made.alive()))
    for session in 'abcd':
        assert made.front.place(session, mobile=True) == OWN
    wait_for(lambda: len(asked) >= 8, timeout=10.0)
    assert sorted(asked[:4]) == sorted(asked[4:8]) == ['a', 'b', 'c', 'd']


def test_moves_that_hang_hold_up_no_others_that_are_asked_for_and_are_not_done_again(fleet, monkeypatch):
    hangs, asked, answers = threading.Event(), [], []

    def move(source, session, target):
        asked.append(session)
        if session != 'asked for':
            hangs.wait(20.0)
    monkeypatch.setattr(fronts, 'ask_move', move)
    made = fleet(status(), {}, settings=replace(SETTINGS, high=0.65), servers=2)
    wait_for(lambda: all(made.alive()))

    class Asking:
        def send(self, message):
            answers.append(message)
    try:
        with made.front._lock:
            made.front._router.claims_of([(Claim(session, 0, 1, time.monotonic() + 60.0), made.front._demand(session))
                                          for session in ('asked for', 'b', 'c', 'd', 'e', 'f')])  # 1.2 of the time
        wait_for(lambda: len(asked) == 2)
        time.sleep(1.0)  # 100 looks, which find that a third one has to move
        made.front._handle(Asking(), messages.Move(7, 'asked for', str(SECOND_OWN)))
        wait_for(lambda: answers, timeout=5.0)
        assert [(each.number, each.refusal) for each in answers] == [(7, '')] and not hangs.is_set()
    finally:
        hangs.set()
    wait_for(lambda: made.front.counts['moved'] >= 4)
    time.sleep(0.5)
    assert sorted(asked) == ['asked for', 'd', 'e', 'f']  # each once


def test_clients_that_name_no_session_count_as_long_as_their_server_has_them_and_are_not_moved(fleet, monkeypatch):
    asked, names = [], [f'gateway/arm/#{number}' for number in range(4)]
    monkeypatch.setattr(fronts, 'ask_move', lambda *arguments: asked.append(arguments))
    made = fleet(status(), {}, settings=replace(SETTINGS, lease=0.1, high=0.7))
    wait_for(lambda: all(made.alive()))
    for name in names[:3]:
        made.front.place(name)
    made.own = {**status(), 'robots': [{'robot': name} for name in names]}  # one was placed by a front before this one
    time.sleep(0.5)  # some leases, and many looks
    assert made.front.room() == ({0: 0}, {0: 4}) and not made.front.empty(0)
    assert asked == []  # the load is above what sessions are moved for
    made.own = status()
    wait_for(lambda: made.front.empty(0))


def test_connections_over_which_nothing_comes_make_room_for_those_that_ask(fleet, monkeypatch, tmp_path):
    monkeypatch.setattr(fronts, '_CONNECTIONS', 3)
    made, over = fleet(status(), {}), threading.Event()
    made.listening.listen()

    def serve():
        while not over.is_set():
            made.front.run(0.02)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        quiet = [connect(tmp_path / 'front.sock', 1.0) for _ in range(3)]
        time.sleep(0.3)
        with pytest.raises(Unavailable, match='3 connections are open'):
            ask_status(tmp_path / 'front.sock')
        monkeypatch.setattr(fronts, '_QUIET', 0.2)
        assert ask_status(tmp_path / 'front.sock')['fleet']['claims'] == []
        assert quiet[0].recv(1) == b''  # the one that was there for longest
        quiet[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            quiet[1].recv(1)
    finally:
        over.set()
        thread.join()
        for each in quiet:
            each.close()


def test_who_asks_for_a_session_that_is_not_expected_is_refused(fleet):
    made = fleet(status(), {OTHER: status()}, home='wss://127.0.0.1:8000')
    wait_for(lambda: all(made.alive()))
    made.front.place('a', mobile=True)
    answers = []

    class Asking:
        def send(self, message):
            answers.append(message)
    for session in ('a', 'unknown'):
        made.front._handle(Asking(), messages.TakeOver(7, session, 2))
    wait_for(lambda: len(answers) == 2)
    assert all('is not expected here' in answer.refusal and answer.number == 7 for answer in answers)


def test_options_that_name_no_other_host_are_refused(tmp_path):
    for hosts, why in ((('wss://x:1', 'wss://x:1'), 'named twice'), (('x:1',), 'is no wss'), (('ws://far:1',), 'use wss')):
        with pytest.raises(ValueError, match=why):
            Options(hosts=hosts)
    with pytest.raises(ValueError, match='no token'):
        Options(hosts=(OTHER,), host_token=str(tmp_path / 'nothing'))
    with pytest.raises(ValueError, match='from other hosts, and there is none'):
        Options(host_address=OTHER)
    (tmp_path / 'token').write_text('x')
    options = Options(hosts=(OTHER,), host_token=str(tmp_path / 'token'))
    assert [str(each) for each in options.endpoints()] == [OTHER]
    assert options.host_arguments == ['--host-token', str(tmp_path / 'token')]


# --- with real servers, gateways and robots ---


@pytest.fixture(scope='module')
def two_hosts(tmp_path_factory):
    """A fleet of two servers, with place for a robot each, and its gateway; and a second host with its own."""
    folder = tmp_path_factory.mktemp('hosts')
    files, socket, started = FleetFiles(folder), folder / 'front.sock', []
    process = None
    try:
        gateway = HostGateway(files, 'a', FIRST, socket, folder / 'store')
        started.append(gateway.stop_gateway)
        other = Host(files, 'b', SECOND, gateway.url, options=('--backend', 'onnx'))
        started.append(other.stop)
        with open(folder / 'log', 'w') as log:
            process = subprocess.Popen(
                [sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--servers', '2', '--socket', str(socket),
                 '--store', str(folder / 'store'), '--page', '-1', '--sessions', '1', '--full', '1000', '--host', other.url,
                 '--host-address', gateway.url,
                 '--host-token', files.files[0], '--host-ca', files.files[1], '--host-certificate', files.files[2],
                 '--', '--backend', 'onnx', '--ticks', '0', '--realtime-priority', '0'], stdout=log, stderr=log)
        other.server.wait()
        wait_for(lambda: process.poll() is not None or [server['alive'] for server in servers(socket)] == [True] * 3,
                 timeout=240.0)
        assert process.poll() is None, (folder / 'log').read_text()
        yield socket, gateway, other
    finally:
        if process:
            process.terminate()
            code = process.wait(60)
        for stop in started[::-1]:
            stop()
    assert code == 0, (folder / 'log').read_text()


def servers(socket):
    try:
        return ask_status(socket)['fleet']['servers']
    except Unavailable:
        return []


def drive(robot, ticks=2):
    for _ in range(ticks):
        answer = robot.tick(due=60.0, patience=120.0)
        assert answer.tier is not Tier.NONE, answer.reason
        np.testing.assert_array_equal(answer.plan, robot.twin_answers(answer.tier)[0])


def ask_to_come_back(socket, session):
    """Ask for what the front may have begun by itself."""
    try:
        ask_move(socket, session, 'auto', patience=60.0)
    except MoveError as error:
        assert 'is moving already' in str(error), error


def follow(robot, generation):
    """Wait until a robot that does not drive has followed its session, which has moved."""
    end = time.monotonic() + 60.0
    while robot.generation < generation:
        assert time.monotonic() < end, f'it is still at {robot.server}'
        robot.idle(0.05)


@pytest.mark.slow
@pytest.mark.waiting(seconds=45)
def test_a_third_robot_lands_on_the_other_host_and_goes_on_when_that_is_killed(two_hosts):
    socket, gateway, other = two_hosts
    engine = load('tiny', 'onnx', sessions=8)
    first, second = (Robot(seed, socket, engine, files=other.files) for seed in (1, 2))
    for robot in (first, second):
        drive(robot)
    with pytest.raises(Unavailable, match='no server has'):
        open_link(socket, '/without a certificate', None, 'stranger', patience=5.0)

    third = Robot(3, socket, engine, files=other.files)
    assert isinstance(third.link.connection, NetworkConnection)
    assert [each['session'] for each in other.server.status()['robots']] == [third.session]
    drive(third, 4)
    # One that comes over the network, by its gateway, is sent on there by the same front.
    fourth = Robot(4, gateway.endpoint, engine, files=other.files)
    drive(fourth, 2)
    assert {each['session'] for each in other.server.status()['robots']} == {third.session, fourth.session}

    # A robot whose own server is to be emptied goes there, too, while it drives.
    generation = first.generation
    ask_move(socket, first.session, other.url, patience=60.0)
    follow(first, generation + 1)
    assert str(first.server) == other.url and first.generation == generation + 1
    drive(first)
    store = FileStore(socket.parent / 'store')
    assert owner_of(store, first.session)[1] == other.url
    store.close()
    wait_for(lambda: servers(socket)[2]['sessions'] == 3)
    # It is told to come back, to where there is place again: by the gateway and the front, in its own past, while it drives.
    ask_to_come_back(socket, first.session)
    follow(first, generation + 2)
    assert str(first.server) != other.url and first.generation == generation + 2
    drive(first)
    wait_for(lambda: [server['sessions'] for server in servers(socket)] == [1, 1, 2])
    # When its robot has left, another one comes back without being asked, and takes what is unanswered with it.
    first.close()
    away, end = {third.session, fourth.session}, time.monotonic() + 60.0
    while len(away) == 2 and time.monotonic() < end:
        for each in (third, fourth):
            drive(each, 1)
        away = {each['session'] for each in other.server.status()['robots']}
    back, stays = (third, fourth) if fourth.session in away else (fourth, third)
    assert away == {stays.session}
    drive(back)
    drive(stays)
    assert back.generation == stays.generation + 1
    wait_for(lambda: [server['sessions'] for server in servers(socket)] == [1, 1, 1])
    time.sleep(3.0)
    assert [server['sessions'] for server in servers(socket)] == [1, 1, 1]  # and nothing goes to and fro
    first, third, fourth = back, stays, first

    time.sleep(1.0)  # more than a session's period in the store, from tick to tick
    drive(third, 1)
    time.sleep(1.5)
    other.stop(kill=True)
    wait_for(lambda: not servers(socket)[2]['alive'] and servers(socket)[2]['problem'], timeout=15.0)
    assert sum(server['alive'] for server in servers(socket)) == 2
    for robot in (third, first):
        robot.link.connection.close()
        robot.link = None
    # There is place for one of them, where the first one was.
    wait_for(lambda: servers(socket)[0]['sessions'] + servers(socket)[1]['sessions'] == 1, timeout=30.0)
    third.connect(socket)
    assert third.link.frames >= 5 and not isinstance(third.link.connection, NetworkConnection)  # here, in its own past
    assert third.tick(due=60.0, patience=120.0).tier is not Tier.NONE
    for _ in range(3):  # it drives with its own model: no robot is sent to a host that is away
        with pytest.raises(Unavailable, match='no server has'):
            first.connect(socket)
    drive(second)
    for robot in (second, third, fourth):
        robot.close()

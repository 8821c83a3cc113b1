"""The server: whatever comes over a connection, the other robots go on, and nothing of it stays behind."""
import contextlib
import io
import json
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from fake_service import PLAN, FakeService, serving, wait_for

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.client.link import Unavailable, ask_status, open_link
from worldmodel_ros.serving.server import robot as robot_module, server as server_module
from worldmodel_ros.serving.server.process import log_handler
from worldmodel_ros.serving.server.server import Limits
from worldmodel_ros.serving.service.quotas import TokenBuckets
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.address import ListeningSocket, connect
from worldmodel_ros.serving.transport.codec import pack
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost

PATIENCE = 60.0  # s, on a busy machine


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path / 'engine.sock') as running:
        yield running


def send_tick(link, number=1, slot=0, value=9, **changes):
    link.slots.write(slot, number, np.full((64, 64, 3), value, np.uint8))
    fields = dict(stamp=5, episode=1, goal='red', due=time.monotonic() + 1.0, answer=True, executed=np.zeros(2))
    link.connection.send(messages.Tick(number, slot, **{**fields, **changes}))


def receive(link):
    message, descriptor = link.connection.receive(PATIENCE)
    return message, None if descriptor is None else pictures.take(descriptor)


def closed(link):
    with pytest.raises(ConnectionLost):
        while link.connection.receive(PATIENCE):
            pass
    link.connection.close()
    return True


def test_a_frame_goes_in_and_its_plan_and_pictures_come_out(served):
    link = open_link(served.path, '/robot', TINY)
    assert link.spec == TINY and link.backend == 'fake'
    send_tick(link, number=1, slot=3, value=200)
    planned, _ = receive(link)
    assert (planned.number, planned.tier, planned.reason) == (1, Tier.TWO_STEP, '')
    assert np.array_equal(planned.plan, PLAN)
    imagined, frames = receive(link)
    assert isinstance(imagined, messages.Imagined) and frames.shape == (4, 64, 64, 3) and (frames == 128).all()
    taken = served.service.ticks[0]
    assert (taken.image == 200).all() and (taken.goal, taken.sequence, taken.stamp) == ('red', 1, 5)
    link.connection.close()


def test_the_smaller_models_tier_arrives_by_its_name(served):
    from worldmodel_ros.serving import scheduler as scheduling
    served.service.tier = scheduling.Tier.SMALLER
    link = open_link(served.path, '/robot', TINY)
    send_tick(link)
    planned, _ = receive(link)
    assert planned.tier == Tier.SMALLER and planned.reason == 'little time'
    link.connection.close()


def test_a_refusal_and_a_failure_come_back_with_their_reasons(served):
    link = open_link(served.path, '/robot', TINY)
    served.service.answer = 'refusal'
    send_tick(link, 1)
    refused, _ = receive(link)
    assert isinstance(refused, messages.Refused) and '12.3 ms late' in refused.reason
    served.service.answer = 'failure'
    send_tick(link, 2)
    failed, _ = receive(link)
    assert isinstance(failed, messages.Failed) and 'not finite' in failed.reason
    link.connection.close()


def test_questions_are_answered_branch_by_branch(served):
    link = open_link(served.path, '/robot', TINY)
    branches = (messages.Branch('left', 3, np.float32([[0.3, 1.0]] * 3)),
                messages.Branch('policy', 8, np.zeros((0, 0))))
    link.connection.send(messages.Question(4, 'red', time.monotonic() + 1.0, 0, branches, 2))
    for name, steps in (('left', 3), ('policy', 8)):
        branch, frames = receive(link)
        assert (branch.name, len(branch.actions), frames.shape) == (name, steps, (steps, 64, 64, 3))
    end, _ = receive(link)
    assert (end.number, end.stamp, end.complete, end.refusal) == (4, 77, True, '')
    link.connection.send(messages.Question(5, 'red', time.monotonic() + 1.0, -1, branches, 2))
    end, _ = receive(link)
    assert end.refusal == 'older ones are not kept'
    link.connection.close()


@pytest.mark.parametrize('changes, refusal', [
    ({'branches': ()}, 'no branch'), ({'due': float('nan')}, 'due is nan'), ({'due': float('inf')}, 'due is inf'),
    ({'denoising_steps': 3}, '3 denoising steps')])
def test_a_question_that_could_never_be_answered_is_refused_and_leaves_nothing_open(served, changes, refusal):
    link = open_link(served.path, '/robot', TINY)
    branch = messages.Branch('policy', 8, np.zeros((0, 0)))
    for number in range(1, 20):  # more than may be open
        fields = dict(goal='red', due=1e9, stamp=0, branches=(branch,), denoising_steps=2)
        link.connection.send(messages.Question(number, **{**fields, **changes}))
        answer, _ = receive(link)
        assert (answer.number, answer.complete) == (number, False) and refusal in answer.refusal
    link.connection.send(messages.Question(20, **fields))
    assert isinstance(receive(link)[0], messages.ImaginedBranch) and receive(link)[0].complete
    link.connection.close()


def test_a_number_is_not_asked_with_twice_at_a_time(served):
    link = open_link(served.path, '/robot', TINY)
    served.service.ask = lambda *_: Promise()  # never answered
    for _ in range(2):
        link.connection.send(messages.Question(7, 'red', 1e9, 0, (messages.Branch('policy', 8, np.zeros((0, 0))),), 2))
    rejected, _ = receive(link)
    assert 'question 7 is open already' in rejected.reason and closed(link)


def test_a_failure_at_each_tick_is_logged_now_and_then_with_the_number_of_those_left_out(served, monkeypatch):
    log = io.StringIO()
    handler, logger = log_handler(log), logging.getLogger('worldmodel_ros.serving')
    throttle, = handler.filters
    now = [100.0]
    monkeypatch.setattr(throttle, '_clock', lambda: now[0])
    logger.addHandler(handler)
    try:
        links = [open_link(served.path, name, TINY) for name in ('/one', '/two')]
        robots = wait_for(lambda: len(served.service.listeners) == 2 and list(served.service.listeners.values()))
        for _ in range(240):  # half a minute at 8 Hz
            now[0] += 0.125
            for robot in robots:
                robot.failed('OutOfMemoryError', RuntimeError('no memory'))
        text = log.getvalue()
        for name in ('/one', '/two'):
            assert text.count(f'{name}: OutOfMemoryError') == 3
        assert 'OutOfMemoryError (79 lines like this were left out)' in text
        assert 'RuntimeError: no memory' in text
    finally:
        logger.removeHandler(handler)
        for link in links:
            link.connection.close()


@pytest.mark.parametrize('changes, refusal', [
    ({'executed': np.zeros(3)}, '2 finite numbers'), ({'executed': np.full(2, np.nan)}, '2 finite numbers'),
    ({'due': float('nan')}, 'due must be'), ({'goal': 'purple'}, "'purple'; this model knows red"),
    ({'slot': 200}, 'no slot 200'), ({'slot': 1}, 'torn, or stale')])
def test_a_tick_that_makes_no_sense_ends_its_connection_and_no_other(served, changes, refusal):
    good, bad = (open_link(served.path, name, TINY) for name in ('/good', '/bad'))
    fields = dict(number=1, slot=0, stamp=5, episode=1, goal='red', due=1e9, answer=True, executed=np.zeros(2))
    bad.slots.write(0, 1, np.zeros((64, 64, 3), np.uint8))
    bad.connection.send(messages.Tick(**{**fields, **changes}))
    rejected, _ = receive(bad)
    assert isinstance(rejected, messages.Rejected) and refusal in rejected.reason
    assert closed(bad)
    send_tick(good)
    assert isinstance(receive(good)[0], messages.Planned)
    good.connection.close()


@pytest.mark.parametrize('data, refusal', [
    (b'nonsense', 'no message of this protocol'), (b'', None), (pack(messages.Hello('x'))[:-1], 'truncated'),
    (pack(messages.Answered(1, 2, True, '')), 'before Hello'),
    (pack(messages.Hello('x'))[:4] + b'\x63\x00' + pack(messages.Hello('x'))[6:], 'speaks version 99')])
def test_a_stranger_is_refused_with_the_reason(served, data, refusal):
    connection = Connection(connect(served.path, 1.0))
    connection._socket.send(data)
    if refusal:
        message, _ = connection.receive(PATIENCE)
        assert isinstance(message, messages.Rejected) and refusal in message.reason
    with pytest.raises(ConnectionLost):
        connection.receive(PATIENCE)
    connection.close()
    assert ask_status(served.path)['robots'] == []


@pytest.mark.parametrize('load', [False, True])
@pytest.mark.parametrize(
    'name', ['/tmp/absolute.safetensors', '../weights-01.safetensors', '~/s.safetensors', '', 'x' * 60_000])
def test_a_robot_that_names_files_elsewhere_is_refused_and_drives_on(served, name, load):
    link, home = open_link(served.path, '/robot', TINY), served.path.parent
    link.connection.send(messages.SessionFile(1, load, name))
    done, _ = receive(link)
    assert isinstance(done, messages.Done) and 'without a folder' in done.refusal and len(done.refusal) < 500
    assert not list(home.rglob('*.safetensors'))
    send_tick(link)
    assert isinstance(receive(link)[0], messages.Planned)
    link.connection.close()


def test_a_robot_has_one_session_saved_at_a_time_while_the_others_drive(served):
    link, other = (open_link(served.path, f'/robot{number}', TINY) for number in (1, 2))
    written, save = threading.Event(), served.service.save
    served.service.save = lambda *given: written.wait(PATIENCE) and save(*given)  # the disk takes as long as it likes
    for number in (1, 2, 3):
        link.connection.send(messages.SessionFile(number, False, 's.safetensors'))
    answers = [receive(link)[0] for _ in range(2)]
    assert [answer.number for answer in answers] == [2, 3] and all('wait for it' in answer.refusal for answer in answers)
    send_tick(other)
    assert isinstance(receive(other)[0], messages.Planned)
    written.set()
    done, _ = receive(link)
    assert (done.number, done.refusal) == (1, '')
    assert (served.path.parent / 'sessions' / 's.safetensors').is_file()
    for each in (link, other):
        each.connection.close()


def test_a_robot_that_dies_frees_its_session_and_its_memory(served):
    before = len(os.listdir('/proc/self/fd'))
    for _ in range(5):  # two sessions are all there are
        link = open_link(served.path, '/robot', TINY)
        send_tick(link)
        receive(link)
        link.connection.close()
        wait_for(lambda: not served.service.listeners)
    assert len(served.service.closed) == 5
    del link
    wait_for(lambda: len(os.listdir('/proc/self/fd')) <= before)


def test_who_opens_sessions_too_often_is_refused_unless_a_server_has_sent_it_here(served):
    opening = []
    served.server._hellos = TokenBuckets(0.01, 300.0)  # three, and none soon
    served.server._keeper = SimpleNamespace(expects=lambda session: session == 'moved', close=lambda: None,
                                            submit=lambda work, session, room: opening.append(session))

    def says_hello(session):
        connection = Connection(connect(served.path, 1.0))
        connection.send(messages.Hello('/robot', session))
        return connection

    for session, count in (('own', 3), ('moved', 5)):
        for number in range(1, count + 1):
            connection = says_hello(session)
            wait_for(lambda: opening.count(session) >= number)
            connection.close()
        refused = says_hello('own')
        assert 'too often' in refused.receive(PATIENCE)[0].reason and opening.count('own') == 3
        refused.close()


def test_who_comes_back_twice_at_once_is_welcomed_over_the_newer_connection_and_once():
    def pair():
        return map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    todo = []
    kept = SimpleNamespace(generation=3, frames=7, newest=0, note='', number=1,
                           log=SimpleNamespace(require_own=lambda: None))
    keeper = SimpleNamespace(submit=lambda call, *arguments: todo.append(lambda: call(*arguments)), rest=lambda kept: None,
                             open=lambda *what: kept)
    ends = [pair() for _ in range(3)]
    (first, _), (second, _), (third, client) = ends
    robot = robot_module.Robot('robot', 1, first, FakeService(), None, None, None, keeper, linger=9.0)
    robot.open('session')
    todo.pop()()
    assert robot.park()
    robot.attach(second, 1, 9.0)
    assert robot.park()  # lost before the store has been asked
    robot.attach(third, 1, 9.0)
    for each in todo:
        each()
    welcome, descriptor = client.receive(PATIENCE)
    os.close(descriptor)
    assert isinstance(welcome, messages.Welcome) and client.receive(0.1) is None
    for each in (first, second, third, client):
        each.close()


def test_a_session_is_not_opened_for_a_robot_that_is_gone_by_then():
    todo, opened = [], []
    keeper = SimpleNamespace(submit=lambda call, *arguments: todo.append(lambda: call(*arguments)),
                             open=lambda *what: opened.append(what))
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    robot = robot_module.Robot('robot', 1, one, FakeService(), None, None, None, keeper)
    robot.open('session')
    robot.close()
    todo.pop()()
    assert not opened and not todo
    one.close()
    other.close()


class FakeKeeper:
    """Sessions that take until ``stored`` to end."""

    def __init__(self, service):
        self.service, self.stored, self.settings = service, threading.Event(), SimpleNamespace(patience=PATIENCE)
        self.executor = ThreadPoolExecutor(4)
        self.submit = self.executor.submit

    def expects(self, name):
        return True

    def open(self, robot, account, name, wanted):
        return SimpleNamespace(name=name, number=self.service.open(robot), generation=1, frames=0, newest=0, note='')

    def rest(self, kept):
        pass

    def end(self, kept):
        assert self.stored.wait(PATIENCE)
        self.service.close(kept.number)

    def close(self):
        self.stored.set()
        self.executor.shutdown()


def test_a_newcomer_gets_the_place_of_one_session_that_waits_even_if_that_is_stored_first(tmp_path):
    def comes(name, patience=PATIENCE):
        return open_link(running.path, name, TINY, name[1:], patience=patience, linger=60.0)

    with serving(tmp_path / 'engine.sock', FakeService(sessions=3)) as running:
        keeper = running.server._keeper = FakeKeeper(running.service)
        for name in ('/one', '/two', '/three'):
            comes(name).connection.close()
        wait_for(lambda: len(running.server._parked) == 3)
        for _ in range(2):  # it does not wait, and tries again
            with pytest.raises(Unavailable, match='did not answer'):
                comes('/new', 0.1)
        wait_for(lambda: len(running.server._peers) == 0)
        with ThreadPoolExecutor(2) as both:
            links = [both.submit(comes, name) for name in ('/new', '/newer')]
            wait_for(lambda: len(running.server._parked) == 1)
            keeper.stored.set()
            for link in links:
                link.result().connection.close()
        assert len(running.service.closed) == 2 and '/three' in [robot.name for robot, _ in running.server._parked.values()]


def test_more_robots_than_there_are_sessions_are_told_so(served):
    links = [open_link(served.path, f'/robot{k}', TINY) for k in range(2)]
    with pytest.raises(Unavailable, match='2 sessions are open'):
        open_link(served.path, '/robot3', TINY)
    for link in links:
        link.connection.close()


def test_a_robot_that_does_not_read_is_let_go(served):
    link = open_link(served.path, '/robot', TINY)
    link.connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    served.service.answer = 'refusal'
    with pytest.raises(ConnectionLost):
        for number in range(1, 200_000):
            send_tick(link, number)
            time.sleep(0.0)
            if number % 100 == 0:
                wait_for(lambda: len(served.service.ticks) >= number or not served.service.listeners)
    wait_for(lambda: not served.service.listeners)
    link.connection.close()


def test_the_server_refuses_a_descriptor_that_it_did_not_ask_for(served):
    link = open_link(served.path, '/robot', TINY)
    null = os.open('/dev/null', os.O_RDONLY)
    link.connection.send(messages.StatusRequest(), null)
    os.close(null)
    rejected, _ = receive(link)
    assert 'no memory is taken' in rejected.reason and closed(link)


def test_a_front_end_refuses_the_server_of_another_robot(tmp_path):
    from dataclasses import replace
    arm = replace(TINY, name='arm', action_names=('joint1', 'joint2'))
    with serving(tmp_path / 'engine.sock', FakeService(arm)) as running:
        with pytest.raises(Unavailable, match='another robot: action_names'):
            open_link(running.path, '/robot', TINY)
        wait_for(lambda: not running.service.listeners)
        larger = replace(arm, image_size=(256, 256), width=1024)
        open_link(running.path, '/robot', larger).connection.close()


def test_the_status_tells_of_each_robot(served):
    link = open_link(served.path, '/robot1/world_model_node', TINY)
    send_tick(link)
    receive(link)
    status = ask_status(served.path)
    robot, = status['robots']
    assert (robot['robot'], robot['pid']) == ('/robot1/world_model_node', os.getpid())
    assert (robot['ticks'], robot['two_step']) == (1, 1)
    assert status['service']['backend'] == 'fake' and status['pid'] == os.getpid()
    link.connection.close()


# What one robot may take of what others need, too


def test_a_robot_that_sends_nothing_is_told_so_and_makes_room_and_one_that_waits_for_an_answer_is_left(
        tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_LOOK', 0.02)
    service = FakeService(sessions=3)
    with serving(tmp_path / 'engine.sock', service, Limits(idle=0.5)) as running:
        idle, busy, asking = (open_link(running.path, name, TINY) for name in ('/idle', '/busy', '/asking'))
        service.ask = lambda *_: Promise()  # never answered
        branch = messages.Branch('policy', 8, np.zeros((0, 0)))
        asking.connection.send(messages.Question(7, 'red', 1e9, 0, (branch,), 2))
        for number in range(1, 21):
            send_tick(busy, number)
            time.sleep(0.05)
        told, _ = receive(idle)
        assert isinstance(told, messages.Idle) and 'nothing has come for 0.5 s' in told.reason and closed(idle)
        open_link(running.path, '/new', TINY).connection.close()
        assert [robot['robot'] for robot in ask_status(running.path)['robots']][:2] == ['/busy', '/asking']
        for link in (busy, asking):
            link.connection.close()


def test_a_connection_that_does_not_say_what_it_is_for_ends(served, monkeypatch):
    monkeypatch.setattr(server_module, '_LOOK', 0.02)
    monkeypatch.setattr(server_module, '_HELLO', 0.2)
    connection = Connection(connect(served.path, 1.0))
    assert isinstance(connection.receive(PATIENCE)[0], messages.Idle)
    with pytest.raises(ConnectionLost):
        connection.receive(PATIENCE)
    connection.close()


def test_a_flood_of_messages_is_read_no_faster_than_is_allowed_and_the_others_as_ever(tmp_path):
    with serving(tmp_path / 'engine.sock', FakeService(), Limits(messages=50.0)) as running:
        good, bad = (open_link(running.path, name, TINY) for name in ('/good', '/bad'))
        with pytest.raises(ConnectionLost, match='does not read'):
            for _ in range(100_000):
                bad.connection.send(messages.StatusRequest())
        begun, count = time.monotonic(), 0
        while time.monotonic() < begun + 2.0:
            count += bad.connection.receive(0.1) is not None
        assert 150 < count < 230  # 50 a second, and 2 s of that at once
        assert ask_status(running.path)['connections_paused'] > 10
        send_tick(good)
        assert isinstance(receive(good)[0], messages.Planned)
        for link in (good, bad):
            link.connection.close()


def test_one_process_cannot_take_all_connections(served, monkeypatch):
    monkeypatch.setattr(server_module, '_OF_A_PROCESS', 3)
    open_ones = [Connection(connect(served.path, 1.0)) for _ in range(3)]
    wait_for(lambda: len(served.server._peers) == 3)
    with pytest.raises(Unavailable, match=f'3 without a session are of process {os.getpid()}.*and 3 of those'):
        open_link(served.path, '/robot', TINY)
    for connection in open_ones:
        connection.close()


def test_a_gateway_has_as_many_connections_as_there_are_sessions_and_its_requests_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_OF_A_PROCESS', 1)
    with serving(tmp_path / 'engine.sock', FakeService(sessions=3)) as running:
        links = [open_link(running.path, f'/robot{k}', TINY) for k in range(3)]
        assert len(ask_status(running.path)['robots']) == 3
        with pytest.raises(Unavailable, match='3 sessions are open'):
            open_link(running.path, '/robot3', TINY)
        for link in links:
            link.connection.close()


def test_pictures_that_a_robot_does_not_read_take_no_more_memory_than_is_allowed(served, monkeypatch):
    size = 4 * 64 * 64 * 3  # bytes of a tick's pictures
    monkeypatch.setattr(robot_module, '_UNREAD', 5 * size)
    link = open_link(served.path, '/robot', TINY)

    def drive(first, last):
        for number in range(first, last):
            send_tick(link, number)
            wait_for(lambda: len(served.service.ticks) >= number)
        served.service._thread.submit(lambda: None).result()

    drive(1, 31)
    wait_for(lambda: served.server._peers and ask_status(served.path)['robots'][0].get('pictures_dropped', 0) > 5)
    came = []
    while (received := link.connection.receive(0.5)) is not None:
        if received[1] is not None:
            pictures.take(received[1])
        came.append(type(received[0]))
    assert came.count(messages.Planned) == 30 and came.count(messages.Imagined) <= 5
    drive(31, 32)
    assert [type(receive(link)[0]) for _ in range(2)] == [messages.Planned, messages.Imagined]
    link.connection.close()


def test_a_robot_that_asks_and_does_not_read_the_answers_is_let_go(served, monkeypatch):
    monkeypatch.setattr(robot_module, '_UNREAD', 1 << 20)
    link = open_link(served.path, '/robot', TINY)
    branches = tuple(messages.Branch(f'{k}', 20, np.zeros((0, 0))) for k in range(16))  # 4 MiB
    link.connection.send(messages.Question(1, 'red', 1e9, 0, branches, 2))
    wait_for(lambda: not served.service.listeners)
    link.connection.close()


@pytest.mark.parametrize('answer, reason', [
    (messages.Status('[' * 100_000), 'recursion'), (messages.Status('no JSON'), 'Expecting value'),
    (messages.Status('3'), 'is a int'), (messages.Rejected('it is full'), '^it is full'),
    (messages.Answered(1, 2, True, ''), 'answered with Answered')])
def test_a_status_that_is_none_is_refused_with_words(tmp_path, answer, reason):
    with saying(tmp_path / 'engine.sock', answer) as path, pytest.raises(Unavailable, match=reason):
        ask_status(path)


@pytest.mark.parametrize('spec', ['[' * 100_000, '{"heads": 0}', 'null', json.dumps({**TINY.to_dict(), 'heads': 0})])
def test_a_server_whose_model_makes_no_sense_is_refused_with_words(tmp_path, spec):
    memory = os.memfd_create('frames')
    with saying(tmp_path / 'engine.sock', messages.Welcome('tiny', 'fake', spec, 8), memory) as path:
        with pytest.raises(Unavailable, match='its model cannot be understood'):
            open_link(path, '/robot', TINY)


@contextlib.contextmanager
def saying(path, answer, descriptor=None):
    """A server that says one thing to whoever connects."""
    listening = ListeningSocket(path)
    listening.listen()

    def serve():
        select.select([listening], [], [], PATIENCE)
        connection = Connection(listening.accept()[0])
        connection.receive(PATIENCE)
        connection.send(answer, descriptor)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path
    finally:
        thread.join()
        listening.close()

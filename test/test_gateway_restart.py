"""A gateway that ends, or is killed: its clients' sessions wait in the engine, and go on over the next gateway."""
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from camera_paths import camera, commands, path as camera_path
from fake_service import PLAN, FakeService, serving, wait_for
from gateway_rig import TIMEOUT, Running, client, heard, infer, robot, say
from test_gateway_camera import World

from worldmodel_ros.serving.client.link import ask_status
from worldmodel_ros.serving.gateway.accounts import Account
from worldmodel_ros.serving.gateway.camera import PATH
from worldmodel_ros.serving.gateway.server import Limits
from worldmodel_ros.serving.server.server import Limits as ServerLimits
from worldmodel_ros.serving.service.quotas import TokenBuckets

PROGRAM = [sys.executable, '-m', 'worldmodel_ros.cli', 'gateway', '--port', '0', '--linger', '5']


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path / 'engine.sock', FakeService(sessions=3)) as server:
        server.server._hellos = TokenBuckets(0.0, 1.0)
        yield server


@pytest.fixture
def gateways(served):
    """Starts gateways before the same server."""
    started = []

    def start(**limits):
        started.append(Running(served.path, limits=Limits(**{'linger': 5.0, **limits})))
        return started[-1]
    yield start
    for each in started:
        each.stop()


class Killed:
    """``worldmodel gateway`` as a process."""

    def __init__(self, socket):
        self.process = subprocess.Popen([*PROGRAM, '--socket', str(socket)], stderr=subprocess.PIPE, text=True)
        self.tls = None
        line = next(line for line in self.process.stderr if 'is the gateway at' in line)
        self._url = line.split(' at ')[1].split()[0]

    def url(self, path='/'):
        return self._url + path

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def drive(connection, *steps, **changes):
    return [infer(connection, session_id='arm', step_id=step, deadline_ms=10_000, **changes) for step in steps]


def test_a_session_goes_on_after_a_gateway_was_killed_and_no_step_is_done_twice(served):
    first = Killed(served.path)
    with robot(first) as connection:
        replies = drive(connection, 1, 2, 3)
        first.stop()
    second = Killed(served.path)
    try:
        with robot(second) as connection:
            again, = drive(connection, 3)  # its answer may have been lost
            later, = drive(connection, 4)
            stale, = drive(connection, 2)
    finally:
        second.stop()
    assert {key: again[key] for key in ('step_id', 'episode', 'valid_steps')} == {'step_id': 3, 'episode': 1, 'valid_steps': 4}
    assert again['actions'].tolist() == replies[2]['actions'].tolist() == PLAN.tolist()
    assert (later['episode'], later['step_id']) == (1, 4) and 'refused: step' in stale
    assert [(tick.sequence, tick.episode) for tick in served.service.ticks] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert len(served.service.listeners) == 1 and not served.service.closed


def test_what_was_asked_when_the_gateway_ended_is_answered_by_the_next_one(served, gateways):
    served.service.delay = 1.0
    first = gateways()
    with robot(first) as connection:
        say(connection, session_id='arm', step_id=1, deadline_ms=10_000)
        wait_for(lambda: served.service.ticks)
        first.stop()
    with robot(gateways()) as connection:
        reply, = drive(connection, 1)
    assert reply['actions'].tolist() == PLAN.tolist() and reply['server_timing']['infer_ms'] > 900.0
    assert len(served.service.ticks) == 1


def test_the_plan_that_is_being_executed_is_known_to_the_next_gateway(served, gateways):
    first = gateways()
    with robot(first) as connection:
        drive(connection, 1)
        first.stop()
    with robot(gateways()) as connection:
        drive(connection, 2, executed_actions=PLAN[:1], inference_delay=2)
    assert served.service.ticks[1].prefix.tolist() == PLAN[1:3].tolist()


def test_a_reset_outlasts_the_gateway(served, gateways):
    first = gateways()
    with robot(first) as connection:
        drive(connection, 1, 2)
        infer(connection, session_id='arm', endpoint='reset')
        first.stop()
    with robot(gateways()) as connection:
        reply, = drive(connection, 1)
    assert reply['episode'] == 2 and served.service.ticks[-1].episode == 2


def driven_before(gateways, resets):
    """A gateway that ends after its robot was reset so often, and drove two steps each time."""
    first = gateways()
    with robot(first) as connection:
        for _ in range(resets):
            infer(connection, session_id='arm', endpoint='reset')
            drive(connection, 1, 2)
        first.stop()


def test_a_reset_that_comes_first_after_a_restart_forgets_what_was_before(served, gateways):
    driven_before(gateways, 2)
    second = gateways()
    with robot(second) as connection:
        infer(connection, session_id='arm', endpoint='reset')
        replies = drive(connection, 1, 2)
        second.stop()
    with robot(gateways()) as connection:  # the reset is not done again
        replies += drive(connection, 2, 3)
    assert [reply['step_id'] for reply in replies] == [1, 2, 2, 3]
    ticks = served.service.ticks
    assert [tick.sequence for tick in ticks] == [1, 2, 3, 4, 5, 6, 7], 'one session of the engine'
    assert len({tick.episode for tick in ticks[2:4]}) == 1 and len({tick.episode for tick in ticks[4:]}) == 1
    assert ticks[4].episode > ticks[3].episode and not ticks[4].executed.any(), 'no plan was being executed'


def test_a_reset_is_known_to_the_engine_when_the_next_gateway_ends_before_a_frame(served, gateways):
    driven_before(gateways, 1)
    second = gateways()
    with robot(second) as connection:
        infer(connection, session_id='arm', endpoint='reset')
        assert 'refused: observation' in drive(connection, 1, prompt='no such goal')[0]  # the engine was reached
        second.stop()
    with robot(gateways()) as connection:
        reply, = drive(connection, 2)
    before, newest = served.service.ticks[-2:]
    assert reply['episode'] == newest.episode > before.episode and not newest.executed.any()


def test_a_session_whose_client_does_not_come_back_ends_on_the_engine_too(served, gateways):
    first = gateways(linger=0.3)
    with robot(first) as connection:
        drive(connection, 1)
        first.stop()
    assert ask_status(served.path)['waiting'] == 1
    wait_for(lambda: served.service.closed == [1], TIMEOUT)
    with robot(gateways()) as connection:
        reply, = drive(connection, 2)
    assert reply['episode'] == 1 and served.service.ticks[-1].sequence == 1, 'it began from nothing'


def test_a_session_waits_longer_than_the_engine_waits_for_a_message(served, gateways):
    served.server._limits = ServerLimits(idle=0.5)
    with robot(gateways(linger=60.0)) as connection:
        drive(connection, 1)
    wait_for(lambda: ask_status(served.path)['waiting'] == 1)
    time.sleep(1.5)  # and longer than the engine looks for sessions whose time is over
    with robot(gateways()) as connection:
        assert [reply['episode'] for reply in drive(connection, 1, 2)] == [1, 1]
    assert [tick.sequence for tick in served.service.ticks] == [1, 2] and not served.service.closed


def test_what_ends_on_purpose_does_not_wait_on_the_engine(served, gateways):
    running = gateways(linger=0.2)
    with robot(running) as connection, robot(running) as other:
        drive(connection, 1)
        infer(other)  # without a name: it ends with its connection
    wait_for(lambda: sorted(served.service.closed) == [1, 2], TIMEOUT)
    assert ask_status(served.path)['waiting'] == 0


def test_sessions_that_wait_give_their_places_to_who_is_there_and_the_longest_waiting_one_first(served, gateways):
    first = gateways()
    with robot(first) as one, robot(first) as two:
        infer(one, session_id='one', step_id=1)
        infer(two, session_id='two', step_id=1)
        time.sleep(0.05)
        first.stop()
    wait_for(lambda: ask_status(served.path)['waiting'] == 2)
    second = gateways()
    with robot(second) as three, robot(second) as four, robot(second) as again:
        infer(three, session_id='three', step_id=1)
        infer(four, session_id='four', step_id=1)
        assert len(served.service.closed) == 1
        waiting = 'two' if served.service.closed == [1] else 'one'
        assert infer(again, session_id=waiting, step_id=2)['episode'] == 1
    assert len(served.service.ticks) == 5


def test_another_account_does_not_reach_what_waits(served, gateways):
    """The engine knows sessions by account and name."""
    first = gateways()
    with robot(first) as connection:
        drive(connection, 5)
        first.stop()
    second = gateways()
    session = second.call(second.gateway.sessions.claim, other(), 'arm', 'openpi', object())
    assert session.key != second.call(second.gateway.sessions.claim, other('local'), 'arm', 'openpi', object()).key


def other(name='other'):
    return Account(name, 'a' * 64)


def test_a_world_of_a_camera_goes_on_after_the_gateway_was_killed(served):
    poses, frames = camera_path(commands(16)), []
    first = Killed(served.path)
    with client(first, PATH) as connection:
        world = World(connection)
        frames += world.infer(0, 0, camera=camera(poses[:7]), image=np.zeros((64, 64, 3), np.uint8), event_id='a')[2:]
        first.stop()
    second = Killed(served.path)
    try:
        with client(second, PATH) as connection:
            world = World(connection)
            assert 'are not kept' in world.infer(0, 0, camera=camera(poses[:7]), event_id='a')[-1]['message']
            frames += world.infer(0, 0, camera=camera(poses[7:13]), event_id='b')[2:]
    finally:
        second.stop()
    assert sum(len(frame['video']) for frame in frames) == 13
    asked = [(question.keep, question.onward, len(question.branches[0].actions)) for question in served.service.questions]
    assert asked == [(True, False, 4), (False, True, 2), (True, True, 8)], 'two actions waited for a chunk to be whole'
    assert np.allclose(served.service.questions[2].branches[0].actions, commands(16)[4:12], atol=1e-3)


def test_a_world_that_is_reset_first_after_a_restart_does_not_go_on(served, gateways):
    poses, image = camera_path(commands(16)), np.zeros((64, 64, 3), np.uint8)
    first = gateways()
    with client(first, PATH) as connection:
        world = World(connection)
        for _ in range(2):
            world.send(endpoint='reset')
            assert world.heard() == 'reset successful'
            world.infer(0, 0, camera=camera(poses[:5]), image=image)
        first.stop()
    with client(gateways(), PATH) as connection:
        world = World(connection)
        world.send(endpoint='reset')
        assert world.heard() == 'reset successful'
        assert 'no world yet' in world.infer(0, 0, camera=camera(poses[5:9]))[-1]['message']
        assert len(world.infer(0, 0, camera=camera(poses[:5]), image=image)[-1]['video'])


def test_a_session_that_moves_to_another_server_is_followed_with_what_was_not_answered(tmp_path, served, gateways):
    running = gateways()
    with serving(tmp_path / 'other.sock', FakeService()) as other, robot(running) as connection:
        drive(connection, 1)
        served.service.answer = 'nothing'
        say(connection, session_id='arm', step_id=2, deadline_ms=10_000)
        wait_for(lambda: len(served.service.ticks) == 2)
        moving, = [peer.robot for peer in served.server._peers.values()]
        send = moving._send

        def slow(message):  # its client has gone before this thread goes on
            send(message)
            wait_for(lambda: not served.server._peers)
        moving._send = slow
        moving.send_to(str(other.path), 0)
        assert heard(connection)['step_id'] == 2 and drive(connection, 3)[0]['step_id'] == 3
        assert [tick.sequence for tick in other.service.ticks] == [2, 3]
        assert ask_status(served.path)['waiting'] == 0
        other.stop()  # that server is lost: back to where the gateway asks first
        served.service.answer = 'plan'
        end = time.monotonic() + TIMEOUT
        while isinstance(reply := drive(connection, 4)[0], str):
            assert 'refused: engine' in reply and time.monotonic() < end
            time.sleep(0.1)
        assert served.service.ticks[-1].sequence == 4


def test_an_engine_without_a_past_for_it_begins_the_session_again(tmp_path, gateways, served):
    running = gateways()
    with robot(running) as connection:
        drive(connection, 1)
        served.stop()
        served.service.listeners.clear()
        served.start()
        served.server._hellos = TokenBuckets(0.0, 1.0)
        end = time.monotonic() + TIMEOUT
        while isinstance(reply := drive(connection, 2)[0], str):
            assert 'refused: engine' in reply and time.monotonic() < end
            time.sleep(0.1)
    assert reply['episode'] == 2


def test_a_reply_that_is_late_reaches_only_who_asked(served, gateways):
    """A second client of the same session takes it over: the first one's open request is answered by its own reply."""
    served.service.delay = 0.5
    running = gateways()
    with robot(running) as one, robot(running) as two:
        say(one, session_id='arm', step_id=1, deadline_ms=10_000)
        wait_for(lambda: served.service.ticks)
        assert drive(two, 1)[0]['step_id'] == heard(one)['step_id'] == 1
    assert len(served.service.ticks) == 1

"""The camera endpoint before the server of an open world model: image and poses in, video out, extended without a break."""
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import open_world
import pytest
from gateway_rig import TIMEOUT, Running, client, get, robot
from websockets.exceptions import InvalidStatus

from worldmodel_ros.engine.open_world.world import OpenWorld, WorldDescription
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.wan.camera import Intrinsics
from worldmodel_ros.serving.gateway.camera import PATH
from worldmodel_ros.serving.client.link import Unavailable, ask_status, open_link
from worldmodel_ros.serving.gateway.msgpack import decode, encode
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket, connect
from worldmodel_ros.serving.transport.connection import Connection
from worldmodel_ros.serving.worlds.server import WorldServer

pytestmark = pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')
H, W = open_world.SIZE
IMAGE = np.random.default_rng(0).integers(0, 256, (2 * H, 2 * W, 3), dtype=np.uint8)
PINHOLE = np.float32([60.0, 60.0, W, H])  # of IMAGE


@pytest.fixture(scope='module')
def model(tiny_world):
    return OpenWorld(WorldDescription.read(tiny_world), sessions=2)


class Served:
    """A server of a model, in a thread of this process."""

    def __init__(self, model, path):
        self.path, self._model = path, model
        self._networks = ThreadPoolExecutor(1)
        self.hold = threading.Event()  # networks wait for it, from a test's ``held`` on
        self.hold.set()
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(ready),), daemon=True)
        self._thread.start()
        assert ready.wait(TIMEOUT)

    @contextlib.contextmanager
    def held(self):
        """No chunk is imagined until the end of the block."""
        self.hold.clear()
        self._networks.submit(self.hold.wait)
        try:
            yield
        finally:
            self.hold.set()

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._networks.shutdown()

    async def _run(self, ready):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listening = ListeningSocket(self.path)
        listening.listen()
        try:
            await WorldServer(self._model, listening, self._networks).run(self._stop, ready.set)
        finally:
            listening.close()


@pytest.fixture(scope='module')
def served(model, tmp_path_factory):
    started = Served(model, tmp_path_factory.mktemp('worlds') / 'world.sock')
    yield started
    started.stop()


@pytest.fixture(scope='module')
def running(served):
    started = Running(served.path.with_name('nothing.sock'), world=served.path)  # no engine listens there
    yield started
    started.stop()


def poses(count, sideways=0.0):
    """A camera that moves ahead and turns; not what a base on wheels could do."""
    out = np.tile(np.eye(4), (count, 1, 1))
    for at in range(count):
        yaw = 0.02 * at
        out[at, [0, 0, 2, 2], [0, 2, 0, 2]] = np.cos(yaw), np.sin(yaw), -np.sin(yaw), np.cos(yaw)
        out[at, :3, 3] = sideways * at, -0.003 * at, 0.01 * at
    return out


class World:
    def __init__(self, connection):
        self.connection, self.config = connection, decode(connection.recv(TIMEOUT))

    def send(self, path, **fields):
        self.connection.send(encode({'prompt': 'a street', 'camera': {
            'poses': path, 'intrinsics': PINHOLE}, 'extensions': {'frames': 'uint8'}, **fields}))

    def heard(self):
        message = self.connection.recv(60.0)
        return message if isinstance(message, str) else decode(message)

    def infer(self, path, **fields):
        """All frames of a request, and its last message."""
        self.send(path, **fields)
        frames = []
        while True:
            message = self.heard()
            if message['type'] == 'receipt':
                continue
            if message['type'] == 'error':
                raise RuntimeError(message['message'])
            frames.append(message['video'])
            if message['index'] == message['total'] - 1:
                return np.concatenate(frames), message


@pytest.fixture
def world(running):
    with client(running, PATH, ping_interval=None) as connection:
        yield World(connection)
        connection.send(encode({'endpoint': 'reset'}))
        assert connection.recv(60.0) == 'reset successful'


def test_the_configuration_is_the_model_s_own(world):
    config = world.config
    assert (config['latent_frames_per_chunk'], config['vae_stride'], config['max_area']) == (3, [4, 8, 8], H * W)
    assert config['model'] == 'tiny_world' and config['fps'] == 16.0


def test_frames_are_those_of_the_model_for_the_poses_as_they_are(world, model):
    path = poses(21)
    frames, _ = world.infer(path, image=IMAGE)
    assert frames.shape == (21, H, W, 3) and np.array_equal(frames[0], fit(IMAGE, (H, W)))
    session = model.open(fit(IMAGE, (H, W)), path[0])
    pinhole = Intrinsics(30.0, 30.0, W / 2, H / 2)
    wanted = np.concatenate([session.imagine(path[4:9:4], pinhole), session.imagine(path[12::4], pinhole)])
    session.close()
    assert np.array_equal(frames[1:], wanted)


def test_a_session_is_extended_without_a_break_also_by_poses_that_fill_no_chunk(world):
    path = poses(33)
    whole, _ = world.infer(path, image=IMAGE)
    first, _ = world.infer(path[:9], image=IMAGE)
    assert np.array_equal(first, whole[:9])
    second, _ = world.infer(path[9:21])
    assert np.array_equal(second, whole[9:21])
    begun, _ = world.infer(path[21:26])  # five of twelve: imagined again with what comes next
    assert begun.shape == (5, H, W, 3)
    rest, _ = world.infer(path[26:])
    assert np.array_equal(rest, whole[26:])


def test_another_way_gives_another_video(world):
    ahead, _ = world.infer(poses(9), image=IMAGE)
    aside, _ = world.infer(poses(9, sideways=0.05), image=IMAGE)
    assert np.array_equal(ahead[0], aside[0]) and not np.array_equal(ahead[1:], aside[1:])


def test_receipts_extensions_and_repeated_events(world):
    fields = {'image': IMAGE, 'event_id': 'one', 'extensions': {'frames': 'uint8', 'timings': True, 'poses': True}}
    world.send(poses(9), **fields)
    assert world.heard() == {'type': 'receipt', 'event_id': 'one', 'accepted': True}
    assert world.heard() == {'type': 'receipt', 'event_id': 'one', 'applied_in_chunk': 0}
    messages = [world.heard() for _ in range(3)]
    assert [message['chunk'] for message in messages] == [0, 0, 0] and messages[0]['timings']['imagine_ms'] > 0.0
    assert np.allclose(np.concatenate([message['poses'] for message in messages]), poses(9))
    again, _ = world.infer(poses(9), event_id='one')
    assert np.array_equal(again, np.concatenate([message['video'] for message in messages]))
    _, last = world.infer(poses(21)[9:])
    assert last['chunk'] == 1


def test_worlds_are_of_sessions_and_no_more_than_there_are_pages_for(running, world):
    world.infer(poses(9), image=IMAGE, session_id='a')
    with client(running, PATH, ping_interval=None) as connection:
        other = World(connection)
        with pytest.raises(RuntimeError, match='no world yet'):
            other.infer(poses(9), session_id='b')
        other.infer(poses(9), image=IMAGE, session_id='b')
        with client(running, PATH, ping_interval=None) as third, pytest.raises(RuntimeError, match='memory for are taken'):
            World(third).infer(poses(9), image=IMAGE, session_id='c')
        connection.send(encode({'endpoint': 'reset', 'session_id': 'b'}))
        assert other.heard() == 'reset successful'
        with client(running, PATH, ping_interval=None) as third:
            free = World(third)
            assert len(free.infer(poses(9), image=IMAGE, session_id='c')[0]) == 9
            third.send(encode({'endpoint': 'reset', 'session_id': 'c'}))
            assert free.heard() == 'reset successful'


def test_what_is_malformed_is_refused_and_the_world_goes_on(world):
    whole, _ = world.infer(poses(21), image=IMAGE)
    world.infer(poses(9), image=IMAGE)
    with pytest.raises(RuntimeError, match='no rigid transform'):
        world.infer(np.zeros((3, 4, 4)))
    assert np.array_equal(world.infer(poses(21)[9:])[0], whole[9:])


def test_other_dialects_still_want_an_engine(running):
    assert get(running, '/readyz')[0] == 503
    models = json.loads(get(running, '/v1/models')[2])['data']
    assert [model['id'] for model in models] == ['tiny_world'] and 'goals' not in models[0]
    with pytest.raises(InvalidStatus), robot(running):
        pass


def test_another_gateway_goes_on_in_the_world_of_one_that_ended(running, served):
    path = poses(33)
    with client(running, PATH, ping_interval=None) as connection:
        world = World(connection)
        whole, _ = world.infer(path, image=IMAGE)
        first = Running(served.path.with_name('nothing.sock'), world=served.path)
        with client(first, PATH, ping_interval=None) as before:
            World(before).infer(path[:14], image=IMAGE, session_id='walked')  # the newest five fill no chunk
            first.stop()
        second = Running(served.path.with_name('nothing.sock'), world=served.path)
        try:
            with client(second, PATH, ping_interval=None) as after:
                going = World(after)
                assert np.array_equal(going.infer(path[14:], session_id='walked')[0], whole[14:])
                after.send(encode({'endpoint': 'reset', 'session_id': 'walked'}))
                assert going.heard() == 'reset successful'
        finally:
            second.stop()
        connection.send(encode({'endpoint': 'reset'}))
        assert world.heard() == 'reset successful'


def test_what_was_asked_of_a_gateway_that_was_lost_is_done_once_and_its_frames_are_there(running, served):
    path = poses(21)
    first = Running(served.path.with_name('nothing.sock'), world=served.path)
    with client(first, PATH, ping_interval=None) as connection, served.held():
        lost = World(connection)
        lost.send(path[:9], image=IMAGE, session_id='asked', event_id='one')
        assert lost.heard()['accepted']
        wait_for(lambda: ask_status(served.path)['service']['requests'])
        first.stop()  # nothing was imagined yet
    second = Running(served.path.with_name('nothing.sock'), world=served.path)
    try:
        with client(second, PATH, ping_interval=None) as connection:
            going = World(connection)
            again, _ = going.infer(path[:9], image=IMAGE, session_id='asked', event_id='one')
            rest, _ = going.infer(path[9:], session_id='asked', event_id='two')
            assert ask_status(served.path)['service']['repeated'] >= 1
            whole, _ = going.infer(path, image=IMAGE, session_id='asked')
            assert np.array_equal(np.concatenate([again, rest]), whole)
            connection.send(encode({'endpoint': 'reset', 'session_id': 'asked'}))
            assert going.heard() == 'reset successful'
    finally:
        second.stop()


def test_the_world_that_has_waited_longest_for_its_client_makes_room(running, served):
    for name in ('x', 'y'):
        with client(running, PATH, ping_interval=None) as connection:
            World(connection).infer(poses(9), image=IMAGE, session_id=name)
    with client(running, PATH, ping_interval=None) as connection:
        world = World(connection)
        assert len(world.infer(poses(9), image=IMAGE, session_id='z')[0]) == 9
        with pytest.raises(RuntimeError, match='no world yet'):  # it was x that had waited longest
            world.infer(poses(9), session_id='x')
        assert len(world.infer(poses(9), session_id='y')[0]) == 9
        for name in ('y', 'z'):
            connection.send(encode({'endpoint': 'reset', 'session_id': name}))
            assert world.heard() == 'reset successful'


def test_the_server_refuses_robots_and_what_makes_no_sense_and_goes_on(running, served, world):
    with pytest.raises(Unavailable, match='drives no robot'):
        open_link(served.path, 'robot', None)
    for message in (messages.Walk(1, '', np.zeros((2, 4, 4)), np.zeros((2, 4))),  # before hello
                    messages.WorldHello('', 1.0)):
        assert isinstance(said(served, message), messages.Rejected)
    for walk in (messages.Walk(1, '', np.zeros((2, 3, 4)), np.zeros((2, 4))),
                 messages.Walk(1, '', np.full((2, 4, 4), np.nan), np.zeros((2, 4))),
                 messages.Walk(1, '', np.zeros((2, 4, 4)), np.zeros((1, 4)))):
        assert isinstance(said(served, messages.WorldHello('s', 0.0), walk), messages.Rejected)
    assert len(world.infer(poses(9), image=IMAGE)[0]) == 9


def test_without_its_server_a_world_is_refused_and_it_begins_again_when_that_is_back(model, tmp_path):
    server = Served(model, tmp_path / 'world.sock')
    running = Running(tmp_path / 'nothing.sock', world=server.path)
    try:
        with client(running, PATH, ping_interval=None) as connection:
            world = World(connection)
            before, _ = world.infer(poses(9), image=IMAGE)
            server.stop()
            with pytest.raises(RuntimeError, match='refused: engine'):
                world.infer(poses(9))
            server = Served(model, server.path)
            with pytest.raises(RuntimeError, match='no world yet'):
                world.infer(poses(9))
            assert np.array_equal(world.infer(poses(9), image=IMAGE)[0], before)
    finally:
        running.stop()
        server.stop()


def wait_for(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def said(served, *sent):
    """The last thing that the server says to messages."""
    connection = Connection(connect(served.path, TIMEOUT))
    try:
        for message in sent:
            connection.send(message)
            answer, _ = connection.receive(TIMEOUT)
        return answer
    finally:
        connection.close()


@pytest.mark.waiting
def test_the_command_serves_worlds_until_a_signal(tiny_world, tmp_path):
    socket = tmp_path / 'world.sock'
    process = subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--model', tiny_world, '--socket', socket],
                               stderr=subprocess.PIPE, text=True)
    running = Running(tmp_path / 'nothing.sock', world=socket)
    try:
        for line in process.stderr:
            if 'to at most 1 worlds' in line:
                break
        with client(running, PATH, ping_interval=None) as connection:
            assert len(World(connection).infer(poses(9), image=IMAGE)[0]) == 9
        process.send_signal(signal.SIGTERM)
        assert 'ended by a signal' in process.communicate(timeout=TIMEOUT)[1] and process.returncode == 0
    finally:
        process.kill()
        process.wait()
        running.stop()


@pytest.mark.parametrize('arguments, message', [
    (['gateway', '--port', '0', '--world', '{tiny_world}'], 'worldmodel serve --model'),
    (['serve', '--model', '{tiny_world}', '--sessions', '0'], 'sessions is 0'),
    (['serve', '--model', '{tiny_world}', '--store', 'x'], 'takes no --store')])
def test_the_commands_refuse_what_makes_no_sense(tiny_world, arguments, message):
    arguments = [each.format(tiny_world=tiny_world) for each in arguments]
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', *arguments],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr, done.stderr

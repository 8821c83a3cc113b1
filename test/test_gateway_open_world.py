"""The camera endpoint before an open world model of the gateway: image and poses in, video out, extended without a break."""
import subprocess
import sys
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
from worldmodel_ros.serving.gateway.msgpack import decode, encode

pytestmark = pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')
H, W = open_world.SIZE
IMAGE = np.random.default_rng(0).integers(0, 256, (2 * H, 2 * W, 3), dtype=np.uint8)
PINHOLE = np.float32([60.0, 60.0, W, H])  # of IMAGE


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return open_world.write(tmp_path_factory.mktemp('worlds') / 'tiny_world')


@pytest.fixture(scope='module')
def model(folder):
    return OpenWorld(WorldDescription.read(folder), sessions=2)


@pytest.fixture(scope='module')
def running(model, tmp_path_factory):
    started = Running(tmp_path_factory.mktemp('run') / 'nothing.sock', world=model)  # no engine listens there
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
    with pytest.raises(InvalidStatus), robot(running):
        pass


def test_the_command_refuses_a_folder_that_holds_no_world(tmp_path):
    for arguments, message in ((['--world', str(tmp_path)], 'world.json'), (['--worlds', '0'], 'worlds is 0')):
        done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'gateway', '--port', '0', *arguments],
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and message in done.stderr

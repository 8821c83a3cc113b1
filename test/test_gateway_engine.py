"""The gateway before ``worldmodel serve`` with a real model: what a client gets is what a session in process would give."""
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from fake_service import wait_for
from camera_paths import camera, commands, path as camera_path
from gateway_rig import TIMEOUT, Running, client, get, infer, robot
from small_model import SMALL, small_checkpoint
from test_gateway_camera import World

from worldmodel_ros.engine import load
from worldmodel_ros.engine.network_calls import run
from worldmodel_ros.evaluate.drive.pictures import ssim
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.serving.client.link import Unavailable, ask_status
from worldmodel_ros.serving.gateway.camera import PATH
from worldmodel_ros.serving.gateway.server import Limits

START = 120.0  # s, for a model to load on a busy machine
SESSIONS = 2
EXECUTED = np.float32([0.1, 0.2])


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


class Engine:
    """``worldmodel serve``, which can be killed and started again."""

    def __init__(self, path, model, *arguments):
        self.path = path
        self._command = [sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path), '--model', str(model),
                         '--realtime-priority', '0', *arguments]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START
        while self.status() is None:
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.05)

    def status(self):
        try:
            return ask_status(self.path)
        except Unavailable:
            return None

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT)


@pytest.fixture(scope='module')
def engine(model, tmp_path_factory):
    started = Engine(tmp_path_factory.mktemp('run') / 'engine.sock', model, '--backend', 'torch', '--sessions', str(SESSIONS),
                     '--ticks', '0')
    yield started
    started.kill()


@pytest.fixture
def running(engine):
    started = Running(engine.path, limits=Limits(linger=5.0))
    yield started
    started.stop()
    wait_for(lambda: (status := engine.status()) and not status['robots'], TIMEOUT)


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8)


def drive(connection, images, session, first=1, **changes):
    """Let the images be answered one after the other; the replies."""
    return [infer(connection, **{'observation/image': image, 'session_id': session, 'step_id': step, 'deadline_ms': 20_000,
                                 'executed_actions': EXECUTED, **changes}) for step, image in enumerate(images, first)]


def planned(model, images, prefixes=()):
    """What a session in this process plans."""
    session = load(str(model), 'torch', sessions=1).open_session()
    for k, image in enumerate(images):
        session.observe(image, EXECUTED)
        yield session.plan('red', prefixes[k] if k < len(prefixes) else None)


def test_a_client_gets_the_plans_that_a_session_in_process_would_make(running, model):
    images = frames(4)
    with robot(running) as connection, robot(running) as other:
        replies = drive(connection, images, 'one')
        different = drive(other, images[::-1], 'two')
    for reply, plan in zip(replies, planned(model, images), strict=True):
        assert np.allclose(reply['actions'], plan, atol=1e-5) and reply['server_timing']['tier'] == 'two_step'
    assert not np.allclose(replies[0]['actions'], different[0]['actions']), 'the clients share a session'


def test_a_plan_begins_with_the_actions_that_will_be_executed_before_it(running, model):
    images = frames(2)
    with robot(running) as connection:
        first, second = drive(connection, images, 'delayed', inference_delay=2, executed_actions=EXECUTED[None])
    assert (first['committed_steps'], second['committed_steps']) == (0, 2)
    committed = first['actions'][1:3]
    assert np.allclose(second['actions'][:2], committed, atol=1e-5)
    _, plan = planned(model, images, (None, committed))
    assert np.allclose(second['actions'], plan, atol=1e-5)


def test_an_engine_that_is_full_refuses_the_next_client_at_once_and_keeps_those_that_come_back(running, engine):
    image = frames(1)
    with robot(running) as one, robot(running) as two, robot(running) as three:
        drive(one, image, 'one'), drive(two, image, 'two')
        begun = time.monotonic()
        refused, = drive(three, image, 'three')
        assert f'{SESSIONS} sessions are open' in refused and time.monotonic() - begun < 10.0  # of the 20 it had
        one.socket.close()
        with robot(running) as again:  # a place is not needed to be let in again
            reply, = drive(again, image, 'one', first=2)
            assert (reply['episode'], reply['step_id']) == (1, 2)
        assert len(wait_for(engine.status)['robots']) == SESSIONS


def test_the_engine_sees_no_step_twice_however_often_the_connection_drops(running, engine, model):
    images, replies = frames(6), []
    for step, image in enumerate(images, 1):
        with robot(running) as connection:
            replies += drive(connection, [image], 'dropped', step)
            connection.socket.close()
        with robot(running) as connection:
            again, = drive(connection, [image], 'dropped', step)
            assert again['server_timing'] == replies[-1]['server_timing']
    known, = wait_for(engine.status)['robots']
    assert known['ticks'] == len(images) and {reply['episode'] for reply in replies} == {1}
    for reply, plan in zip(replies, planned(model, images), strict=True):
        assert np.allclose(reply['actions'], plan, atol=1e-5)


def test_an_engine_that_is_killed_and_started_again_serves_the_same_connections(running, engine):
    image = frames(1)
    with robot(running) as connection:
        assert drive(connection, image, 'robot')[0]['episode'] == 1
        engine.kill()
        refused, = drive(connection, image, 'robot', 2)
        assert 'refused: engine' in refused
        engine.start()
        end = time.monotonic() + TIMEOUT
        while isinstance(reply := drive(connection, image, 'robot', 2)[0], str):
            assert 'refused: engine' in reply and time.monotonic() < end
            time.sleep(0.1)
        assert reply['episode'] == 2


def test_the_engine_tells_of_its_queue_and_pages(running, engine):
    with robot(running) as connection:
        drive(connection, frames(3), 'paged')
        assert wait_for(lambda: (now := engine_metrics(running))['pages{state="used"}'] and not now['waiting'], TIMEOUT)
        assert 0 < engine_metrics(running)['pages{state="used"}'] < engine_metrics(running)['pages{state="total"}']


def engine_metrics(running):
    lines = get(running, '/metrics')[2].splitlines()
    pairs = [line.removeprefix('worldmodel_engine_').split() for line in lines if line.startswith('worldmodel_engine_')]
    return {name: float(value) for name, value in pairs}


def test_plans_go_on_in_the_same_past_when_the_gateway_is_replaced_by_another_one(engine, model):
    images, replies = frames(6), []
    for first in (0, 2, 4):
        running = Running(engine.path, limits=Limits(linger=5.0))
        with robot(running) as connection:
            replies += drive(connection, images[first:first + 2], 'moved', first + 1)
            running.stop()
    for reply, plan in zip(replies, planned(model, images), strict=True):
        assert np.allclose(reply['actions'], plan, atol=1e-5)
    assert {reply['episode'] for reply in replies} == {1}
    wait_for(lambda: not engine.status()['waiting'], TIMEOUT)


def stored_ticks(folder):
    """How many ticks the sessions of a store have seen."""
    ticks = []
    for file in folder.glob('*/manifests/*'):
        with suppress(FileNotFoundError):  # a newer one has taken its place meanwhile
            if file.suffix != '.tmp':
                ticks.append(json.loads(file.read_bytes())['about']['seen_ticks'])
    return ticks


def test_with_a_store_a_session_survives_the_engine_and_the_gateway(model, tmp_path):
    engine = Engine(tmp_path / 'engine.sock', model, '--backend', 'torch', '--ticks', '0', '--store', str(tmp_path / 'store'))
    images, replies = frames(6), []
    try:
        for first in (0, 3):
            running = Running(engine.path, limits=Limits(linger=5.0))
            with robot(running) as connection:
                replies += drive(connection, images[first:first + 2], 'kept', first + 1)
                running.stop()
            wait_for(lambda: first + 2 in stored_ticks(tmp_path / 'store'), TIMEOUT)  # as it waits for its robot
            engine.kill()
            engine.start()
            running = Running(engine.path, limits=Limits(linger=5.0))
            with robot(running) as connection:
                replies += drive(connection, images[first + 2:first + 3], 'kept', first + 3)
            running.stop()
    finally:
        engine.kill()
    for reply, plan in zip(replies, planned(model, images), strict=True):
        assert np.allclose(reply['actions'], plan, atol=1e-5)
    assert {reply['episode'] for reply in replies} == {1}


def filmed(running, image, poses, parts):
    """Frames, uint8, of requests for so many poses each."""
    frames, first = [], 0
    with client(running, PATH) as connection:
        world = World(connection)
        for count in parts:
            replies = world.infer(0, 0, camera=camera(poses[first:first + count]), extensions={'frames': 'uint8'},
                                  **({} if first else {'image': image}))
            frames += [reply['video'] for reply in replies]
            first += count
        connection.send(b'\x81\xa8endpoint\xa5reset')
    return np.concatenate(frames)


def imagined(model, backend, image, actions):
    """What a session in this process makes of the same."""
    engine = load(str(model), backend, sessions=1)
    session = engine.open_session()
    image = fit(image, session.spec.image_size)
    session.observe(image, np.zeros(2, np.float32))
    future, _ = run(session.extending(np.float32(actions)), engine.backend)
    return np.concatenate([image[None], future.frames])


def test_the_frames_of_a_camera_are_bit_for_bit_those_of_a_session_in_process(running, model):
    image, given = frames(1)[0], commands(24)
    actions = np.float32(given)
    poses = camera_path(given)
    shown = filmed(running, image, poses, (9, 4, 12))
    # The float32 actions that the poses mean differ from those given in the last digits: take them as they are served.
    from worldmodel_ros.serving.gateway import poses as reader
    mount = reader.mount_pose((0.10, 0.0, 0.25, 0.0, 0.1396, 0.0))
    served, _ = reader.follow(reader.base_of(poses[0], mount), poses[1:], mount, SMALL)
    assert np.allclose(served, actions, atol=1e-5)
    assert np.array_equal(shown, imagined(model, 'torch', image, served))


@pytest.mark.slow
def test_the_shipped_models_frames_agree_across_back_ends(tmp_path):
    from worldmodel_ros.sim.world import World as Room
    image, given = Room(7).render((64, 64)), np.tile([0.3, 0.6], (24, 1))
    engine = Engine(tmp_path / 'engine.sock', 'tiny', '--backend', 'onnx', '--sessions', '1')
    running = Running(engine.path)
    try:
        shown = filmed(running, image, camera_path(given), (25,))
    finally:
        running.stop()
        engine.kill()
    reference = imagined('tiny', 'torch', image, given)
    assert np.array_equal(shown[0], reference[0]) and ssim(shown[-1], reference[-1]) >= 0.99
    assert ssim(shown[0], shown[-1]) < 0.9, 'the camera has not moved'

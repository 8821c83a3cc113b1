"""`worldmodel serve` as a process with a real model: it plans as a session of one's own, and ends in good order."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small_model import SMALL, small_checkpoint

from worldmodel_ros.engine import load
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.serve.link import Unavailable, open_link
from worldmodel_ros.transport import messages, pictures
from worldmodel_ros.transport.connection import ConnectionLost

TIMEOUT = 120.0  # s, for a model to load on a busy machine


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return tmp_path_factory.mktemp('run') / 'engine.sock'


def command(path, *arguments):
    return [sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path), *arguments]


@pytest.fixture(scope='module')
def server(model, path):
    arguments = ('--model', str(model), '--backend', 'torch', '--sessions', '2', '--realtime-priority', '0')
    with subprocess.Popen(command(path, *arguments), stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + TIMEOUT
        while not path.exists():
            assert process.poll() is None and time.monotonic() < end, process.stderr.read()
            time.sleep(0.05)
        yield process
        process.kill()


def drive(link, frames):
    """Send frames, and return the plans; each frame waits for the plan before it."""
    plans = []
    for number, frame in enumerate(frames, 1):
        link.slots.write(0, number, frame)
        link.connection.send(messages.Tick(number, 0, number, 1, SMALL.goals[0], time.monotonic() + 5.0, True,
                                           np.float32([0.1, 0.2])))
        while True:
            message, descriptor = link.connection.receive(TIMEOUT)
            if descriptor is not None:
                assert pictures.take(descriptor).shape == (SMALL.chunk_frames, *SMALL.image_size, 3)
            if isinstance(message, messages.Planned):
                break
            assert isinstance(message, messages.Imagined), message
        plans.append(message.plan)
    return plans


def test_a_served_robot_gets_the_plans_that_a_session_of_its_own_would_make(server, path, model):
    frames = np.random.default_rng(0).integers(0, 256, (3, *SMALL.image_size, 3), dtype=np.uint8)
    session = load(str(model), 'torch', sessions=1).open_session()
    links = [open_link(path, f'/robot{k}', SMALL) for k in range(2)]
    served = drive(links[0], frames)
    other = drive(links[1], frames[::-1])
    for frame, plan in zip(frames, served, strict=True):
        session.observe(frame, np.float32([0.1, 0.2]))
        assert np.allclose(session.plan(SMALL.goals[0]), plan, atol=1e-5)
    assert not np.allclose(served[0], other[0]), 'the robots share a session'
    with pytest.raises(Unavailable):
        open_link(path, '/robot3', SMALL)
    status = json.loads(subprocess.check_output(command(path, '--status'), text=True))
    assert [(robot['robot'], robot['ticks']) for robot in status['robots']] == [('/robot0', 3), ('/robot1', 3)]
    assert status['pid'] == server.pid and status['service']['ticks'] == 6 and status['service']['step_times']
    for link in links:
        link.connection.close()


def test_a_second_server_at_the_same_socket_is_refused_at_once(server, path):
    second = subprocess.run(command(path), capture_output=True, text=True, timeout=TIMEOUT)
    assert second.returncode == 1 and 'another server has' in second.stderr, second.stderr


@pytest.mark.parametrize('arguments, complaint', [
    (('--model', 'nonsense'), "no model 'nonsense'"), (('--socket', '/tmp/' + 'x' * 200), 'bytes, 107 are allowed')])
def test_what_would_be_refused_again_ends_with_the_code_for_a_bad_configuration(tmp_path, arguments, complaint):
    done = subprocess.run(command(tmp_path / 'engine.sock', *arguments), capture_output=True, text=True,
                          timeout=TIMEOUT)
    assert done.returncode == BAD_CONFIGURATION and complaint in done.stderr, done.stderr


def test_the_server_imports_no_ros(server):
    with open(f'/proc/{server.pid}/maps') as maps:
        assert 'rclpy' not in maps.read()


def test_a_signal_ends_it_in_good_order_and_its_robots_see_it(server, path):
    link = open_link(path, '/robot', SMALL)
    os.kill(server.pid, signal.SIGTERM)
    with pytest.raises(ConnectionLost):
        while link.connection.receive(TIMEOUT):
            pass
    assert server.wait(TIMEOUT) == 0
    assert not path.exists()
    link.connection.close()
    status = subprocess.run(command(path, '--status'), capture_output=True, text=True)
    assert status.returncode == 1 and 'no server at' in status.stderr

"""``worldmodel serve`` as a process with a real model: it plans as a session of one's own, and ends in good order."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from fake_service import wait_for_socket
from small_model import SMALL, small_checkpoint

from worldmodel_ros.engine import load
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.serving.client.link import Unavailable, ask_status, open_link
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.connection import ConnectionLost

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
        wait_for_socket(process, path, TIMEOUT)
        yield process
        process.kill()


def test_a_server_that_does_not_come_is_told_of_though_a_process_it_left_behind_holds_its_output(tmp_path):
    code = 'import subprocess, sys; subprocess.Popen(["sleep", "30"]); sys.exit("no such model")'
    begun = time.monotonic()
    with subprocess.Popen([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        with pytest.raises(AssertionError, match='no such model'):
            wait_for_socket(process, tmp_path / 'engine.sock')
        os.killpg(process.pid, signal.SIGKILL)
    assert time.monotonic() - begun < 25.0


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


GREEDY = """\
import sys, time
import numpy as np
from pathlib import Path
from small_model import SMALL
from worldmodel_ros.serving.client.link import Unavailable, ask_status, open_link
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.connection import ConnectionLost

frame, turn, number = np.zeros((*SMALL.image_size, 3), np.uint8), np.zeros((80, 2), np.float32), 0
branches = tuple(messages.Branch(str(k), 80, turn) for k in range(32))
while True:
    try:
        link = open_link(Path(sys.argv[1]), '/greedy', SMALL)
        free = set(range(len(link.slots)))
        slots = {}
        while True:
            while free:  # as fast as there are slots for it, and always the first
                number += 1
                slots[number] = free.pop()
                link.slots.write(slots[number], number, frame)
                link.connection.send(messages.Tick(number, slots[number], number, 1, 'red', time.monotonic() + 0.012, True,
                                                   np.zeros(2, np.float32)))
                link.connection.send(messages.Question(number, 'red', time.monotonic() + 0.05, 0, branches, 2))
            message, descriptor = link.connection.receive(1.0)
            if descriptor is not None:
                pictures.take(descriptor)
            if isinstance(message, (messages.Planned, messages.Refused, messages.Failed)):
                free.add(slots.pop(message.number))
            elif isinstance(message, messages.Rejected):
                break
        link.connection.close()
    except (ConnectionLost, Unavailable, TypeError) as error:
        time.sleep(0.01)
"""


def tick_along(link, path, first, count, period, budget):
    """Tick in real time, each due after ``budget`` [s]; return the answers, and by how much each came too late [s]."""
    late, answers = [], []
    begun = time.monotonic()
    for number in range(first, first + count):
        time.sleep(max(0.0, begun + (number - first) * period - time.monotonic()))
        link.slots.write(0, number, np.full((*SMALL.image_size, 3), 9, np.uint8))
        due = time.monotonic() + budget
        link.connection.send(messages.Tick(number, 0, number, 1, SMALL.goals[0], due, True, np.float32([0.1, 0.2])))
        while True:
            received = link.connection.receive(TIMEOUT)
            assert received, f'no answer to tick {number}: {ask_status(path)}'
            message, descriptor = received
            if descriptor is not None:
                os.close(descriptor)
            if not isinstance(message, messages.Imagined):
                break
        late.append(time.monotonic() - due)
        answers.append(message)
    return answers, late


def test_a_greedy_robot_does_not_make_an_honest_ones_ticks_late(server, path):
    """It ticks as fast as it can with deadlines that are hardly possible, and asks for 32 long branches each time."""
    link = open_link(path, '/honest', SMALL)
    greedy = None
    try:
        # What this machine can do, and then a robot with a rate to match: eight times the slowest tick but one of twenty.
        _, late = tick_along(link, path, 1, 20, 0.1, 2.0)
        period = min(max(0.1, 8.0 * (2.0 + sorted(late)[-2])), 1.0)
        alone, late_alone = tick_along(link, path, 21, 20, period, 0.8 * period)
        greedy = subprocess.Popen([sys.executable, '-c', GREEDY, str(path)], cwd=os.path.dirname(__file__))
        end = time.monotonic() + TIMEOUT
        while not any(robot['robot'] == '/greedy' and robot.get('ticks', 0) > 20
                      for robot in ask_status(path)['robots']):
            assert greedy.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        answers, late = tick_along(link, path, 41, 40, period, 0.8 * period)
        status = ask_status(path)
        planned, before = (sum(isinstance(each, messages.Planned) for each in those) / len(those)
                           for those in (answers, alone))
        # What a busy machine does to it alone says nothing about its neighbour.
        assert sum(by > 0.0 for by in late) <= 1 + 2 * sum(by > 0.0 for by in late_alone), (
            period, sorted(late)[-5:], sorted(late_alone)[-5:], status['robots'])
        assert planned >= 0.7 * before > 0.4, (planned, before, [each.reason for each in answers], status['robots'])
        assert status['service']['over_rate'] > 0 and status['service']['what_if']['over_rate'] > 0
        assert status['connections_paused'] > 0
    finally:
        if greedy:
            greedy.kill()
            greedy.wait()
        link.connection.close()


def test_a_second_server_at_the_same_socket_is_refused_at_once(server, path):
    second = subprocess.run(command(path), capture_output=True, text=True, timeout=TIMEOUT)
    assert second.returncode == 1 and 'another server has' in second.stderr, second.stderr


@pytest.mark.parametrize('arguments, complaint', [
    (('--model', 'nonsense'), "no model 'nonsense'"), (('--socket', '/tmp/' + 'x' * 200), 'bytes, 107 are allowed'),
    (('--sessions', '0'), 'sessions is 0: it must be 1 or more'), (('--share', '2'), 'share is 2.0: it must be a part'),
    (('--store', 'x', '--store-memory-mb', 'nan'), 'store_memory_mb is nan: it must be a size'),
    (('--store', 'x', '--store-memory-mb', '-5'), 'store_memory_mb is -5.0: it must be a size'),
    (('--realtime-priority', '100'), 'realtime_priority is 100: it must be 1 to 99'),
    (('--session-directory', '/dev/null/x'), 'session_directory is /dev/null/x: /dev/null is no folder')])
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


INTERRUPTED_IN_A_LIBRARY = """
import os, signal, sys
import worldmodel_ros.engine
from worldmodel_ros.cli import main
def load(*arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
        raise ImportError('initialization failed') from error
worldmodel_ros.engine.load = load
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_that_a_library_turns_into_an_error_of_its_own_ends_it_in_good_order(path):
    done = subprocess.run([sys.executable, '-c', INTERRUPTED_IN_A_LIBRARY, *command(path)[3:]], capture_output=True, text=True,
                          timeout=TIMEOUT)
    assert (done.returncode, 'Traceback' in done.stderr) == (0, False), done.stderr
    assert 'ended by a signal' in done.stderr and not path.exists()

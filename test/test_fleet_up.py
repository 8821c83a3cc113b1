"""``worldmodel fleet up``: one command, servers that come back, robots that are placed and go on, by processes and by Ray."""
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial
from importlib.util import find_spec
from socket import create_server

import numpy as np
import pytest
from fake_service import serving, wait_for as waits
from gateway_rig import Running, infer, robot as gateway_client

from benchmarks.fleet_robots import Robot
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros.serving.client.link import Unavailable, ask_status
from worldmodel_ros.serving.fleet.move import MoveError, ask_move
from worldmodel_ros.serving.gateway.server import Limits

pytestmark = pytest.mark.slow
wait_for = partial(waits, timeout=120.0, period=0.1)
POOLS = ['local', pytest.param('ray', marks=pytest.mark.skipif(find_spec('ray') is None, reason='ray is not installed'))]


@pytest.fixture(scope='module', params=POOLS)
def fleet(request, tmp_path_factory):
    """The socket of a fleet's front."""
    folder = tmp_path_factory.mktemp('fleet')
    socket = folder / 'front.sock'
    with open(folder / 'log', 'w') as log:
        process = subprocess.Popen(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--pool', request.param, '--socket', str(socket),
             '--store', str(folder / 'store'), '--page', '0', '--full', '1000', '--', '--backend', 'onnx', '--ticks', '0',
             '--realtime-priority', '0'],
            stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or all(server['alive'] for server in servers(socket)), timeout=240)
        assert process.poll() is None, (folder / 'log').read_text()
        yield socket
    finally:
        pids = [server['pid'] for server in servers(socket)]
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 0, (folder / 'log').read_text()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope='module')
def engine():
    return load('tiny', 'onnx', sessions=4)


def servers(socket):
    try:
        return ask_status(socket)['fleet']['servers']
    except Unavailable:
        return [{'alive': False, 'pid': 0}]


def drive(robot, ticks=2):
    for _ in range(ticks):
        answer = robot.tick(due=60.0, patience=120.0)
        assert answer.tier is not Tier.NONE, answer.reason
        plan, *_ = robot.twin_answers(answer.tier)
        np.testing.assert_array_equal(answer.plan, plan)


def claims(socket):
    return {claim['session']: claim for claim in ask_status(socket)['fleet']['claims']}


def test_robots_are_placed_moved_and_go_on_after_their_server_was_killed(fleet, engine):
    robots = [Robot(seed, fleet, engine) for seed in (1, 2)]
    for robot in robots:
        robot.server = fleet
        drive(robot)
    wait_for(lambda: claims(fleet).keys() >= {robot.session for robot in robots})
    assert {claims(fleet)[robot.session]['server'] for robot in robots} == {0, 1}  # one each
    one, other = robots

    before = claims(fleet)[one.session]
    ask_move(fleet, one.session, 'auto')
    one.idle(0.5)
    assert one.generation == before['generation'] + 1
    drive(one)
    wait_for(lambda: claims(fleet)[one.session]['server'] != before['server'])
    with pytest.raises(MoveError, match='is on no server'):
        ask_move(fleet, 'nobody', 'auto')

    time.sleep(1.0)  # more than a session's period in the store
    drive(one, 1)
    pid = servers(fleet)[claims(fleet)[one.session]['server']]['pid']
    wait_for(lambda: 'stored' in str(servers(fleet)))
    time.sleep(1.5)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: sum(server['alive'] for server in servers(fleet)) == 1)
    one.link.connection.close()
    one.link = None
    one.connect(fleet)
    assert one.link.frames >= 4  # it goes on in its own past
    assert one.tick(due=60.0, patience=120.0).tier is not Tier.NONE
    wait_for(lambda: all(server['alive'] and server['pid'] != pid for server in servers(fleet)), timeout=240)
    for robot in robots:
        robot.close()


def test_clients_of_the_network_door_are_placed_and_follow_their_sessions(fleet):
    gateway = Running(fleet, limits=Limits(linger=5.0))
    image = {'observation/image': np.zeros((64, 64, 3), np.uint8), 'session_id': 'arm', 'deadline_ms': 60_000.0}
    try:
        with gateway_client(gateway) as connection:
            assert infer(connection, **image, step_id=1)['episode'] == 1
            session, = wait_for(lambda: [each for each in claims(fleet) if each.startswith('gateway-')])
            before = claims(fleet)[session]['server']
            ask_move(fleet, session, 'auto')
            for step in (2, 3):
                reply = infer(connection, **image, step_id=step)
                assert (reply['episode'], reply['step_id']) == (1, step)
            wait_for(lambda: claims(fleet)[session]['server'] != before)
    finally:
        gateway.stop()


def test_the_page_shows_servers_and_claims_to_this_machine_alone(fleet):
    log = (fleet.parent / 'log').read_text()
    url = next(word for word in log.split() if word.startswith('http://127.0.0.1'))
    with urllib.request.urlopen(url, timeout=10) as page:
        assert b'<h1>Fleet</h1>' in page.read()
    with urllib.request.urlopen(url + 'status', timeout=10) as numbers:
        assert len(json.load(numbers)['fleet']['servers']) == 2
    with pytest.raises(urllib.error.HTTPError, match='403'):
        urllib.request.urlopen(urllib.request.Request(url + 'status', headers={'Host': 'elsewhere.example'}), timeout=10)


def test_a_page_that_cannot_be_shown_leaves_the_servers_of_a_lost_front_alone(tmp_path):
    with serving(tmp_path / 'front-0.sock'), serving(tmp_path / 'front-1.sock'), \
            create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--servers', '1', '--socket',
                               str(tmp_path / 'front.sock'), '--page', str(port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f'127.0.0.1:{port} (Address already in use): give another --page' in done.stderr
    assert f'process {os.getpid()} serves at {tmp_path}/front-1.sock, and is no server of this fleet' in done.stderr
    assert 'front-0.sock' not in done.stderr and 'Traceback' not in done.stderr


def test_a_configuration_that_is_refused_ends_it_with_code_2(tmp_path):
    (tmp_path / 'front-0.log').write_text('worldmodel: error: unrecognized arguments: --of-an-earlier-fleet\n')
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--servers', '1', '--socket',
                           str(tmp_path / 'front.sock'), '--store', str(tmp_path / 'store'), '--page', '-1', '--', '--model',
                           str(tmp_path / 'nothing')], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and 'nothing' in done.stderr and 'earlier' not in done.stderr

"""A fleet on a real local cluster of Ray: its head is lost and back while a robot drives; servers are started by slack."""
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_service import wait_for as waits

from benchmarks.fleet_robots import Robot
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.serving.client.link import Unavailable, ask_status

pytestmark = [pytest.mark.slow, pytest.mark.waiting(seconds=22),
              pytest.mark.skipif(find_spec('ray') is None, reason='ray is not installed')]
PATIENCE = 240.0  # s, on a busy machine
wait_for = partial(waits, timeout=PATIENCE, period=0.1)


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as probe:
        return probe.getsockname()[1]


def servers(front):
    try:
        return [server for server in ask_status(front)['fleet']['servers'] if server['wanted'] or server['alive']]
    except Unavailable:
        return []


def family(pid):
    """A process and all that it has started, which are still its children."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f'/proc/{each}/task/{each}/children').read_text().split()]
    return found


@pytest.fixture
def short():
    """A folder for Ray: the names of its sockets may have 107 characters with their path, and pytest's own are as long."""
    with tempfile.TemporaryDirectory(prefix='r', ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Cluster:
    """The head of a cluster of Ray."""

    def __init__(self, folder, port, environment):
        self._folder, self._port, self._environment, self._started = folder, port, environment, 0
        self._process = None

    def start(self):
        self._started += 1
        ray = Path(sys.executable).with_name('ray')
        with open(self._folder / 'head.log', 'a') as log:
            self._process = subprocess.Popen(
                [str(ray), 'start', '--head', '--block', '--port', str(self._port), '--num-cpus', '2', '--disable-usage-stats',
                 '--include-dashboard=false', '--temp-dir', str(self._folder / f'ray{self._started}')],
                stdout=log, stderr=log, env=self._environment)

    def lives(self):
        assert self._process.poll() is None, (self._folder / 'head.log').read_text()
        return True

    def kill(self, spared=()):
        """All of it at once, but for what runs as a session of its own."""
        for pid in family(self._process.pid):
            if pid not in spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(30)


@pytest.fixture
def environment(tmp_path_factory):
    return {**os.environ, 'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': secrets.token_hex(32)}


@contextlib.contextmanager
def fleet(folder, environment, *options, cluster=None):
    front = folder / 'front.sock'
    with open(folder / 'log', 'w') as log:
        process = subprocess.Popen(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--pool', 'ray', '--socket', str(front), '--store',
             str(folder / 'store'), '--page', '-1', *options, '--', '--backend', 'onnx', '--ticks', '0', '--realtime-priority',
             '0'],
            stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: process.poll() is not None or any(server['alive'] for server in servers(front))
                 or (cluster and not cluster.lives()))
        assert process.poll() is None, (folder / 'log').read_text()
        yield front, process
    finally:
        pids = [server['pid'] for server in servers(front) if server['alive']]
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(90)
        finally:
            process.kill()
    assert code == 0, (folder / 'log').read_text()
    wait_for(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids), timeout=30.0)


def test_the_head_of_ray_is_lost_and_back_and_the_robot_drives_on(short, tmp_path_factory, environment):
    cluster, folder = Cluster(short, free_port(), environment), tmp_path_factory.mktemp('r')
    cluster.start()
    try:
        # However slow this machine is: a robot finds place on the server.
        with fleet(folder, environment, '--servers', '1', '--full', '1000', '--ray-address', f'127.0.0.1:{cluster._port}',
                   cluster=cluster) as (front, process):
            wait_for(lambda: servers(front)[0]['pool'] == 'runs')
            pid, robot = servers(front)[0]['pid'], Robot(1, front)
            answered = drive(robot, 5)
            cluster.kill(spared={pid})
            wait_for(lambda: drive(robot, 1) and servers(front)[0]['pool'] != 'runs')
            answered += drive(robot, 10)
            assert process.poll() is None and servers(front)[0]['pid'] == pid
            cluster.start()
            # By the next actor, which has found it.
            wait_for(lambda: drive(robot, 1) and cluster.lives() and servers(front)[0]['pool'] == 'runs')
            assert servers(front)[0]['pid'] == pid and robot.generation == 1
            assert answered == 15
            robot.close()
    finally:
        cluster.kill()


def drive(robot, ticks):
    """Each tick is answered by the server."""
    for _ in range(ticks):
        assert robot.tick(due=60.0, patience=120.0).tier is not Tier.NONE
    return ticks


def test_an_actor_is_started_where_no_server_has_slack(short, tmp_path_factory, environment):
    """
    A second server comes where the first one has a robot and no place for another, and not before.

    The newest cluster that Ray knows of on this machine is one that was killed.
    """
    folder = tmp_path_factory.mktemp('r')
    with contextlib.ExitStack() as stack:
        (short / 'ray').mkdir()
        (short / 'ray' / 'ray_current_cluster').write_text(f'127.0.0.1:{free_port()}')
        environment['RAY_TMPDIR'] = str(short)
        front, _ = stack.enter_context(fleet(folder, environment, '--servers', '1', '--most', '2', '--sessions', '1', '--full',
                                             '1000'))
        first, = servers(front)
        robot = Robot(1, front)
        drive(robot, 2)
        both = wait_for(lambda: [server for server in servers(front) if server['alive']][1:] and servers(front))
        assert [server['pool'] for server in both] == ['runs', 'runs'], json.dumps(both)
        other = Robot(2, front)
        drive(other, 2)
        wait_for(lambda: [server['sessions'] for server in servers(front)] == [1, 1])
        drive(robot, 2)
        assert servers(front)[0]['pid'] == first['pid']
        for each in (robot, other):
            each.close()

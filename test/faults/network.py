"""
A bad network between the robot, with its gate, and the model: two network namespaces, and a link of ours (link.py).

The cases are played by a process in the robot's namespace (run.py starts it there); the model node goes to the other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from faults.link import DEVICE
from faults.matrix import DEGRADED, RECOVERED, Seen, case
from faults.seen import RECOVERY, afterwards, drives_through, longest_pause, right_after_a_command, stop
from faults.systems import MODEL, TWO_NETWORKS, Running
from scenarios.checks import STOP_LATENCY, stopped_within
from scenarios.rig import answers
from worldmodel_ros.paths import config_directory, find_executable, prefixes

INSIDE = 'FAULTS_NETWORK'  # names the two namespaces, in the environment of the process that plays the cases
PERIOD = 0.1               # s, of the camera
BAD = 5.0                  # s, of a bad network
_ADDRESSES = ('10.201.77.1/24', '10.201.77.2/24')
# Between a node of one namespace and one of the other there must be no way but the network: no shared memory.
_ENVIRONMENT = {'ROS_AUTOMATIC_DISCOVERY_RANGE': 'SUBNET',
                'FASTRTPS_DEFAULT_PROFILES_FILE': str(config_directory() / 'fastdds_commands.xml')}
_INTO_NAMESPACE = '''import ctypes, os, sys
CLONE_NEWNET = 0x40000000
with open({namespace!r}) as file:
    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), 'setns')
os.execv(sys.executable, [sys.executable, {executable!r}, *sys.argv[1:]])
'''


def cannot_divide() -> str:
    """Return why there can be no two networks here; '' where there can."""
    if os.environ.get(INSIDE):
        return ''
    if not shutil.which('ip'):
        return 'ip (iproute2) is not installed'
    try:
        with two_networks():
            return ''
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, 'stderr', None) or str(error)).strip()
        return f'network namespaces and tap devices are not permitted here: {reason}'


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[tuple[str, ...], subprocess.Popen]]:
    """Have two network namespaces with one link between them; yields their names, the robot's first, and the link."""
    names = tuple(f'faults_{side}_{os.getpid()}' for side in ('robot', 'model'))
    link = None
    try:
        for name in names:
            _run('ip', 'netns', 'add', name)
        link = subprocess.Popen([sys.executable, str(Path(__file__).with_name('link.py')), *names], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if link.stdout.readline() != 'up\n':
            raise OSError(link.communicate()[1].strip().splitlines()[-1])
        for name, address in zip(names, _ADDRESSES, strict=True):
            _run('ip', '-n', name, 'link', 'set', 'lo', 'up')
            _run('ip', '-n', name, 'address', 'add', address, 'dev', DEVICE)
            _run('ip', '-n', name, 'link', 'set', DEVICE, 'up')
            _run('ip', '-n', name, 'route', 'add', '224.0.0.0/4', 'dev', DEVICE)
        yield names, link
    finally:
        if link is not None:
            link.kill()
            link.communicate()
        for name in names:
            subprocess.run(['ip', 'netns', 'delete', name], stderr=subprocess.DEVNULL)


def play_inside(arguments: Sequence[str], directory: Path) -> int:
    """Run run.py in the robot's namespace; return its exit code."""
    with two_networks() as (names, link):
        wire = link.stdin.fileno()
        environment = {**os.environ, **_ENVIRONMENT, INSIDE: ' '.join((*names, str(wire))), 'ROS_HOME': str(directory)}
        return subprocess.run(['ip', 'netns', 'exec', names[0], sys.executable, str(Path(__file__).with_name('run.py')),
                               *arguments], env=environment, pass_fds=[wire]).returncode


def overlay(directory: Path) -> dict[str, dict]:
    """Put a model node that goes to its own namespace before the installed one, as an overlay of a workspace is."""
    folder = directory / 'overlay' / 'lib' / 'worldmodel_ros'
    folder.mkdir(parents=True)
    namespace = f'/var/run/netns/{os.environ[INSIDE].split()[1]}'
    (folder / MODEL).write_text(_INTO_NAMESPACE.format(
        namespace=namespace, executable=str(find_executable('worldmodel_ros', MODEL))))
    os.environ['AMENT_PREFIX_PATH'] = os.pathsep.join([str(directory / 'overlay'), *map(str, prefixes())])
    return {}


def _does(**faults: float) -> None:
    """Have the link do this, in both directions (link.py); nothing: have it sound."""
    os.write(int(os.environ[INSIDE].split()[2]), json.dumps(faults).encode() + b'\n')


@contextlib.contextmanager
def _bad(**faults: float) -> Iterator[float]:
    start = time.monotonic()
    _does(**faults)
    try:
        yield start
    finally:
        _does()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@case(TWO_NETWORKS, RECOVERED, 'to the stop', STOP_LATENCY + PERIOD, needs=cannot_divide)
def network_parts(running: Running) -> Seen:
    """Nothing passes between robot and model for 5 s"""
    rig = running.rig
    right_after_a_command(rig)
    with _bad(loss=1.0) as start:
        took = stop(rig, start, STOP_LATENCY + PERIOD)
        rig.watch(BAD - 1.0)
    return Seen(afterwards(rig), took)


@case(TWO_NETWORKS, RECOVERED, 'to the stop', STOP_LATENCY + PERIOD, needs=cannot_divide)
def network_slower_than_the_deadline(running: Running) -> Seen:
    """Everything takes 60 ms longer than it did, in each direction, for 5 s"""
    rig = running.rig
    right_after_a_command(rig)
    with _bad(delay=0.06) as start:
        at = stopped_within(rig, start, STOP_LATENCY + PERIOD)
        rig.watch(BAD)
        passed = [r for r in rig.observer.since('cmd_vel', at) if answers(r.message)]
        assert not passed, f'{len(passed)} commands passed although they were too old'
    return Seen(afterwards(rig), at - start)


def _worse(faults: Mapping[str, float], running: Running) -> Seen:
    """See that what comes too late is stopped for, and that driving goes on as soon as the network is sound."""
    rig = running.rig
    right_after_a_command(rig)
    with _bad(**faults):
        rig.watch(BAD)
    start = time.monotonic()
    outcome = afterwards(rig)
    return Seen(outcome, time.monotonic() - start)


for _name, _faults, _what in (
    ('network_loses_5', {'loss': 0.05}, '5 % of the packets are lost, in each direction, for 5 s'),
    ('network_loses_30', {'loss': 0.3}, '30 % of the packets are lost'),
    ('network_is_narrow', {'rate': 62_500.0}, '500 kbit/s, half of what the images need'),
    ('network_jitters', {'delay': 0.02, 'jitter': 0.02}, '20 ms longer, give or take 20 ms, so that '
     'packets overtake each other'),
    ('network_spoils', {'corrupt': 0.1}, 'A bit is flipped in 10 % of the packets'),
):
    case(TWO_NETWORKS, RECOVERED, 'from then to the next command', RECOVERY, needs=cannot_divide, name=_name, what=_what)(
        partial(_worse, _faults))


@case(TWO_NETWORKS, f'{DEGRADED}twice the traffic', 'longest pause', 0.5, needs=cannot_divide)
def network_repeats(running: Running) -> Seen:
    """Every packet arrives twice, for 5 s"""
    rig = running.rig
    right_after_a_command(rig)
    with _bad(duplicate=1.0) as start:
        rig.watch(BAD)
        pause = drives_through(rig, start)
    numbers = [(r.message.episode_id, r.message.sequence) for r in rig.observer.since('action_chunk', start)]
    outcome = f'{DEGRADED}twice the traffic' if len(numbers) == len(set(numbers)) else 'commands twice'
    return Seen(outcome, max(pause, longest_pause(rig, start)))

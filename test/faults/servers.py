"""An engine that two robots share ends, hangs, is flooded: each robot goes on with a model of its own."""

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from faults.matrix import DEGRADED, RECOVERED, REFUSED, Seen, case
from faults.memory import cannot_limit, out_of_memory
from faults.seen import PAUSE, drives_through
from faults.systems import SERVER, TWO_ROBOTS, Running
from scenarios.catalogue import SOCKET
from scenarios.rig import MODEL, START_TIMEOUT, Rig
from scenarios.server import BACK, spread_cameras, wait_for_server

OWN_MODEL = f'{DEGRADED}own models, and back'


def _both_drive(running: Running) -> None:
    spread_cameras(*running.rigs)
    for rig in running.rigs:
        wait_for_server(rig, START_TIMEOUT)
    for rig in running.rigs:
        rig.drive()
    running.rig.watch(0.5)


def _by_server(rig: Rig) -> bool:
    return 'of the server' in rig.report(MODEL).get('backend', '')


def _server_fails(fail: Callable[[Running], float], undo: Callable[[Running], None], running: Running) -> Seen:
    """See whether both robots drive on by themselves, and come back to the server once it is there again."""
    _both_drive(running)
    start = fail(running)
    running.rig.watch(2.0)
    pause = max(drives_through(rig, start) for rig in running.rigs)
    for rig in running.rigs:
        rig.next_report(MODEL)
    own = not any(_by_server(rig) for rig in running.rigs)
    undo(running)
    for rig in running.rigs:
        wait_for_server(rig, BACK)
    return Seen(OWN_MODEL if own else 'still by the server', pause)


def _nothing(running: Running) -> None:
    """A server that has ended is started again by its supervisor."""


for _name in ('sigkill', 'sigterm', 'sigint'):
    case(TWO_ROBOTS, OWN_MODEL, 'longest pause of a robot', PAUSE, ends=(SERVER,), name=f'server_{_name}',
         what=f'{_name.upper()} to the engine that two robots share')(partial(
             _server_fails, lambda running, number=getattr(signal, _name.upper()): running.send(SERVER, number), _nothing))

case(TWO_ROBOTS, OWN_MODEL, 'longest pause of a robot', PAUSE, name='server_sigstop',
     what='SIGSTOP to the engine that two robots share, for 2 s')(partial(
         _server_fails, lambda running: running.send(SERVER, signal.SIGSTOP),
         lambda running: running.send(SERVER, signal.SIGCONT)))
case(TWO_ROBOTS, OWN_MODEL, 'longest pause of a robot', PAUSE, ends=(SERVER,), needs=cannot_limit,
     name='server_out_of_memory', what='The engine that two robots share has no more memory: the kernel ends it')(partial(
         _server_fails, lambda running: out_of_memory(running, SERVER), _nothing))


@case(TWO_ROBOTS, REFUSED, 'longest pause of a robot', PAUSE)
def server_flooded_with_connections(running: Running) -> Seen:
    """A stranger opens 200 connections to the engine, and sends noise over half of them"""
    _both_drive(running)
    start, strangers, ended = time.monotonic(), [], 0
    try:
        for number in range(200):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            strangers.append(stranger)
            stranger.settimeout(1.0)
            try:
                stranger.connect(SOCKET)
                if number % 2:
                    stranger.send(os.urandom(100))
            except OSError:
                ended += 1
            time.sleep(0.01)
        for stranger in strangers[1::2]:
            try:
                ended += stranger.recv(1) == b'' or 1  # ended, or told why first
            except OSError:
                ended += 1
        pause = max(drives_through(rig, start) for rig in running.rigs)
    finally:
        for stranger in strangers:
            stranger.close()
    for rig in running.rigs:
        rig.next_report(MODEL)
        wait_for_server(rig, BACK)
    return Seen(REFUSED if ended >= 100 else f'only {ended} of the strangers were refused', pause)


@case(TWO_ROBOTS, RECOVERED, 'longest pause of a robot', PAUSE, ends=(f'/robot1/{MODEL}',))
def one_of_two_models_sigkill(running: Running) -> Seen:
    """SIGKILL to the model node of one of two robots; timed is the other one"""
    rig, other = running.rigs
    _both_drive(running)
    start = running.send(f'/robot1/{MODEL}', signal.SIGKILL)
    running.rig.watch(2.0)
    pause = drives_through(other, start)
    rig.wait_until_driving('driving to go on', time.monotonic(), START_TIMEOUT)
    rig.set_again(MODEL)  # its deadline, which goes with the speed of this machine
    wait_for_server(rig, BACK)
    return Seen(RECOVERED, max(pause, drives_through(other, start)))

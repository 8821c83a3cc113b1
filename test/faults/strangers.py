"""
Strangers on the robot's network: floods, noise, and subscribers that do not listen.

They come by UDP, as from another machine: who joins with shared memory can hold up the observer too (docs/faults.md).
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dds import without_shared_memory
from faults.matrix import DEGRADED, RECOVERED, REFUSED, Seen, case
from faults.seen import PAUSE, afterwards, drives_through, longest_pause
from faults.systems import GATE, MODEL, ONE_ROBOT, Running
from scenarios.rig import Rig

SECONDS = 3.0
FLOOD = 50.0  # messages a second at least, five times what is usual; on a machine with time for it, 1000
UNHEARD = f'{DEGRADED}fewer messages for the subscriber'


@contextmanager
def stranger(running: Running, kind: str, seconds: float = SECONDS) -> Iterator[subprocess.Popen]:
    """Have a stranger in a process of its own."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name('stranger.py')), kind, str(seconds)],
                               env=without_shared_memory(running.environment), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == 'begins\n', 'the stranger did not begin'
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def _sent(process: subprocess.Popen) -> int:
    sent, _ = process.communicate(timeout=SECONDS + 30.0)
    return int(sent.split()[-1])  # DDS may have had something to say before


def _floods(process: subprocess.Popen) -> None:
    sent = _sent(process)
    assert sent > FLOOD * SECONDS, f'only {sent} messages were sent in {SECONDS} s, which is no flood'


def _counted(rig: Rig, node: str, reason: str, before: dict[str, int]) -> str:
    rig.wait_for_refusal(node, reason, before)
    return REFUSED


@case(ONE_ROBOT, REFUSED, 'longest pause', PAUSE)
def flood_of_images(running: Running) -> Seen:
    """A stranger publishes broken images for 3 s, up to 1000 a second"""
    rig = running.rig
    rig.drive()
    before, start = rig.refused(MODEL), time.monotonic()
    with stranger(running, 'images') as process:
        _floods(process)
    pause = longest_pause(rig, start)
    outcome = _counted(rig, MODEL, 'image: wrong encoding', before)
    assert (again := afterwards(rig)) == RECOVERED, again
    return Seen(outcome, pause)


@case(ONE_ROBOT, REFUSED, 'longest pause', PAUSE)
def flood_of_commands(running: Running) -> Seen:
    """A stranger publishes commands without sense for 3 s, up to 1000 a second"""
    rig = running.rig
    rig.drive()
    before, start = rig.refused(GATE), time.monotonic()
    with stranger(running, 'chunks') as process:
        _floods(process)
    pause = longest_pause(rig, start)
    outcome = _counted(rig, GATE, 'invalid', before)
    assert (again := afterwards(rig)) == RECOVERED, again
    return Seen(outcome, pause)


def _undisturbed(kind: str, outcome: str, running: Running) -> Seen:
    rig = running.rig
    rig.drive()
    start = time.monotonic()
    with stranger(running, kind) as process:
        assert _sent(process) > 0
    return Seen(outcome, drives_through(rig, start))


@case(ONE_ROBOT, REFUSED, 'longest pause', PAUSE)
def noise_on_the_ports(running: Running) -> Seen:
    """A stranger sends noise, some of it with RTPS's first bytes, to the ports of all participants"""
    return _undisturbed('datagrams', REFUSED, running)


@case(ONE_ROBOT, REFUSED, 'longest pause', PAUSE)
def topics_of_other_types(running: Running) -> Seen:
    """A stranger publishes text under the names of the topics of images and commands"""
    return _undisturbed('other_types', REFUSED, running)


@case(ONE_ROBOT, RECOVERED, 'longest pause', PAUSE)
def strangers_come_and_go(running: Running) -> Seen:
    """Nodes join and leave the network all the time"""
    return _undisturbed('participants', RECOVERED, running)


@case(ONE_ROBOT, UNHEARD, 'longest pause', PAUSE)
def slow_subscriber(running: Running) -> Seen:
    """A reliable subscriber that keeps all messages takes one in a second"""
    rig = running.rig
    rig.drive()
    start = time.monotonic()
    with stranger(running, 'slow') as process:
        taken = _sent(process)
    pause = drives_through(rig, start)
    heard = len(rig.observer.since('action_chunk', start))
    return Seen(UNHEARD if taken < heard / 2 else f'it took {taken} of {heard}', pause)


@case(ONE_ROBOT, UNHEARD, 'longest pause', PAUSE)
def stopped_subscriber(running: Running) -> Seen:
    """Such a subscriber is stopped by SIGSTOP, then ended by SIGKILL"""
    rig = running.rig
    rig.drive()
    with stranger(running, 'slow', 60.0) as process:
        start = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        rig.watch(SECONDS)
        process.kill()
        process.wait()
        rig.watch(1.0)
    return Seen(UNHEARD, drives_through(rig, start))

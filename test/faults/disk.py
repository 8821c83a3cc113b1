"""A disk that is full, or fails; a recorder that ends; sessions cut short, changed, or half written."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus

from faults.matrix import DEGRADED, RECOVERED, REFUSED, Seen, case
from faults.memory import cannot_limit, starve
from faults.seen import PAUSE, RESTART, afterwards, drives_through, right_after_a_command, stop
from faults.shim import no_compiler
from faults.systems import MODEL, ONE_ROBOT, SHIMMED, Running
from faults.tmpfs import cannot_mount
from scenarios.checks import STOP_LATENCY
from scenarios.rig import START_TIMEOUT, Rig, nanoseconds
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.bringup.description import load
from worldmodel_ros.paths import config_directory, find_executable
from worldmodel_ros.srv import SessionFile

TOPIC = 'deadline_status'  # reliable, ten a second
CHUNK = 3.0                # s, in which the recorder fills a chunk of its file: what a crash costs at most
SETTLED = 0.5              # s, in which a message is taken from DDS and written
CATCHES_UP = 60.0          # s, in which a recorder that was stopped takes in what DDS has, on a busy machine
TOLD = 5.0                 # s, until the recorder has filled a chunk, failed to write it, and said so
FILE_TIMEOUT = 5.0         # s, of the session services
UNRECORDED = f'{DEGRADED}driving unrecorded'
TO_ITS_END = 'to its end, less what it waited for a core'
WITHOUT_A_PART = f'{DEGRADED}a recording with a gap'


class Recording:
    """A recorder's process. ``began``: from when on everything should be in the bag (steady, s)."""

    def __init__(self, rig: Rig, process: subprocess.Popen, folder: Path) -> None:
        self.rig, self.process, self.folder = rig, process, folder
        start = time.monotonic()  # an earlier recorder's report tells nothing of this one
        rig.wait_for('/diagnostics', _records, 'the recorder to record', START_TIMEOUT, since=start)
        self.began = time.monotonic() + SETTLED

    def end(self) -> int:
        """End it; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(START_TIMEOUT)

    def time_to_end(self, number: int) -> float:
        """End it; return how long that took, less the time for which it had to wait for a core [s].

        Whatever else runs comes first (nice 10): on a busy machine it waits for ten times as long as it computes.
        """
        waited, start = WaitedForACore(self.process.pid), time.monotonic()
        self.process.send_signal(number)
        # Not reaped yet: what its threads have waited can still be read.
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < start + START_TIMEOUT, 'it did not end'
            waited.look()
            time.sleep(0.01)
        took = time.monotonic() - start
        waited.look()
        self.process.wait()
        return took - min(took, waited.seconds)

    def has_caught_up(self) -> tuple[float, int]:
        """Wait until a second goes by in which it misses nothing; return when that is told, and how many of TOPIC it missed."""
        start, before = time.monotonic(), None
        end = start + CATCHES_UP
        while True:
            assert time.monotonic() < end, f'it has not caught up for {CATCHES_UP:g} s: {before} messages missed, and more come'
            at, report = self.rig.wait_for('/diagnostics', _records, 'the recorder to go on', START_TIMEOUT, since=start)
            values = {value.key: value.value for value in report.status[0].values}
            if before == values['missed']:
                return at, int(values.get(f'missed: /{TOPIC}', 0))
            start, before = at, values['missed']

    def lost(self, *parts: tuple[float, float]) -> int:
        """Return how many messages that were heard in these parts of the time (steady, s) are not in the bag."""
        with open_bag(self.folder) as bag:
            there = {nanoseconds(bag.deserialize(topic, raw).header.stamp)
                     for topic, raw, _ in bag.messages([f'/{TOPIC}'])}
        heard = {nanoseconds(r.message.header.stamp) for r in self.rig.observer.since(TOPIC, self.began)
                 if any(begin <= r.at <= end for begin, end in parts)}
        assert heard, 'nothing was to be recorded'
        return len(heard - there)


class WaitedForACore:
    """How long a process has had to wait for a core since this was made, by the kernel's run-queue delay of its threads."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f'/proc/{pid}/task')
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}  # ns, by thread; of one that has ended, what was read last
        self.look()

    def look(self) -> None:
        """Read what the threads have waited so far."""
        for task in self._tasks.iterdir():
            try:
                self._last[task.name] = int((task / 'schedstat').read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            self._first.setdefault(task.name, self._last[task.name])

    @property
    def seconds(self) -> float:
        """The longest that one thread has waited. What others have waited before or after is left out: nothing counts twice."""
        return max((self._last[thread] - first for thread, first in self._first.items()), default=0) * 1e-9


def _records(message: DiagnosticArray) -> bool:
    status = message.status[0]
    return status.hardware_id == 'recorder' and any(v.key == 'messages' and int(v.value) > 0 for v in status.values)


@contextmanager
def recording(running: Running, folder: Path, environment: dict[str, str] | None = None) -> Iterator[Recording]:
    """Record in a process of its own."""
    description = load()
    node, = (node for node in description.nodes if node.name == 'recorder')
    environment = {**running.environment, **(environment or {}),
                   **node.own_environment(running.environment, description.environment)}
    with (running.directory / 'log' / 'recorder.log').open('ab') as log:
        process = subprocess.Popen(
            [sys.executable, str(find_executable('worldmodel_ros', 'recorder')), '--ros-args', '--params-file',
             str(config_directory() / 'recorder.yaml'), '-p', f'bag:={folder}'],
            env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Recording(running.rig, process, folder)
    finally:
        process.kill()
        process.wait()


def _new_folder(running: Running) -> Path:
    return running.disk.path / f'bag_{time.monotonic_ns()}'


def _recorder_ends(end: Callable[[Recording], float], code: int, running: Running) -> Seen:
    """``end`` ends it, with this exit code, and returns how long that took [s]."""
    rig = running.rig
    rig.drive()
    with recording(running, _new_folder(running)) as recorder:
        rig.watch(CHUNK + 2.0)
        rig.drive()
        start = time.monotonic()
        took = end(recorder)
        found = recorder.process.wait(5.0)
        assert found == code, f'it ended with {found}'
        rig.watch(1.0)
        drives_through(rig, start)
        return Seen(UNRECORDED, took, recorder.lost((recorder.began, start - (CHUNK if code else SETTLED))))


def _starved(recorder: Recording) -> float:
    start = time.monotonic()
    return starve(recorder.process.pid, 'the recorder') - start


for _name, _code in (('sigkill', -signal.SIGKILL), ('sigterm', 0), ('sigint', 0)):
    case(ONE_ROBOT, UNRECORDED, TO_ITS_END, 3.0, name=f'recorder_{_name}', what=f'{_name.upper()} to the recorder')(
        partial(_recorder_ends, partial(Recording.time_to_end, number=getattr(signal, _name.upper())), _code))
case(ONE_ROBOT, UNRECORDED, 'to its end', 5.0, needs=cannot_limit, name='recorder_out_of_memory',
     what="The recorder has no more memory (a control group's limit): the kernel ends it")(
    partial(_recorder_ends, _starved, -signal.SIGKILL))


@case(ONE_ROBOT, WITHOUT_A_PART, 'longest pause of the robot', PAUSE)
def recorder_sigstop(running: Running) -> Seen:
    """SIGSTOP to the recorder for 3 s: a subscriber of every topic that takes nothing"""
    rig = running.rig
    rig.drive()
    with recording(running, _new_folder(running)) as recorder:
        rig.watch(2.0)
        rig.drive()
        start = time.monotonic()
        recorder.process.send_signal(signal.SIGSTOP)
        rig.watch(3.0)
        pause = drives_through(rig, start)
        recorder.process.send_signal(signal.SIGCONT)
        # What came meanwhile is first taken in, for longer on a busy machine.
        again, missed = recorder.has_caught_up()
        rig.watch(2.0)
        assert recorder.end() == 0
        lost = recorder.lost((recorder.began, start - SETTLED), (again + SETTLED, again + 2.0 - SETTLED))
        gap = recorder.lost((start, start + 3.0))
        assert gap <= missed, f'{gap} messages are missing, and it has told of {missed}'
        return Seen(WITHOUT_A_PART if gap else 'nothing missing', pause, lost)


def _disk_fails(fail: Callable[[Running, Recording], None], reason: str, running: Running,
                environment: dict[str, str] | None = None) -> Seen:
    rig = running.rig
    rig.drive()
    with recording(running, _new_folder(running), environment) as recorder:
        rig.watch(CHUNK + 2.0)
        rig.drive()
        start = time.monotonic()
        fail(running, recorder)
        told = rig.wait_for(
            '/diagnostics', lambda m: m.status[0].hardware_id == 'recorder'
            and m.status[0].level == DiagnosticStatus.ERROR and reason in m.status[0].message,
            f'the recorder to name {reason!r}', TOLD + 5.0, since=start).at
        drives_through(rig, start)
        running.disk.empty()
        recorder.end()
        return Seen(UNRECORDED, told - start, recorder.lost((recorder.began, start - CHUNK)))


case(ONE_ROBOT, UNRECORDED, 'to the report', TOLD, needs=cannot_mount, name='recorder_disk_full',
     what='The disk of the recording is full')(
    partial(_disk_fails, lambda running, recorder: running.disk.fill(), 'No space left on device'))
case(ONE_ROBOT, UNRECORDED, 'to the report', TOLD, name='recorder_file_too_large',
     what="The recording's file may not grow (RLIMIT_FSIZE)")(
    partial(_disk_fails, lambda running, recorder: resource.prlimit(
        recorder.process.pid, resource.RLIMIT_FSIZE, (1024, 1024)), 'File too large'))


@case(SHIMMED, UNRECORDED, TO_ITS_END, 3.0, needs=no_compiler)
def recorder_fsync_fails(running: Running) -> Seen:
    """fsync fails (EIO) when the recorder completes its file"""
    rig = running.rig
    rig.drive()
    shim = running.own_shim('recorder')
    with recording(running, _new_folder(running), shim.environment) as recorder:
        rig.watch(2.0)
        rig.drive()
        shim.fail_fsync()
        start = time.monotonic()
        took = recorder.time_to_end(signal.SIGINT)
        drives_through(rig, start)
        said = 'could not be completed: [Errno 5] Input/output error' in running.log('recorder')
        return Seen(UNRECORDED if said else 'nothing was said', took, recorder.lost((recorder.began, start - SETTLED)))


def _save(rig: Rig, name: str) -> SessionFile.Response:
    return rig.call(SessionFile, f'{MODEL}/save_session', SessionFile.Request(path=name), attempt=FILE_TIMEOUT + 1.0)


def _load(rig: Rig, name: str) -> SessionFile.Response:
    return rig.call(SessionFile, f'{MODEL}/load_session', SessionFile.Request(path=name), attempt=FILE_TIMEOUT + 1.0)


def _saved(running: Running, name: str) -> Path:
    answer = _save(running.rig, name)
    assert answer.success, answer.message
    assert answer.message == name
    return running.disk.path / name


def _is_refused(answer: SessionFile.Response) -> str:
    return REFUSED if not answer.success and answer.message else f'success: {answer.message}'


def _saving_fails(fail: Callable[[Running], None], repair: Callable[[Running], None], running: Running) -> Seen:
    rig = running.rig
    rig.drive()
    file = _saved(running, 'kept.safetensors')
    before = file.read_bytes()
    fail(running)
    start = time.monotonic()
    answer = _save(rig, 'kept.safetensors')
    took = time.monotonic() - start
    rig.watch(0.5)
    drives_through(rig, start)
    repair(running)
    lost = int(not file.is_file() or file.read_bytes() != before)  # what had been saved is there as it was
    left = [other.name for other in file.parent.iterdir() if other.is_file() and 'kept' in other.name and other != file]
    assert not left, f'{left} are left behind'
    loaded = _load(rig, 'kept.safetensors')
    assert loaded.success, loaded.message
    return Seen(_is_refused(answer), took, lost)


case(ONE_ROBOT, REFUSED, 'to the answer', FILE_TIMEOUT, needs=cannot_mount, name='session_disk_full',
     what='A session is saved to a full disk; one of that name is there')(
    partial(_saving_fails, lambda running: running.disk.fill(), lambda running: running.disk.empty()))
case(SHIMMED, REFUSED, 'to the answer', FILE_TIMEOUT, needs=no_compiler, name='session_fsync_fails',
     what='fsync fails (EIO) while a session is saved; one of that name is there')(
    partial(_saving_fails, lambda running: running.shim(f'/{MODEL}').fail_fsync(),
            lambda running: running.shim(f'/{MODEL}').clear()))


def _damaged(damage: Callable[[Path], None], running: Running) -> Seen:
    rig = running.rig
    rig.drive()
    file = _saved(running, 'damaged.safetensors')
    damage(file)
    start = time.monotonic()
    answer = _load(rig, 'damaged.safetensors')
    took = time.monotonic() - start
    rig.watch(1.0)
    drives_through(rig, start)
    return Seen(_is_refused(answer), took)


def flip(file: Path, place: float, bit: int = 6) -> None:
    """Flip one bit of a file, at a part of its length."""
    with file.open('r+b') as stream:
        position = int(file.stat().st_size * place)
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1 << bit]))


for _name, _damage, _what in (
    ('session_bit_flip', partial(flip, place=0.6), 'A bit of a saved session is flipped, and it is loaded'),
    ('session_header_bit_flip', partial(flip, place=0.0001), 'A bit in its header is flipped'),
    ('session_cut_short', lambda file: file.write_bytes(file.read_bytes()[:-1000]), 'It lacks its end'),
):
    case(ONE_ROBOT, REFUSED, 'to the answer', FILE_TIMEOUT, name=_name, what=_what)(partial(_damaged, _damage))


@case(ONE_ROBOT, RECOVERED, 'to the stop', STOP_LATENCY, ends=(f'/{MODEL}',))
def session_model_killed(running: Running) -> Seen:
    """SIGKILL to the model node while it saves a session; one of that name is there"""
    rig = running.rig
    right_after_a_command(rig)
    before = (file := _saved(running, 'killed.safetensors')).read_bytes()
    right_after_a_command(rig)
    client = rig.observer.node.create_client(SessionFile, f'{MODEL}/save_session')
    try:
        assert client.wait_for_service(5.0)
        client.call_async(SessionFile.Request(path='killed.safetensors'))
        time.sleep(0.005)
        took = stop(rig, running.send(f'/{MODEL}', signal.SIGKILL), STOP_LATENCY)
    finally:
        rig.observer.forget(client)
    outcome = afterwards(rig, RESTART)
    # The former one, or the one that was being saved, which is of another drive and may be longer or shorter: but whole, by its
    # checksum.
    loaded = _load(rig, 'killed.safetensors')
    assert file.read_bytes() == before or loaded.success, loaded.message
    return Seen(outcome, took, 0 if loaded.success else 1)

"""
Tells a machine that stood still from processes that did.

A shared host takes a virtual core away for milliseconds at times, and then nothing that runs on it can keep a bound of
milliseconds. One process for each core looks at the clock every 2 ms and writes down when a look came late, less the time
for which it waited for other processes of this machine (the kernel's run-queue delay): load is no stall, and neither is
this interpreter's lock.

A bound is therefore judged by ``past``: the time that was taken, less the stalls that overlap its end. A ``Missed`` by less
than one single stall that overlaps it is played again.

A host that shares its memory and the other thread of a core runs slower for seconds without standing still, which nothing here
can tell from a program that is slower. So what needs predictions in time is also played again where nothing explains its
failure, ``UNEXPLAINED`` times in a run of the tests, and each is named in the table: what fails always, or often, still fails.
"""

import atexit
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

PERIOD = 0.002  # s between two looks at the clock
SHORTEST = 0.001  # s, of a stall that is written down
PRIORITY = 40  # SCHED_FIFO, where that is permitted: above the nodes and the observer
PLAYS = 3  # of what a stall spoils
UNEXPLAINED = 4  # plays of a process that may be played again though nothing explains their failure
PATIENCE = 0.2  # s, for the watch itself to come to an instant that is asked for

_HEADER = struct.Struct('=dq')  # steady time of the last look [s], number of stalls
_STALL = struct.Struct('=dd')  # start and end, steady time [s]
_CAPACITY = 262_144  # stalls of a core; what comes after them is not seen, which excuses nothing


class InvariantViolation(AssertionError):
    """What must hold in every play did not. Final: never played again, never skipped."""


class Missed(AssertionError):
    """A bound of quality was missed by ``by`` seconds, somewhere between two steady times [s]."""

    def __init__(self, what: str, by: float, start: float, end: float) -> None:
        super().__init__(what)
        self.by, self.start, self.end = by, start, end


class Slowed(AssertionError):
    """What needs predictions in time failed on a machine that has become slower than what their time was made for."""


class Unexplained(AssertionError):
    """What needs predictions in time failed, and the machine is as fast before and after as it was."""


class Stall(NamedTuple):
    """A time for which a core stood still: steady times [s]."""

    start: float
    end: float


class Watch:
    """Watches the cores that this process may use, from ``start`` to ``stop``, or while it is entered."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self._memories: list[mmap.mmap] = []

    def start(self) -> None:
        """Start watching, and return once every core is watched."""
        for core in sorted(os.sched_getaffinity(0)):
            with tempfile.TemporaryFile() as file:
                file.truncate(_HEADER.size + _CAPACITY * _STALL.size)
                self._memories.append(mmap.mmap(file.fileno(), 0))
                self.processes.append(subprocess.Popen(
                    [sys.executable, '-I', '-S', __file__, str(file.fileno()), str(core)],
                    stdin=subprocess.PIPE, pass_fds=[file.fileno()]))
        self._wait_until_after(time.monotonic(), 5.0)

    def stop(self) -> None:
        """Stop watching. What was seen stays."""
        for process in self.processes:
            process.stdin.close()
            process.wait()
        self.processes = []

    def __enter__(self) -> 'Watch':
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stalls(self, start: float, end: float) -> list[Stall]:
        """Return the stalls of any core that overlap the time from ``start`` to ``end`` [s, steady], oldest first."""
        self._wait_until_after(end, PATIENCE)
        found = []
        for memory in self._memories:
            for number in reversed(range(_HEADER.unpack_from(memory)[1])):
                stall = Stall(*_STALL.unpack_from(memory, _HEADER.size + number * _STALL.size))
                if stall.end <= start:
                    break
                if stall.start < end:
                    found.append(stall)
        return sorted(found)

    def stood_still(self, start: float, end: float) -> float:
        """Return for how much of the time from ``start`` to ``end`` a core stood still [s]."""
        total, last = 0.0, start
        for stall in self.stalls(start, end):
            total += max(0.0, min(stall.end, end) - max(stall.start, last))
            last = max(last, stall.end)
        return total

    def longest(self, start: float, end: float) -> float:
        """Return the length of the longest stall that overlaps the time from ``start`` to ``end`` [s]; 0: there was none."""
        return max((stall.end - stall.start for stall in self.stalls(start, end)), default=0.0)

    def _wait_until_after(self, instant: float, patience: float) -> None:
        """Wait until each core's watch has looked after an instant: a stall is written down at its end."""
        give_up = time.monotonic() + patience
        while (any(_HEADER.unpack_from(memory)[0] <= instant for memory in self._memories)
               and time.monotonic() < give_up and any(process.poll() is None for process in self.processes)):
            time.sleep(PERIOD)


_running: Watch | None = None


def watching() -> Watch:
    """Return this process's watch, which runs from the first call on."""
    global _running
    if _running is None:
        _running = Watch()
        _running.start()
        atexit.register(_running.stop)
    return _running


def past(start: float, end: float, bound: float, reserve: float) -> float:
    """
    Return by how much what took from ``start`` to ``end`` was longer than ``bound``, not counting stalls [s]; at most 0: kept.

    What was to be done ``reserve`` before the bound, or sooner, cannot have been delayed by a stall before that. So the
    stalls that count are those between then and ``end``. Without a watch (``watching``) none count.
    """
    over = end - start - bound
    if over <= 0.0 or _running is None:
        return over
    return over - _running.stood_still(start + bound - reserve, end)


class Replay(NamedTuple):
    """A play that failed and was played again."""

    name: str
    reason: str


REPLAYS: list[Replay] = []  # of this process, for the summary of the tests
_unexplained = 0  # of this process


def play_out(play: Callable[[], Any], name: str, prepare: Callable[[], Any] = lambda: None) -> None:
    """
    Play, and raise what it fails by.

    It is played again where it missed a bound of quality (``Missed``) by less than the length of one stall that overlaps the
    time in question, where the machine was found slower than its bounds were made for (``Slowed``), and a few times in all
    where nothing explains why something was not in time (``Missed``, ``Unexplained``): three plays at most. ``prepare()``
    goes before each play.
    """
    global _unexplained
    watch = watching()
    for number in range(1, PLAYS + 1):
        prepare()
        try:
            play()
            return
        except (Missed, Slowed, Unexplained) as failure:
            reason = _explanation(failure, watch)
            if number == PLAYS or (not reason and _unexplained == UNEXPLAINED):
                raise
            _unexplained += not reason
            REPLAYS.append(Replay(name, reason or f'nothing that was measured explains it: {failure}'))


def _explanation(failure: AssertionError, watch: Watch) -> str:
    """Return what the machine did that explains a failure, or '' if nothing does."""
    if isinstance(failure, Slowed):
        return str(failure)
    if isinstance(failure, Missed) and (stall := watch.longest(failure.start, failure.end)) > failure.by:
        return f'missed by {failure.by * 1e3:.0f} ms, in a stall of the machine of {stall * 1e3:.0f} ms: {failure}'
    return ''


def _watch(descriptor: int, core: int) -> None:
    """Watch a core until the standard input is closed, and write what is seen into a file's memory."""
    os.sched_setaffinity(0, [core])
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:
        pass  # it then waits longer for others, which is taken off below
    os.set_blocking(0, False)
    memory = mmap.mmap(descriptor, 0)
    delays = os.open('/proc/self/schedstat', os.O_RDONLY)

    def waited() -> float:
        """For how long this process was ready to run, and another one ran [s]."""
        return int(os.pread(delays, 64, 0).split()[1]) * 1e-9

    count, before, last = 0, waited(), time.monotonic()
    while True:
        time.sleep(PERIOD)
        now, delay = time.monotonic(), waited()
        stood = now - last - PERIOD - (delay - before)
        if stood > SHORTEST and count < _CAPACITY:
            _STALL.pack_into(memory, _HEADER.size + count * _STALL.size, now - stood, now)
            count += 1
        before, last = delay, now
        _HEADER.pack_into(memory, 0, now, count)
        try:
            if not os.read(0, 1):
                return
        except BlockingIOError:
            pass


if __name__ == '__main__':
    _watch(int(sys.argv[1]), int(sys.argv[2]))

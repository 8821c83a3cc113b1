"""Real-time scheduling of a process's threads, their turns with the GIL, and malloc settings against page faults and heap
growth."""
from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_KEPT = 32 * 2**20  # bytes

# s for which a thread may hold the GIL while another waits for it, in processes with deadlines. With Python's default of 5 ms,
# a fallback came 7 ms late (p50; p99 21 ms) next to a thread that computes in Python; with this, 0.7 ms (5 to 8 ms).
SWITCH_INTERVAL = 0.0005

_switching, _intervals, _usual = threading.Lock(), list[float](), 0.0  # s; of ``switching_at``


class Logger(Protocol):
    """A logger of Python's, or of a ROS node."""

    def info(self, message: str) -> object: ...

    def warning(self, message: str) -> object: ...


def priority_of(process: int) -> int:
    """Return the SCHED_FIFO priority of a process's main thread, by id (0: this thread's); 0 under another policy."""
    scheduling = os.sched_getscheduler(process) & ~os.SCHED_RESET_ON_FORK
    return os.sched_getparam(process).sched_priority if scheduling == os.SCHED_FIFO else 0


def apply(logger: Logger, priority: int, *, all_threads: bool = False, inherited: bool = True) -> bool:
    """
    Put the calling thread under SCHED_FIFO with ``priority`` (1 to 99; 0 leaves it as it is).

    ``all_threads`` includes every thread that the process has by now, those of DDS too: right if receiving is as urgent
    as the callback, wrong if threads compute for long. ``inherited``: threads and processes started later have it, too.
    Returns whether it took effect. If it is not permitted, warns with the remedy and continues: the node works without,
    only with more jitter on a busy machine.
    """
    if priority <= 0:
        return False
    scheduling = os.SCHED_FIFO | (0 if inherited else os.SCHED_RESET_ON_FORK)
    try:
        for thread in map(int, os.listdir('/proc/self/task')) if all_threads else (0,):
            try:
                os.sched_setscheduler(thread, scheduling, os.sched_param(priority))
            except ProcessLookupError:
                continue  # it has ended since it was listed
    except PermissionError:
        logger.warning(
            f'real-time priority {priority} is not permitted: add "@realtime - rtprio {priority}" to '
            '/etc/security/limits.d/realtime.conf and this user to the group realtime (in a container: '
            f'--ulimit rtprio={priority} --cap-add=sys_nice), or set realtime_priority to 0')
        return False
    except OSError as error:
        logger.warning(f'real-time priority {priority} was not set ({error}); use 1 to 99, or 0 for none')
        return False
    logger.info(f'running under SCHED_FIFO with priority {priority}')
    return True


def keep_freed_memory() -> bool:
    """
    Make the process reuse the memory of buffers of up to 32 MiB rather than return it to the system.

    Otherwise each large message is received into fresh pages, and the page faults take longer than the copy. Returns
    whether the C library (glibc) supports the setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _KEPT), mallopt(_M_TRIM_THRESHOLD, 4 * _KEPT)])


def share_one_heap() -> bool:
    """
    Make threads started from now on allocate from the existing heaps: from a single one, if there are no threads yet.

    Otherwise the C library gives threads heaps of their own, up to eight per core; memory that one DDS thread allocates and
    another frees fragments them, and a process that runs for weeks grows. Sharing makes threads wait for each other, which
    costs little in a process that allocates little. Returns whether the C library (glibc) supports the setting.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))
    except (AttributeError, OSError):
        return False


@contextmanager
def switching_at(interval: float) -> Iterator[None]:
    """
    Have threads that hold the GIL give it up after ``interval`` s during the block, if others wait for it.

    For a few ms of work in which threads wait for the GIL dozens of times. Blocks may overlap, in any threads: the shortest
    interval holds, and the one before them returns with the last one.
    """
    global _usual
    with _switching:
        if not _intervals:
            _usual = sys.getswitchinterval()
        _intervals.append(interval)
        sys.setswitchinterval(min(_usual, *_intervals))
    try:
        yield
    finally:
        with _switching:
            _intervals.remove(interval)
            sys.setswitchinterval(min(_usual, *_intervals) if _intervals else _usual)

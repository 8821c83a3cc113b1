"""Real-time scheduling of a process's threads, and memory without page faults."""
from __future__ import annotations

import ctypes
import os
import threading
from typing import Protocol


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 32 * 2**20  # bytes
_NICENESS = -10


class Logger(Protocol):
    """A logger of Python's, or of a ROS node."""

    def info(self, message: str) -> object: ...

    def warning(self, message: str) -> object: ...


def priority_of(process: int) -> int:
    """SCHED_FIFO priority of a process's main thread, by its id (0: this thread's own); 0 under another scheduling."""
    return os.sched_getparam(process).sched_priority if os.sched_getscheduler(process) == os.SCHED_FIFO else 0


def apply(logger: Logger, priority: int, *, all_threads: bool = False) -> bool:
    """
    Put the calling thread under SCHED_FIFO with `priority` (1 to 99; 0 leaves it as it is).

    `all_threads` takes every thread that the process has by now, those of DDS included: right where receiving
    is as urgent as the callback, wrong where threads compute for long. Returns whether it took effect. Where
    it is not permitted, warns with the remedy and goes on: the node works without, only with more jitter on a
    busy machine.
    """
    if priority <= 0:
        return False
    try:
        for thread in map(int, os.listdir('/proc/self/task')) if all_threads else (0,):
            try:
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
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
    Have the process reuse the memory of buffers of up to 32 MiB rather than return it to the system.

    Otherwise each large message is received into fresh pages, and the faults take longer than its copying. Returns
    whether the C library (glibc) knows the setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _KEPT), mallopt(_M_TRIM_THRESHOLD, 4 * _KEPT)])


class Urgency:
    """
    Has the calling thread run under SCHED_FIFO, if it did so when this was made, only while its work is `urgent`.

    Linux gives real-time threads 95 % of a processor (sched(7), `sched_rt_runtime_us`) and then stops all of them there
    for up to 50 ms, however urgent: a thread that fills a processor with work that can wait would have the watchdogs
    throttled with it. Such work runs in the ordinary class, with a niceness that other programs do not have.
    """

    def __init__(self) -> None:
        self._priority, self._urgent = priority_of(0), True
        if self._priority:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # counts in the ordinary class only
            except PermissionError:
                pass

    @property
    def urgent(self) -> bool:
        """Whether the thread runs under SCHED_FIFO, where that is permitted."""
        return self._urgent

    @urgent.setter
    def urgent(self, urgent: bool) -> None:
        if self._priority and urgent is not self._urgent:
            policy, priority = (os.SCHED_FIFO, self._priority) if urgent else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        self._urgent = urgent

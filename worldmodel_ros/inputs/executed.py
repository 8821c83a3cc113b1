"""What the robot really did: the commands that it was given, each for as long as a base obeys it."""
from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .ticks import NS

TIMEOUT = 0.5   # s; bases brake by themselves after about so long without a command
_LARGEST = float(np.finfo(np.float32).max)
_KEPT = 10 * NS  # longer than any interval between two ticks of one episode


def is_usable(action: Iterable[float]) -> bool:
    """Return whether all numbers of an action are finite, as the model has them: in float32."""
    return all(abs(value) <= _LARGEST for value in action)  # of a NaN, every comparison is false


class Executed(NamedTuple):
    stamp: int  # ns, when it was received
    action: tuple[float, ...]


class ExecutedActions:
    """
    What the robot was told to do, over time. A command is in force from its receipt until the next one.

    But no longer than a time-out, after which the base brakes by itself: whoever gave the command may be dead.

    Written by one thread and read by another.
    """

    def __init__(self, actions: int, step_period: float, timeout: float = TIMEOUT) -> None:
        """
        `actions`: numbers in an action; `step_period`: of the model [s]; `timeout` [s], 0: a command is in force
        until the next one comes, as on a topic that tells changes only.
        """
        self._size, self._period = actions, round(step_period * NS)
        self._timeout = round(timeout * NS) or sys.maxsize
        self._lock = threading.Lock()
        self._kept: deque[Executed] = deque()

    def add(self, stamp: int, action: tuple[float, ...]) -> None:
        """Take a command that was received at `stamp` [ns, ROS time]."""
        with self._lock:
            if self._kept and stamp < self._kept[-1].stamp:
                self._kept.clear()  # ROS time was set back: what came before has no place on the new time
            self._kept.append(Executed(stamp, action))
            while len(self._kept) > 1 and self._kept[1].stamp < stamp - _KEPT:
                self._kept.popleft()

    def moving(self, now: int) -> bool:
        """Return whether the newest command moves the robot, and is in force at `now` [ns, ROS time]."""
        newest = self._newest
        return newest is not None and any(newest.action) and now - newest.stamp < self._timeout

    def ran_out(self, now: int) -> bool:
        """Return whether the newest command moved the robot, and is in force no more at `now` [ns, ROS time]."""
        newest = self._newest
        return newest is not None and any(newest.action) and now - newest.stamp >= self._timeout

    def mean(self, start: int | None, end: int) -> np.ndarray:
        """
        Return the time-weighted mean action between two stamps [ns], float32 (A,); zeros while no command was in
        force.

        `start` None stands for one step period before `end`.
        """
        start = end - self._period if start is None else start
        total = np.zeros(self._size)
        with self._lock:
            until = end
            for stamp, action in reversed(self._kept):
                begin, over = max(stamp, start), min(until, stamp + self._timeout)
                if begin < over:
                    total += np.asarray(action) * (over - begin)
                until = min(until, begin)
                if stamp <= start:
                    break
        return (total / max(1, end - start)).astype(np.float32)

    def first(self, start: int, end: int) -> tuple[float, ...] | None:
        """
        Return the first command received from the stamp `start` until `end` [ns], else the one in force at
        `start`, or zeros if its time was over; None before the first command.
        """
        with self._lock:
            found = None
            for stamp, action in reversed(self._kept):
                if stamp < end and (stamp >= start or found is None):
                    found = action if start - stamp < self._timeout else (0.0,) * self._size
                if stamp < start:
                    break
            return found

    @property
    def _newest(self) -> Executed | None:
        with self._lock:
            return self._kept[-1] if self._kept else None

"""
What the world model is given: which images are ticks, whether the camera is alive, what was really executed.
"""
from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NS = 1_000_000_000
_KEPT = 10 * NS  # of executed actions; longer than any interval between two ticks of one episode


class Pace(enum.Enum):
    """
    What an image is to the model. The values of the refused ones are reasons to be counted.

    FROZEN is judged by the picture, the others by the stamp.
    """

    TICK = 'tick'
    NEW_EPISODE = 'first of a new episode'
    BETWEEN = 'between two ticks'
    ZERO = 'zero stamp'
    DUPLICATE = 'duplicate stamp'
    BACKWARD = 'stamp out of order'
    FROZEN = 'frozen camera'

    @property
    def refused(self) -> bool:
        return self in (Pace.ZERO, Pace.DUPLICATE, Pace.BACKWARD)


class FramePacer:
    """
    Finds the images that are one step period apart, whatever the rate of the camera.

    A jump of the stamps by more than `time_jump` s, either way, begins a new episode: what the model has seen
    is then no past of what it sees (a bag that starts over, a simulation that was reset, a camera that was
    away).
    """

    def __init__(self, step_period: float) -> None:
        """`step_period`: of the model [s]."""
        self._period = step_period
        self.forget()

    def forget(self) -> None:
        """Make the next image the first of an episode."""
        self._tick: int | None = None
        self._seen = 0

    def classify(self, stamp: int, tolerance: float, time_jump: float) -> Pace:
        """
        Judge an image by its stamp [ns]; `tolerance` [s] is by how much a tick may be early. Changes nothing.
        """
        if stamp == 0:
            return Pace.ZERO
        if self._tick is None or abs(stamp - self._seen) > time_jump * NS:
            return Pace.NEW_EPISODE
        if stamp <= self._seen:
            return Pace.DUPLICATE if stamp == self._seen else Pace.BACKWARD
        return Pace.BETWEEN if stamp - self._tick < (self._period - tolerance) * NS else Pace.TICK

    def take(self, stamp: int, pace: Pace) -> None:
        """Count an image that was judged so, and could be used: the pace goes on from it."""
        self._seen = stamp
        if pace is not Pace.BETWEEN:
            self._tick = stamp


class FrozenCamera:
    """
    Notices a camera that serves one picture for ever, with new stamps.

    A picture may well stay the same while the robot stands, so it counts only while a command moves it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, with a camera that is taken to be alive."""
        self.frozen = False
        self._last: np.ndarray | None = None
        self._same_since: float | None = None
        self._alive = 0

    def update(self, data: Sequence[int], moving: bool, now: float, timeout: float, recovery: int) -> bool:
        """
        Take the bytes of the next picture, received at the steady time `now` [s]; return whether the camera
        is frozen.

        It is after `timeout` s (0: never) of the same picture while `moving`, until the picture has changed
        and `recovery` more have come.
        """
        data = np.frombuffer(data, np.uint8)
        same = self._last is not None and np.array_equal(data, self._last)
        self._last = data
        if self.frozen:
            # The robot stands by now, so that after the first change nothing may change any more.
            self._alive += not same or self._alive > 0
            if self._alive > recovery or timeout == 0.0:
                self.frozen, self._same_since = False, None
            return self.frozen
        if not same or not moving:
            self._same_since = None
            return False
        self._same_since = now if self._same_since is None else self._same_since
        if timeout and now - self._same_since >= timeout:
            self.frozen, self._alive = True, 0
        return self.frozen


class Executed(NamedTuple):
    stamp: int  # ns, when it was received
    action: tuple[float, ...]


class ExecutedActions:
    """
    What the robot was told to do, over time. A command is in force from its receipt until the next one.

    Written by one thread and read by another.
    """

    def __init__(self, actions: int, step_period: float) -> None:
        """`actions`: numbers in an action; `step_period`: of the model [s]."""
        self._size, self._period = actions, round(step_period * NS)
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

    @property
    def moving(self) -> bool:
        """Whether the command in force moves the robot."""
        with self._lock:
            return bool(self._kept) and any(self._kept[-1].action)

    def mean(self, start: int | None, end: int) -> np.ndarray:
        """
        Return the time-weighted mean action between two stamps [ns], float32 (A,); zeros before the first
        command.

        `start` None stands for one step period before `end`.
        """
        start = end - self._period if start is None else start
        total = np.zeros(self._size)
        with self._lock:
            until = end
            for stamp, action in reversed(self._kept):
                begin = max(stamp, start)
                if begin < until:
                    total += np.asarray(action) * (until - begin)
                    until = begin
                if stamp <= start:
                    break
        return (total / max(1, end - start)).astype(np.float32)

    def first(self, start: int, end: int) -> tuple[float, ...] | None:
        """
        Return the first command received from the stamp `start` until `end` [ns], else the one in force at
        `start`; None before the first command.
        """
        with self._lock:
            found = None
            for stamp, action in reversed(self._kept):
                if stamp < end and (stamp >= start or found is None):
                    found = action
                if stamp < start:
                    break
            return found

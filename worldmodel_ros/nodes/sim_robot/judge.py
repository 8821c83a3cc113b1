"""Measures the latency of the commands that the simulated robot receives, from the observation that each one answers."""

import math
import threading
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np


FEW = 100  # late commands whose times are reported


class Tally(NamedTuple):
    """Counts since the start, and latencies from capture to receipt in seconds."""

    received: int
    unstamped: int            # answering no observation: stops
    unknown: int              # answering an observation that is not kept
    late: int                 # above the deadline, including those to unknown observations
    window: np.ndarray        # (n,) latencies of the last commands, oldest first
    fresh: np.ndarray         # (m,) latencies since the last tally
    late_ones: list[tuple[float, float]]  # the first FEW since the last tally: steady times of capture (NaN if the
    #                                       observation is not kept) and of receipt [s]


class CommandJudge:
    """
    Matches commands to observations by stamp, and counts the late ones. Thread-safe.

    Both times are taken from the steady clock, so that neither a jump of ROS time nor a wrong stamp can make a late command
    look good.
    """

    def __init__(self, deadline: float, observations: int = 256, window: int = 4096) -> None:
        """``deadline`` [s]; the newest ``observations`` and ``window`` latencies are kept."""
        self.deadline = deadline
        self._keep = observations
        self._captured: OrderedDict[int, float] = OrderedDict()
        self._window: deque[float] = deque(maxlen=window)
        self._fresh: list[float] = []
        self._late_ones: list[tuple[float, float]] = []
        self._received = self._unstamped = self._unknown = self._late = 0
        self._lock = threading.Lock()

    def observed(self, stamp: int, captured: float) -> None:
        """Record an observation: its stamp [ns] and the steady time of its capture [s]."""
        with self._lock:
            self._captured[stamp] = captured
            while len(self._captured) > self._keep:
                self._captured.popitem(last=False)

    def received(self, stamp: int, now: float) -> None:
        """Judge a command by the stamp of the observation it answers [ns, 0: none] and the steady time [s]."""
        with self._lock:
            self._received += 1
            if not stamp:
                self._unstamped += 1
                return
            captured = self._captured.get(stamp)
            if captured is None:
                self._unknown += 1
                self._count_late(math.nan, now)
                return
            latency = now - captured
            if latency > self.deadline:
                self._count_late(captured, now)
            self._window.append(latency)
            if len(self._fresh) < self._window.maxlen:
                self._fresh.append(latency)

    def _count_late(self, captured: float, now: float) -> None:
        self._late += 1
        if len(self._late_ones) < FEW:
            self._late_ones.append((captured, now))

    def tally(self) -> Tally:
        """Return the counts and latencies, and restart the lists ``fresh`` and ``late_ones``."""
        with self._lock:
            fresh, self._fresh = np.array(self._fresh), []
            late_ones, self._late_ones = self._late_ones, []
            return Tally(self._received, self._unstamped, self._unknown, self._late, np.array(self._window), fresh,
                         late_ones)

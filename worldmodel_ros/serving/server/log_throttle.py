"""Keeps errors at the rate of ticks from filling a disk with log lines."""
from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

_KEPT = 1000  # places and robots, before quiet ones are dropped


class LogThrottle(logging.Filter):
    """
    Lets one warning or error through per ``interval`` [s] for each place in the code and each first argument, which
    names the robot; the next one that passes says how many were left out. Other lines always pass.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval, self._clock = interval, clock
        self._lock = threading.Lock()
        self._passed: dict[tuple[Any, ...], tuple[float, int]] = {}  # time of the last one that passed, count since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the line."""
        if record.levelno < logging.WARNING:
            return True
        arguments = record.args if isinstance(record.args, tuple) else ()
        key = record.pathname, record.lineno, str(arguments[:1])
        now = self._clock()
        with self._lock:
            at, left_out = self._passed.get(key, (-math.inf, 0))
            if now - at < self._interval:
                self._passed[key] = at, left_out + 1
                return False
            if len(self._passed) >= _KEPT:
                self._passed = {each: kept for each, kept in self._passed.items() if now - kept[0] < self._interval}
            self._passed[key] = now, 0
        if left_out:
            record.msg, record.args = f'{record.getMessage()} ({left_out} lines like this were left out)', ()
        return True

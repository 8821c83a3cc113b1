"""How long the parts of a session's work take, also where the device works beside the host."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from worldmodel_ros.engine.step_times import StepTimes


class PartTimes:
    """Takes times into ``last`` (s by part) and into an engine's step times; those of failed work are not taken.

    Queued work is timed by marks that the device passes: their times are known when it has, and `read` takes them.
    """

    def __init__(self, step_times: StepTimes):
        self.last: dict[str, float] = {}
        self._step_times = step_times
        self._mark: Callable[[], Any] | None = None
        self._unread: list[tuple[str, Any, Any]] = []
        self._ignore = False

    @contextmanager
    def queued(self, mark: Callable[[], Any]) -> Iterator[None]:
        """Work in this context is queued; ``mark`` gives a point in the device's time (see TorchBackend.mark)."""
        self._mark = mark
        try:
            yield
        finally:
            self._mark = None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Times a block of work."""
        if self._ignore:
            yield
            return
        mark = self._mark
        start = mark() if mark else time.perf_counter()
        yield
        if mark:
            self._unread.append((part, start, mark()))
        else:
            self._take(part, time.perf_counter() - start)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Work in this context is not timed."""
        self._ignore = True
        try:
            yield
        finally:
            self._ignore = False

    def forget(self) -> None:
        """Gives up the marks of queued work that nobody has waited for."""
        self._unread.clear()

    def read(self) -> None:
        """Takes the times of queued work, which must be over."""
        for part, start, end in self._unread:
            self._take(part, start.elapsed_time(end) / 1e3)
        self._unread.clear()

    def _take(self, part: str, seconds: float) -> None:
        self.last[part] = seconds
        self._step_times.record(part, seconds)

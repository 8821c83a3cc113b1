"""Times of the parts of a tick: measured, also on an asynchronous device, and the finish that they predict."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from .backends.protocol import Mark

# What is promised must hold nearly always, so a prediction ends with a high quantile of what was measured.
QUANTILE = 0.95
HISTORY = 100
BEFORE_DENOISING = ('encode', 'commit', 'policy')
SESSION = 'session'  # what saving or loading one takes of the engine's thread at a time; no network call


class StepTimes:
    """Last durations (s) of each part (encode, commit, policy, denoise for one step, decode) and of whole ticks.

    The predicted tick is the sum of its parts' medians and one tail: the high quantile of how much real ticks exceeded
    that sum. Adding the parts' own high quantiles instead would count an interruption, which strikes a tick once, in
    every part.
    """

    def __init__(self):
        self._times: dict[str, deque[float]] = {}
        self._excess: deque[float] = deque(maxlen=HISTORY)
        # Every tick asks, few answers change: quantiles are computed when they are asked for after a change.
        self._cached: dict[tuple[str, float], float] = {}

    def record(self, part: str, seconds: float) -> None:
        self._times.setdefault(part, deque(maxlen=HISTORY)).append(seconds)
        self._cached.pop((part, 0.5), None)
        self._cached.pop((part, QUANTILE), None)

    def record_tick(self, seconds: float, steps: int) -> None:
        """Takes the whole time of a tick that denoised in ``steps`` steps."""
        self._excess.append(seconds - self._typical(steps))
        self._cached.pop(('excess', QUANTILE), None)

    def quantile(self, part: str) -> float:
        """High quantile (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, QUANTILE, self._times.get(part, ()))

    def predict(self, steps: int) -> float:
        """Time (s) from a frame at hand to its plan, checked by an imagined chunk of ``steps`` steps."""
        return self._typical(steps) + max(0.0, self._quantile('excess', QUANTILE, self._excess))

    def prediction_rate(self, step_period: float) -> float:
        """Highest rate (Hz) of one-step futures, imagined and decoded, where a frame comes every ``step_period`` s."""
        work = self._typical(1) + self._quantile('decode', 0.5, self._times.get('decode', ()))
        return 1.0 / max(step_period, work)

    def unit(self) -> float:
        """Time (s) of the longest single network call: the quantum that cannot be interrupted."""
        return max((self.quantile(part) for part in self._times if part != SESSION), default=0.0)

    def typical(self, part: str) -> float:
        """Median (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, 0.5, self._times.get(part, ()))

    def _typical(self, steps: int) -> float:
        median = {part: self._quantile(part, 0.5, self._times.get(part, ())) for part in (*BEFORE_DENOISING, 'denoise')}
        return sum(median[part] for part in BEFORE_DENOISING) + steps * median['denoise']

    def _quantile(self, name: str, level: float, values) -> float:
        if (name, level) not in self._cached:
            self._cached[name, level] = float(np.quantile(values, level)) if len(values) else 0.0
        return self._cached[name, level]


class PartTimes:
    """Measures the parts of one session's work, also where the device works asynchronously.

    Takes times into ``last`` (s by part) and into an engine's step times; those of failed work are not taken.

    Queued work is timed by marks that the device passes: their times are known when it has, and `read` takes them.
    """

    def __init__(self, step_times: StepTimes):
        self.last: dict[str, float] = {}
        self._step_times = step_times
        self._mark: Callable[[], Mark] | None = None
        self._unread: list[tuple[str, Mark, Mark]] = []
        self._ignore = False

    @contextmanager
    def queued(self, mark: Callable[[], Mark]) -> Iterator[None]:
        """Work in this context is queued; ``mark`` gives a point in the device's time (`Backend.mark`)."""
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
        """Gives up the marks of queued work that was not waited for."""
        self._unread.clear()

    def read(self) -> None:
        """Takes the times of queued work, which must be over."""
        for part, start, end in self._unread:
            self._take(part, start.elapsed_time(end) / 1e3)
        self._unread.clear()

    def _take(self, part: str, seconds: float) -> None:
        self.last[part] = seconds
        self._step_times.record(part, seconds)

"""By how much a plan can be wrong: how much longer runs of successive batches took than predicted."""
from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import inf

from .samples import Window

RUNS = (2, 4, 8, 16)  # batches
WINDOW = 300  # runs of each length, each beginning one batch after the last
FEWEST = 50  # samples needed for a quantile; as many are kept however old they are
QUANTILE = 0.99
LIKELY = 0.8   # quantile by which a tick attempted without a promise must be in time
LATE = 0.003  # fraction of promised ticks that may be late
STEP, WIDTHS = 0.25, (0.5, 3.0)  # by how much a late tick widens the margin, and the limits of its width
FIRST_WIDTH = 2.0  # cautious until the device is known


class Overruns:
    """
    High quantile of the relative overrun of runs of batches, for several run lengths.

    Where batches vary independently, a long run is relatively more certain than a short one; where the device is
    slower for a while, it is not. A batch counts with no more than its own high quantile: interruptions are accounted
    for separately, one in the tail of each plan.

    The margin made of it adapts to its results: a late answer widens it, and one in time narrows it by so much less
    that, in the long run, a fraction LATE is late, whatever the distribution of batches (adaptive conformal inference,
    Gibbs and Candes 2021), as long as the margin that this needs is within WIDTHS.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float, float]] = deque(maxlen=RUNS[-1])  # the newest first
        self._windows = [Window(WINDOW, FEWEST) for _ in RUNS]
        self._factors = (0.0,) * len(RUNS)
        self._likely = (inf,) * len(RUNS)  # unknown until measured
        self._width = FIRST_WIDTH

    def record(self, expected: float, high: float, seconds: float, slowness: float, now: float) -> None:
        """
        Record a batch: its expected duration, its high quantile and its real duration until ``now`` [s], and the
        slowness assumed at its beginning: a run is compared with what was known at the beginning of its first batch.
        """
        self._batches.appendleft((expected / slowness, min(seconds, high), slowness))
        sums = list(accumulate(self._batches, lambda a, b: (a[0] + b[0], a[1] + b[1], b[2])))
        for length, window in zip(RUNS, self._windows):
            if length <= len(sums):
                work, taken, believed = sums[length - 1]
                window.add(taken / (work * believed) - 1.0, now)
        self._factors = self._quantiles(QUANTILE, 0.0)
        self._likely = self._quantiles(LIKELY, inf)

    def answered(self, in_time: bool) -> None:
        """Record whether a promise was kept."""
        width = self._width + STEP * ((0.0 if in_time else 1.0) - LATE)
        self._width = min(max(width, WIDTHS[0]), WIDTHS[1])

    def after(self, count: int) -> float:
        """Return the relative overrun to allow for in a plan of ``count`` batches."""
        return self._width * self._factors[min(bisect_left(RUNS, count), len(RUNS) - 1)]

    def likely(self, count: int) -> float:
        """Return the relative overrun that one in five runs of ``count`` batches exceeds; infinite if not known."""
        return self._likely[min(bisect_left(RUNS, count), len(RUNS) - 1)]

    def _quantiles(self, level: float, unknown: float) -> tuple[float, ...]:
        return tuple(max(0.0, window.quantile(level)) if len(window) >= FEWEST else unknown for window in self._windows)

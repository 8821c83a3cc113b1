"""By how much a plan can be wrong: how much longer successive batches took than was expected of them together."""
from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import inf

from .samples import Window

RUNS = (2, 4, 8, 16)  # batches
WINDOW = 300  # runs of each length, each beginning one batch after the last
FEWEST = 50  # from which a quantile is taken, and which stay however old they are
QUANTILE = 0.99
LIKELY = 0.8   # quantile, by which what is attempted without a promise is to be in time
LATE = 0.003  # of the ticks that were promised an answer may have none in time
STEP, WIDTHS = 0.25, (0.5, 3.0)  # by how much a late one widens the margin, and how narrow and wide it can become
FIRST_WIDTH = 2.0  # a service that does not know its device yet is careful


class Overruns:
    """
    Relative overruns of runs of batches, of each of some lengths, as a high quantile.

    Where batches vary independently, a long run is relatively more certain than a short one; where the device is
    slower for a while, it is not. A batch counts with no more than its own high quantile: an interruption is another
    matter, of which a plan has one in its tail.

    The margin that is made of it is corrected by what comes of it: a late answer widens it, one in time narrows it by
    as much less that, in the long run, a share LATE is late, however batches are distributed (adaptive conformal
    inference, Gibbs and Candes 2021), as long as the margin that this needs is within WIDTHS.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float, float]] = deque(maxlen=RUNS[-1])  # the newest first
        self._windows = [Window(WINDOW, FEWEST) for _ in RUNS]
        self._factors = (0.0,) * len(RUNS)
        self._likely = (inf,) * len(RUNS)  # what was not seen is not likely
        self._width = FIRST_WIDTH

    def record(self, expected: float, high: float, seconds: float, slowness: float, now: float) -> None:
        """
        Take what was expected of a batch at its beginning, its high quantile, what it took until ``now`` [s], and how
        slow the device was taken to be: a plan was made by what was known at the beginning of its first batch.
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
        """Take what became of a promise."""
        width = self._width + STEP * ((0.0 if in_time else 1.0) - LATE)
        self._width = min(max(width, WIDTHS[0]), WIDTHS[1])

    def after(self, count: int) -> float:
        """By which part of its time a plan of so many batches may take longer."""
        return self._width * self._factors[min(bisect_left(RUNS, count), len(RUNS) - 1)]

    def likely(self, count: int) -> float:
        """By which part of its time a run of so many batches takes longer in one case of five; infinite if not known."""
        return self._likely[min(bisect_left(RUNS, count), len(RUNS) - 1)]

    def _quantiles(self, level: float, unknown: float) -> tuple[float, ...]:
        return tuple(max(0.0, window.quantile(level)) if len(window) >= FEWEST else unknown for window in self._windows)

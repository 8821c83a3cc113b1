"""What was measured of one network at one batch size, and how fast the device is at all."""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, inf

RECENT = 25  # samples of the typical time
WINDOW = 100  # samples of the high quantile
KEPT = 20  # so many of them stay however old they are
MEMORY = 3.0  # s that others count: what was long ago says little about the next batch
QUANTILE = 0.99
NEWEST = 5  # batches, of any network, that say how slow the device is: three of them decide
MATURE = 5  # samples without which a cell has no say in that
STEADY = 0.02  # relative; a smaller change of the slowness is none
EXTREME = 16.0  # times; what is slower or faster than that is left to the cells to learn


class Window:
    """The newest ``size`` values; of them only ``kept``, where the others are older than MEMORY."""

    def __init__(self, size: int, kept: int) -> None:
        self._size, self._kept = size, kept
        self._values: deque[tuple[float, float]] = deque()  # and when they came
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float, now: float) -> None:
        """Take a value that came ``now`` [s]."""
        self._values.append((value, now))
        insort(self._ordered, value)
        while len(self) > self._size or (len(self) > self._kept and self._values[0][1] < now - MEMORY):
            del self._ordered[bisect_left(self._ordered, self._values.popleft()[0])]

    def quantile(self, level: float, spared: int = 0) -> float:
        """A quantile of the values, of which the largest ``spared`` never decide."""
        return self._ordered[max(0, min(ceil(level * len(self)) - 1, len(self) - 1 - spared))]


class Cell:
    """Sliding windows of the times of one network at one batch size [s], on a device of slowness 1."""

    def __init__(self) -> None:
        self.count = 0
        self._recent, self._window = Window(RECENT, RECENT), Window(WINDOW, KEPT)

    @classmethod
    def seeded(cls, typical: float, high: float) -> Cell:
        """A cell as if it had been measured: its own samples push these out one by one."""
        cell = cls()
        for k in range(WINDOW):
            # Two of the high value, since the largest sample never decides.
            cell.add(typical if k < WINDOW - 2 else max(high, typical), -inf)
        return cell

    def add(self, seconds: float, now: float) -> None:
        """Take a duration that was measured ``now``."""
        self.count += 1
        self._recent.add(seconds, now)
        self._window.add(seconds, now)

    def typical(self) -> float:
        return self._recent.quantile(0.5)

    def high(self, quantile: float = QUANTILE) -> float:
        # One interruption among the samples says nothing about the next batch.
        return max(self._window.quantile(quantile, spared=1), self.typical())


class Speed:
    """
    How many times longer everything takes than the cells say: the median of the newest batches, each against its cell.

    A sample goes into its cell when those after it have shown whether it was interrupted, which is the cell's
    business, or the device had become slow.
    """

    def __init__(self) -> None:
        self.slowness = 1.0
        self._ratios: deque[float] = deque(maxlen=NEWEST)
        self._waiting: deque[tuple[Cell, float, float]] = deque()

    def take(self, cell: Cell, seconds: float, now: float) -> bool:
        """Take a duration of a cell, measured ``now``; return whether the slowness has changed."""
        if cell.count < MATURE:
            cell.add(seconds / self.slowness, now)
            return False
        self._ratios.append(seconds / cell.typical())
        self._waiting.append((cell, seconds, now))
        middle = sorted(self._ratios)[NEWEST // 2] if len(self._ratios) == NEWEST else self.slowness
        middle = min(max(middle, 1.0 / EXTREME), EXTREME)
        changed = abs(middle - self.slowness) > STEADY * self.slowness
        if changed:
            self.slowness = middle
        if len(self._waiting) > NEWEST // 2:
            cell, seconds, now = self._waiting.popleft()
            cell.add(seconds / self.slowness, now)
        return changed

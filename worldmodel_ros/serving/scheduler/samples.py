"""Measured times of one network at one batch size, and the current slowness of the device."""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil, inf

RECENT = 25  # samples for the typical time
WINDOW = 100  # samples for the high quantile
KEPT = 20  # of these, as many are kept however old they are
MEMORY = 3.0  # s that the others count: old samples say little about the next batch
QUANTILE = 0.99
NEWEST = 5  # batches, of any network, that give the slowness of the device: three of them decide
MATURE = 5  # samples that a cell needs before it counts for that
STEADY = 0.02  # relative; a smaller change of the slowness is ignored
EXTREME = 16.0  # times; larger changes are left to the cells to learn


class Window:
    """The newest ``size`` values, without those older than MEMORY, but at least ``kept`` of them."""

    def __init__(self, size: int, kept: int) -> None:
        self._size, self._kept = size, kept
        self._values: deque[tuple[float, float]] = deque()  # value, time
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float, now: float) -> None:
        """Add a value that came at ``now`` [s]."""
        self._values.append((value, now))
        insort(self._ordered, value)
        while len(self) > self._size or (len(self) > self._kept and self._values[0][1] < now - MEMORY):
            del self._ordered[bisect_left(self._ordered, self._values.popleft()[0])]

    def quantile(self, level: float, spared: int = 0) -> float:
        """Return a quantile of the values; it is never one of the ``spared`` largest."""
        return self._ordered[max(0, min(ceil(level * len(self)) - 1, len(self) - 1 - spared))]


class Cell:
    """Sliding windows of the times of one network at one batch size [s], on a device of slowness 1."""

    def __init__(self) -> None:
        self.count = 0
        self._recent, self._window = Window(RECENT, RECENT), Window(WINDOW, KEPT)

    @classmethod
    def seeded(cls, typical: float, high: float) -> Cell:
        """Return a cell as if it had been measured; its own samples replace these one by one."""
        cell = cls()
        for k in range(WINDOW):
            # Two of the high value, since the largest sample never decides.
            cell.add(typical if k < WINDOW - 2 else max(high, typical), -inf)
        return cell

    def add(self, seconds: float, now: float) -> None:
        """Add a duration measured at ``now``."""
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
    How many times longer everything takes than the cells say: the median ratio of the newest batches to their cells.

    A sample enters its cell only when later ones have shown whether it was interrupted, which belongs in the cell, or
    the device had become slow.
    """

    def __init__(self) -> None:
        self.slowness = 1.0
        self._ratios: deque[float] = deque(maxlen=NEWEST)
        self._waiting: deque[tuple[Cell, float, float]] = deque()

    def take(self, cell: Cell, seconds: float, now: float) -> bool:
        """Take a duration of a cell, measured at ``now``; return whether the slowness has changed."""
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

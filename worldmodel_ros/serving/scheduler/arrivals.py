"""When the next ticks are expected: background work must be done by then, and new robots go into the widest gap."""
from __future__ import annotations

import heapq
from itertools import pairwise
from collections.abc import Hashable


class Arrivals:
    """The next expected tick of each session, steady time in s."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._order = 0  # sessions need not be comparable

    def expect(self, session: Hashable, at: float) -> None:
        """Take ``at`` as the time of the session's next tick."""
        self._at[session] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, session))
        if len(self._heap) > 2 * len(self._at) + 16:  # mostly stale entries: ``next`` was not called for a while
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def forget(self, session: Hashable) -> None:
        """Drop a session's tick: it has come, or is no longer expected."""
        self._at.pop(session, None)

    def of(self, session: Hashable) -> float | None:
        """Return when the next tick of a session is expected, or None if it is not."""
        return self._at.get(session)

    def next(self, now: float, overdue: float) -> float | None:
        """Return the time of the earliest expected tick; one that is late by ``overdue`` [s] is dropped."""
        while self._heap:
            at, _, session = self._heap[0]
            if self._at.get(session) == at:
                if at + overdue > now:
                    return at
                del self._at[session]
            heapq.heappop(self._heap)
        return None

    def phase(self, period: float) -> float:
        """Return the middle of the widest gap between the expected ticks, as time modulo ``period`` [s]."""
        taken = sorted(at % period for at in self._at.values())
        if not taken:
            return 0.0
        gaps = [(after - before, before) for before, after in pairwise([*taken, taken[0] + period])]
        gap, before = max(gaps)
        return (before + 0.5 * gap) % period

"""
Which robot's ticks should come at another moment, so that more of all ticks fit in two steps.

A camera gives more images than the model takes, and so a choice of moments, one image apart. What each choice would lead to
is played through for one period with the step times as measured: what waits when the device is free is one batch, so where
a batch of several costs less than its members, ticks that come together are as good as ticks that come apart.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

SETTLE = 2.0   # s, between two offers: the robot has to come earlier, and what that changes to be seen
_GAIN = 0.1    # of the cost, that an offer must save
_MOST = 16     # sessions that are tried for one offer
_SMOOTH = 0.3  # of a tick's own phase in what is believed of its session's
_TOGETHER = 1e-4  # s, that two ticks are apart at most that come together
_PERIODS = 3   # that are played through; the last one counts


@dataclass(frozen=True)
class Rhythm:
    """When a session ticks: ``phase`` [s] in the period; ``lead`` [s], that its answers have; ``spacing`` [s] of its camera's
    images, 0 for one that gives no choice."""

    phase: float
    lead: float
    spacing: float = 0.0


def waiting_cost(rhythms: Mapping[Hashable, Rhythm], period: float, batch: Callable[[int], float], largest: int) -> float:
    """
    Return how badly ticks go together: the sum over one period of what each has of its lead needed (squared), and of 10 for
    each that is late. ``batch(n)`` [s]: what ``n`` ticks take together, at most ``largest``.
    """
    ticks = sorted((rhythm.phase + k * period, rhythm.lead, k) for rhythm in rhythms.values() for k in range(_PERIODS))
    free, cost, at = 0.0, 0.0, 0
    while at < len(ticks):
        free = max(free, ticks[at][0])
        end = at
        while end < len(ticks) and end - at < largest and ticks[end][0] <= free + _TOGETHER:
            end += 1
        # As the scheduler does, which makes no larger batch for a saving that is next to nothing.
        each = [batch(count) / count for count in range(1, end - at + 1)]
        end = at + next(count for count, one in enumerate(each, 1) if one <= 1.02 * min(each))
        free += batch(end - at)
        for arrival, lead, k in ticks[at:end]:
            if k == _PERIODS - 1:
                needed = (free - arrival) / lead
                cost += needed * needed + (10.0 if needed > 1.0 else 0.0)
        at = end
    return cost


class PhaseAdvice:
    """Learns when sessions tick, and offers one of them at a time another moment. A state machine on the time passed in."""

    def __init__(self, period: float) -> None:
        """``period`` [s] of all sessions' ticks."""
        self._period = period
        self._rhythms: dict[Hashable, Rhythm] = {}
        self._offer: tuple[Hashable, float] | None = None
        self._looked = 0.0
        self._next = 0  # who is tried first where not all are

    def ticked(self, session: Hashable, now: float, lead: float, spacing: float) -> None:
        """A session ticks ``now`` (steady, s), and has ``lead`` [s] for its answer."""
        known, phase = self._rhythms.get(session), now % self._period
        if known and abs(known.spacing - spacing) <= 0.1 * spacing:
            off = (phase - known.phase + 0.5 * self._period) % self._period - 0.5 * self._period
            # One that comes at another image has moved, and is not believed to be between the two.
            share = 1.0 if spacing and abs(off) > 0.5 * spacing else _SMOOTH
            phase = (known.phase + share * off) % self._period
        self._rhythms[session] = Rhythm(phase, max(lead, 1e-3), spacing)

    def forget(self, session: Hashable) -> None:
        """A session has ended."""
        self._rhythms.pop(session, None)

    def earlier(self, session: Hashable, now: float, batch: Callable[[int], float], largest: int) -> float:
        """Return by how much earlier [s] a session's ticks should come, from the next one on; 0: they are good as they are."""
        if now - self._looked >= SETTLE:
            self._looked, self._offer = now, self._best(batch, largest)
        if self._offer is None or self._offer[0] != session:
            return 0.0
        (_, offered), self._offer = self._offer, None
        return offered

    def _best(self, batch: Callable[[int], float], largest: int) -> tuple[Hashable, float] | None:
        costs: dict[int, float] = {}

        def taken(count: int) -> float:
            return costs.setdefault(count, batch(count))
        rhythms = self._rhythms
        best = waiting_cost(rhythms, self._period, taken, largest)
        least, found = (1.0 - _GAIN) * best, None
        sessions = list(rhythms)
        first, self._next = self._next % max(1, len(sessions)), self._next + _MOST
        for session in (sessions[first:] + sessions[:first])[:_MOST]:
            rhythm = rhythms[session]
            for images in range(1, round(self._period / rhythm.spacing) if rhythm.spacing > 0.0 else 1):
                earlier = images * rhythm.spacing
                moved = replace(rhythm, phase=(rhythm.phase - earlier) % self._period)
                cost = waiting_cost({**rhythms, session: moved}, self._period, taken, largest)
                if cost < least:
                    least, found = cost, (session, earlier)
        return found

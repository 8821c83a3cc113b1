"""
Which robot's ticks should come at another moment, so that more of all ticks fit in two steps.

A camera gives more images than the model takes, and so a choice of moments, one image apart. What each choice would lead to
is played through for a few periods with the step times as measured, unit by unit, as the scheduler would run them: where a
batch of several costs less than its members, ticks that come together are as good as ticks that come apart.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

SETTLE = 2.0   # s, between two offers: the robot has to come earlier, and what that changes to be seen
_LOOK = 2.5    # periods before an offer, in which each session's choices are tried as it ticks
_GAIN = 0.1    # of the cost, that an offer must save
_SMOOTH = 0.3  # of a tick's own phase in what is believed of its session's
_TOGETHER = 1e-4  # s, that two ticks are apart at most that come together
_LATE = 10.0   # cost of a tick that is not in time; one in time costs 1 at most
_PERIODS = 3   # that are played through; the one in the middle counts


@dataclass(frozen=True)
class Rhythm:
    """When a session ticks: ``phase`` [s] in the period; ``lead`` [s], that its answers have; ``spacing`` [s] of its camera's
    images, 0 for one that gives no choice."""

    phase: float
    lead: float
    spacing: float = 0.0


Times = Callable[[str, int], float]  # of a batch of so many units of a network [s]


def waiting_cost(rhythms: Mapping[Hashable, Rhythm], period: float, route: Sequence[str], times: Times, largest: int) -> float:
    """
    Return how badly ticks go together: the sum over one period of what each has of its lead needed (squared), and of ``_LATE``
    for each that is late. What cannot be in time any more is given up, as the scheduler does, so that ticks for which there is
    no room cost the others none. ``route``: networks that a tick passes one after the other, in batches of at most ``largest``.
    """
    coming = sorted((rhythm.phase + k * period, rhythm.lead, k) for rhythm in rhythms.values() for k in range(_PERIODS))
    waiting: list[tuple[float, float, int, int]] = []  # deadline, arrival, period, networks passed
    free, cost, at = 0.0, 0.0, 0
    rest = [sum(times(network, 1) for network in route[passed:]) for passed in range(len(route))]
    while waiting or at < len(coming):
        if not waiting:
            free = max(free, coming[at][0])
        while at < len(coming) and coming[at][0] <= free + _TOGETHER:
            arrival, lead, k = coming[at]
            waiting.append((arrival + lead, arrival, k, 0))
            at += 1
        waiting.sort()
        deadline, _, k, passed = waiting[0]
        if free + rest[passed] > deadline:
            del waiting[0]
            cost += _LATE if k == 1 else 0.0
            continue
        network = route[passed]
        batch = [tick for tick in waiting if route[tick[3]] == network][:largest]
        # As the scheduler does, which makes no larger batch for a saving that is next to nothing.
        each = [times(network, count) / count for count in range(1, len(batch) + 1)]
        batch = batch[:next(count for count, one in enumerate(each, 1) if one <= 1.02 * min(each))]
        free += times(network, len(batch))
        for tick in batch:
            waiting.remove(tick)
            deadline, arrival, k, passed = tick
            if passed + 1 < len(route):
                waiting.append((deadline, arrival, k, passed + 1))
            elif k == 1:
                needed = (free - arrival) / (deadline - arrival)
                cost += needed * needed + (_LATE if needed > 1.0 else 0.0)
    return cost


class PhaseAdvice:
    """Learns when sessions tick, and offers one of them at a time another moment. A state machine on the time passed in."""

    def __init__(self, period: float) -> None:
        """``period`` [s] of all sessions' ticks."""
        self._period = period
        self._rhythms: dict[Hashable, Rhythm] = {}
        self._found: dict[Hashable, tuple[float, float]] = {}  # what a session's best choice saves, and how much earlier it is
        self._offered = 0.0

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
        self._found.pop(session, None)

    def earlier(self, session: Hashable, now: float, route: Sequence[str], times: Times, largest: int) -> float:
        """Return by how much earlier [s] the ticks of a session that ticks now should come; 0: they are good as they are."""
        waited = now - self._offered
        if waited < SETTLE - _LOOK * self._period:
            return 0.0
        self._found[session] = saves, earlier = self._best(session, route, times, largest)
        if waited < SETTLE or not saves or saves < max(saved for saved, _ in self._found.values()):
            return 0.0
        self._offered = now
        self._found.clear()
        return earlier

    def _best(self, session: Hashable, route: Sequence[str], times: Times, largest: int) -> tuple[float, float]:
        """What the best choice of a session saves, and how much earlier it is; 0, 0 where it is as good as it can be."""
        rhythm, taken = self._rhythms[session], cache(times)
        images = range(1, round(self._period / rhythm.spacing)) if rhythm.spacing > 0.0 else ()
        cost = waiting_cost(self._rhythms, self._period, route, taken, largest) if images else 0.0
        found = 0.0, 0.0
        for earlier in (count * rhythm.spacing for count in images):
            moved = replace(rhythm, phase=(rhythm.phase - earlier) % self._period)
            saves = cost - waiting_cost({**self._rhythms, session: moved}, self._period, route, taken, largest)
            if saves > max(_GAIN * cost, found[0]):
                found = saves, earlier
        return found

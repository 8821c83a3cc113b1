"""
Which robot's ticks should come at another moment, so that more of all ticks fit in two steps.

A camera gives more images than the model takes, and so a choice of moments, one image apart. What each choice would lead to
is played through for a few periods with the step times as measured, unit by unit, as the scheduler would run them: where a
batch of several costs less than its members, ticks that come together are as good as ticks that come apart. Where ticks are
late and no session alone can mend that, two of them are moved, one after the other.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

SETTLE = 2.0   # s, between two offers: the robot has to come earlier, and what that changes to be seen
_LOOK = 2.5    # periods before an offer, in which each session's choices are tried as it ticks
_GAIN = 0.1    # of the cost, that an offer must save
_SMOOTH = 0.3  # of a tick's own phase in what is believed of its session's
_TOGETHER = 1e-4  # s, that two ticks are apart at most that come together
_LATE = 10.0   # cost of a tick that is not in time; one in time costs 1 at most
_FULL = 0.87   # of the period that ticks take, one by one: above it, what varies undoes what two moves would gain
_GONE = 20     # periods without a tick, after which a session is not one that ticks, though it may again
_PERIODS = 3   # that are played through; the one in the middle counts


@dataclass(frozen=True)
class Rhythm:
    """When a session ticks: ``phase`` [s] in the period; ``lead`` [s], that its answers have; ``spacing`` [s] of its camera's
    images, 0 for one that gives no choice."""

    phase: float
    lead: float
    spacing: float = 0.0


@dataclass(frozen=True)
class Move:
    """What it ``saves`` that a session's ticks come ``earlier`` [s], and then those of a ``partner``, if there is one."""

    saves: float = 0.0
    earlier: float = 0.0
    partner: Hashable = None
    partner_earlier: float = 0.0


@dataclass(frozen=True)
class _SecondHalf:
    """Of a move of two sessions, what is left once ``first`` has come earlier than ``phase`` by ``moved`` [s]."""

    first: Hashable
    phase: float
    moved: float
    partner: Hashable
    earlier: float


Times = Callable[[str, int], float]  # of a batch of so many units of a network [s]


def waiting_cost(rhythms: Mapping[Hashable, Rhythm], period: float, route: Sequence[str], times: Times, largest: int) -> float:
    """
    Return how badly ticks go together: the sum over one period of what each has of its lead needed (squared), and of ``_LATE``
    for each that is late. What cannot be in time any more is given up, as the scheduler does, so that ticks for which there is
    no room cost the others none. ``route``: networks that a tick passes one after the other, in batches of at most ``largest``.
    """
    coming = sorted((rhythm.phase + k * period, rhythm.lead, k) for rhythm in rhythms.values() for k in range(_PERIODS))
    waiting: list[tuple[float, float, int, int]] = []  # deadline, arrival, period, networks passed; in order
    free, cost, at, last, left = 0.0, 0.0, 0, len(route), len(rhythms)  # left: ticks that count and are not done
    rest = [sum(times(network, 1) for network in route[passed:]) for passed in range(last)]
    sizes: dict[tuple[str, int], int] = {}  # of the batch that is made where so many ticks wait for a network
    while left:  # what comes after the last tick that counts changes nothing
        if not waiting:
            free = max(free, coming[at][0])
        while at < len(coming) and coming[at][0] <= free + _TOGETHER:
            arrival, lead, k = coming[at]
            insort(waiting, (arrival + lead, arrival, k, 0))
            at += 1
        deadline, _, k, passed = waiting[0]
        if free + rest[passed] > deadline:
            del waiting[0]
            if k == 1:
                cost, left = cost + _LATE, left - 1
            continue
        network = route[passed]
        batch = [tick for tick in waiting if route[tick[3]] == network][:largest] if largest > 1 else [waiting[0]]
        size = sizes.get((network, len(batch)))
        if size is None:
            # As the scheduler does, which makes no larger batch for a saving that is next to nothing.
            each = [times(network, count) / count for count in range(1, len(batch) + 1)]
            size = next(count for count, one in enumerate(each, 1) if one <= 1.02 * min(each))
            sizes[network, len(batch)] = size
        free += times(network, size)
        for tick in batch[:size]:
            waiting.remove(tick)
            deadline, arrival, k, passed = tick
            if passed + 1 < last:
                insort(waiting, (deadline, arrival, k, passed + 1))
            elif k == 1:
                needed = (free - arrival) / (deadline - arrival)
                cost += needed * needed + (_LATE if needed > 1.0 else 0.0)
                left -= 1
    return cost


def least_cost(rhythms: Mapping[Hashable, Rhythm], route: Sequence[str], times: Times) -> float:
    """Return what ``waiting_cost`` is not below at any phases, where the time of a batch does not fall with its size."""
    work = sum(times(network, 1) for network in route) - _TOGETHER  # one that comes with another begins a little early
    return sum(min(_LATE, (max(0.0, work) / rhythm.lead) ** 2) for rhythm in rhythms.values()) - 1e-9


class PhaseAdvice:
    """Learns when sessions tick, and offers one of them at a time another moment. A state machine on the time passed in."""

    def __init__(self, period: float) -> None:
        """``period`` [s] of all sessions' ticks."""
        self._period = period
        self._rhythms: dict[Hashable, Rhythm] = {}
        self._ticked: dict[Hashable, float] = {}  # when each last did, the one that has not for longest first
        self._found: dict[Hashable, Move] = {}  # the best one of each session
        self._second: _SecondHalf | None = None
        self._offered, self._turn = 0.0, 0

    def ticked(self, session: Hashable, now: float, lead: float, spacing: float) -> None:
        """A session ticks ``now`` (steady, s), and has ``lead`` [s] for its answer."""
        known, phase = self._rhythms.get(session), now % self._period
        if known and abs(known.spacing - spacing) <= 0.1 * spacing:
            off = (phase - known.phase + 0.5 * self._period) % self._period - 0.5 * self._period
            # One that comes at another image has moved, and is not believed to be between the two.
            share = 1.0 if spacing and abs(off) > 0.5 * spacing else _SMOOTH
            phase = (known.phase + share * off) % self._period
        self._rhythms[session] = Rhythm(phase, max(lead, 1e-3), spacing)
        self._ticked.pop(session, None)
        self._ticked[session] = now
        while now - self._ticked[(longest := next(iter(self._ticked)))] > _GONE * self._period:
            self.forget(longest)  # its robot pauses, and is in the way of no other

    def forget(self, session: Hashable) -> None:
        """A session has ended, or ticks no more."""
        self._rhythms.pop(session, None)
        self._ticked.pop(session, None)
        self._found.pop(session, None)
        if self._second and session in (self._second.first, self._second.partner):
            self._second = None

    def earlier(self, session: Hashable, now: float, route: Sequence[str], times: Times, largest: int) -> float:
        """Return by how much earlier [s] the ticks of a session that ticks now should come; 0: they are good as they are."""
        waited = now - self._offered
        if self._second and session == self._second.partner and self._first_has_moved():
            earlier, self._second, self._offered = self._second.earlier, None, now
            return earlier
        if waited < SETTLE - _LOOK * self._period:
            return 0.0
        self._found[session] = move = self._best(session, route, times, largest)
        if waited < SETTLE or not move.saves or move.saves < max(other.saves for other in self._found.values()):
            return 0.0
        self._offered, self._second = now, None
        if move.partner is not None:
            self._second = _SecondHalf(session, self._rhythms[session].phase, move.earlier, move.partner, move.partner_earlier)
        self._found.clear()
        return move.earlier

    def _best(self, session: Hashable, route: Sequence[str], times: Times, largest: int) -> Move:
        """The best move of a session; one that saves nothing where it is as good as it can be."""
        taken, best = cache(times), Move()

        def cost(moved: Mapping[Hashable, Rhythm]) -> float:
            return waiting_cost({**self._rhythms, **moved}, self._period, route, taken, largest)
        choices = self._choices(session)
        now = cost({}) if choices else 0.0
        # Where ticks go so well together that no phases could save enough, as they mostly do, none is tried.
        worth = now - least_cost(self._rhythms, route, taken) > _GAIN * now
        for earlier, rhythm in choices if worth else ():
            saves = now - cost({session: rhythm})
            if saves > max(_GAIN * now, best.saves):
                best = Move(saves, earlier)
        work = len(self._rhythms) * sum(taken(network, 1) for network in route)
        if not best.saves and now > _LATE and work <= _FULL * self._period:
            best = self._best_pair(session, choices, now, cost)
        return best

    def _best_pair(self, session: Hashable, choices: list[tuple[float, Rhythm]], now: float,
                   cost: Callable[[Mapping[Hashable, Rhythm]], float]) -> Move:
        """The best move of a session together with another one's, of which each call tries one, in turn; only one after which
        nothing is late: moving two for less costs answers while they move."""
        others, best = [each for each in self._rhythms if each != session], Move()
        if not others:
            return best
        self._turn += 1
        partner = others[self._turn % len(others)]
        for earlier, rhythm in choices:
            for partner_earlier, moved in self._choices(partner):
                saves = now - cost({session: rhythm, partner: moved})
                if saves > best.saves and now - saves < _LATE:
                    best = Move(saves, earlier, partner, partner_earlier)
        return best

    def _choices(self, session: Hashable) -> list[tuple[float, Rhythm]]:
        """By how much earlier a session's ticks could come [s], and when they would then."""
        rhythm = self._rhythms[session]
        images = range(1, round(self._period / rhythm.spacing)) if rhythm.spacing > 0.0 else ()
        return [(count * rhythm.spacing, replace(rhythm, phase=(rhythm.phase - count * rhythm.spacing) % self._period))
                for count in images]

    def _first_has_moved(self) -> bool:
        second, rhythm = self._second, self._rhythms[self._second.first]
        moved = (second.phase - rhythm.phase + 0.5 * rhythm.spacing) % self._period - 0.5 * rhythm.spacing
        return abs(moved - second.moved) < 0.5 * rhythm.spacing

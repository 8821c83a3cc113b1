"""
Decides which robot should tick at another moment, so that more of all ticks fit in two steps.

A camera gives more images than the model takes, and so a choice of moments, one image apart. Each choice is simulated for a
few periods with the measured step times, unit by unit, as the scheduler would run them: where a batch of several costs less
than its members, ticks that coincide are as good as ticks apart. Where ticks are late and moving no single session fixes
that, two are moved, one after the other.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

SETTLE = 2.0   # s between two offers: time for the robot to move, and for the effect to show
_LOOK = 2.5    # periods before an offer in which each session's choices are tried as it ticks
_GAIN = 0.1    # fraction of the cost that an offer must save
_SMOOTH = 0.3  # weight of a new tick's phase in its session's smoothed phase
_TOGETHER = 1e-4  # s that two ticks may be apart and still coincide
_LATE = 10.0   # cost of a tick that is not in time; one in time costs 1 at most
_FULL = 0.87   # fraction of the period that ticks take, one by one; above it, variation undoes the gain of two moves
_GONE = 20     # periods without a tick after which a session is dropped until it ticks again
_PERIODS = 3   # simulated; the middle one counts


@dataclass(frozen=True)
class Rhythm:
    """When a session ticks: ``phase`` [s] in the period; ``lead`` [s], the time for its answers; ``spacing`` [s] of its
    camera's images, 0 for one that gives no choice."""

    phase: float
    lead: float
    spacing: float = 0.0


@dataclass(frozen=True)
class Move:
    """The cost that is saved if a session's ticks come ``earlier`` [s], and then those of a ``partner``, if there is one."""

    saves: float = 0.0
    earlier: float = 0.0
    partner: Hashable = None
    partner_earlier: float = 0.0


@dataclass(frozen=True)
class _SecondHalf:
    """The rest of a move of two sessions, due once ``first`` has come earlier than ``phase`` by ``moved`` [s]."""

    first: Hashable
    phase: float
    moved: float
    partner: Hashable
    earlier: float


Times = Callable[[str, int], float]  # (network, batch size) -> time of a batch [s]


def waiting_cost(rhythms: Mapping[Hashable, Rhythm], period: float, route: Sequence[str], times: Times, largest: int) -> float:
    """
    Return the cost of the ticks of one period: for each, the square of the fraction of its lead that it needs, plus ``_LATE``
    if it is late. Ticks that can no longer be in time are given up, as the scheduler does, so that they cost the others no
    time. ``route``: the networks that a tick passes one after the other, in batches of at most ``largest``.
    """
    coming = sorted((rhythm.phase + k * period, rhythm.lead, k) for rhythm in rhythms.values() for k in range(_PERIODS))
    waiting: list[tuple[float, float, int, int]] = []  # deadline, arrival, period, networks passed; in order
    free, cost, at, last, left = 0.0, 0.0, 0, len(route), len(rhythms)  # left: counted ticks that are not done
    rest = [sum(times(network, 1) for network in route[passed:]) for passed in range(last)]
    sizes: dict[tuple[str, int], int] = {}  # batch size by network and number of waiting ticks
    while left:  # later ticks change nothing
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
            # As the scheduler does, which makes no larger batch for a negligible saving.
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
    """Return a lower bound of ``waiting_cost`` over all phases, given that batch times do not fall with the size."""
    work = sum(times(network, 1) for network in route) - _TOGETHER  # coinciding ticks may begin a little early
    return sum(min(_LATE, (max(0.0, work) / rhythm.lead) ** 2) for rhythm in rhythms.values()) - 1e-9


class PhaseAdvice:
    """Learns when sessions tick, and offers another moment to one at a time. A state machine on the time passed in."""

    def __init__(self, period: float) -> None:
        """``period`` [s] of all sessions' ticks."""
        self._period = period
        self._rhythms: dict[Hashable, Rhythm] = {}
        self._ticked: dict[Hashable, float] = {}  # time of each session's last tick, oldest first
        self._found: dict[Hashable, Move] = {}  # best move of each session
        self._second: _SecondHalf | None = None
        self._offered, self._turn = 0.0, 0

    def ticked(self, session: Hashable, now: float, lead: float, spacing: float) -> None:
        """Record a session's tick at ``now`` (steady, s), with ``lead`` [s] for its answer."""
        known, phase = self._rhythms.get(session), now % self._period
        if known and abs(known.spacing - spacing) <= 0.1 * spacing:
            off = (phase - known.phase + 0.5 * self._period) % self._period - 0.5 * self._period
            # A tick at another image is a move: do not average the two phases.
            share = 1.0 if spacing and abs(off) > 0.5 * spacing else _SMOOTH
            phase = (known.phase + share * off) % self._period
        self._rhythms[session] = Rhythm(phase, max(lead, 1e-3), spacing)
        self._ticked.pop(session, None)
        self._ticked[session] = now
        while now - self._ticked[(longest := next(iter(self._ticked)))] > _GONE * self._period:
            self.forget(longest)  # its robot pauses

    def forget(self, session: Hashable) -> None:
        """Drop a session that has ended or no longer ticks."""
        self._rhythms.pop(session, None)
        self._ticked.pop(session, None)
        self._found.pop(session, None)
        if self._second and session in (self._second.first, self._second.partner):
            self._second = None

    def earlier(self, session: Hashable, now: float, route: Sequence[str], times: Times, largest: int) -> float:
        """Return by how much earlier [s] the ticks of a session that ticks now should come; 0: no move is offered."""
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
        """Return the best move of a session; one that saves nothing if no move is worth it."""
        taken, best = cache(times), Move()

        def cost(moved: Mapping[Hashable, Rhythm]) -> float:
            return waiting_cost({**self._rhythms, **moved}, self._period, route, taken, largest)
        choices = self._choices(session)
        now = cost({}) if choices else 0.0
        # Mostly, no phases could save enough; then none are tried.
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
        """Return the best joint move of a session and a partner, another one at each call; only moves after which nothing is
        late: a pair that gains less is not worth the answers lost while it moves."""
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
        """Return by how much earlier a session's ticks could come [s], with the resulting rhythm."""
        rhythm = self._rhythms[session]
        images = range(1, round(self._period / rhythm.spacing)) if rhythm.spacing > 0.0 else ()
        return [(count * rhythm.spacing, replace(rhythm, phase=(rhythm.phase - count * rhythm.spacing) % self._period))
                for count in images]

    def _first_has_moved(self) -> bool:
        second, rhythm = self._second, self._rhythms[self._second.first]
        moved = (second.phase - rhythm.phase + 0.5 * rhythm.spacing) % self._period - 0.5 * rhythm.spacing
        return abs(moved - second.moved) < 0.5 * rhythm.spacing

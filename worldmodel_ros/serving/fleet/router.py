"""
Decides which server runs which session. A state machine on the time passed in: no thread, no clock, no network.

A session's pages are where it ran last, so it stays there (a claim) until it is moved, or its server is lost. A placement
considers, in this order: whether all ticks of a server would still be in time, whether the server has the session's pages,
whether its other sessions tick at other moments, and its load. ``fleet.move`` moves the sessions.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

PHASES = 32       # parts of a period in which ticks are counted
_EMPTY = frozenset()


@dataclass(frozen=True)
class Claim:
    """A session on a server: ``generation`` increases with every owner, ``lease`` [s] is when it ends unless renewed."""

    session: Hashable
    server: int
    generation: int
    lease: float


@dataclass(frozen=True)
class Demand:
    """What a session needs: a tick every ``period`` s, which takes a server of speed 1 ``cost`` s, at a ``phase`` [0, 1) of
    the period. ``resident``: servers that have its pages. ``transfer`` [s]: the time that another one takes to read them.
    ``only``: servers that it can go to; None: all."""

    cost: float
    period: float = 0.1
    phase: float = 0.0
    resident: frozenset[int] = _EMPTY
    transfer: float = 0.0
    only: frozenset[int] | None = None


@dataclass(frozen=True)
class RouterSettings:
    """
    ``lease`` [s]. ``full``: fraction of a server's time beyond which nothing is placed there. ``blocking`` [s]: by how much
    other sessions' ticks at the same moment may delay one. ``high`` and ``low``: loads above which sessions are moved away,
    and below which a server takes them (hysteresis). ``transfer``, ``phase``, ``load``: weights of a second of transfer, of
    waiting at the same moment, and of a server's time.
    """

    lease: float = 5.0
    full: float = 0.85
    blocking: float = 0.025
    high: float = 0.9
    low: float = 0.7
    transfer: float = 1.0
    phase: float = 4.0
    load: float = 0.05


class NoRoom(RuntimeError):
    """No server can take a session and be in time; its robot drives with its own model."""


class Router:
    """Claims of all sessions, and the state of the servers, numbered 0 to n - 1."""

    def __init__(self, speeds: Sequence[float], racks: Sequence[int] | None = None,
                 settings: RouterSettings = RouterSettings(), sessions: int | None = None) -> None:
        """``speeds``: of each server. ``racks``: where it is; ``sessions``: that one has memory for, None: any number."""
        self.settings = settings
        self._slowness = 1.0 / np.asarray(speeds, np.float64)
        self._rack = np.zeros(len(speeds), np.int64) if racks is None else np.asarray(racks)
        self._alive = np.ones(len(speeds), bool)
        self._open = np.ones(len(speeds), bool)  # takes new sessions; false while it is emptied
        self._busy = np.zeros(len(speeds))       # fraction of its time that its sessions need
        self._count = [0] * len(speeds)
        self._most = [math.inf if sessions is None else sessions] * len(speeds)
        self._takes = np.array([most > 0 for most in self._most], bool)  # sessions: it is there, open, and has memory
        # The part of a placement's cost that depends on the server alone: infinite if it takes none. Cached, so that the
        # cheapest server is found in four array operations.
        self._base = np.where(self._takes, 0.0, math.inf)
        self._costs = np.zeros(len(speeds))
        self._speed = [float(each) for each in self._slowness]
        self._waits = np.zeros((PHASES, len(speeds)))  # s of work that comes in each part of a period
        self._claims: dict[Hashable, Claim] = {}
        self._demands: dict[Hashable, Demand] = {}
        self._generations: dict[Hashable, int] = {}  # the highest of each session that had a claim
        self._of: list[dict[Hashable, None]] = [{} for _ in speeds]  # sessions of each server, the oldest first

    @property
    def load(self) -> np.ndarray:
        """Fraction of each server's time that its sessions need."""
        return self._busy.copy()

    @property
    def alive(self) -> np.ndarray:
        """Whether each server is there, bool."""
        return self._alive.copy()

    @property
    def takes(self) -> np.ndarray:
        """Whether each server is there, takes sessions, and has memory for another one, bool."""
        return self._takes.copy()

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, session: Hashable) -> Claim | None:
        """Return the claim of a session, if it has one."""
        return self._claims.get(session)

    def sessions(self, server: int) -> list[Hashable]:
        """Return the sessions of a server, oldest first."""
        return list(self._of[server])

    def route(self, session: Hashable, demand: Demand, now: float) -> Claim:
        """
        Return the claim by which a session continues: its present one, or a new one with the next generation.

        Raises NoRoom.
        """
        claim = self._claims.get(session)
        if claim is not None and claim.lease >= now and self._alive[claim.server]:
            return claim
        if claim is not None:
            self.release(session)
        return self._place(session, demand, now)

    def renew(self, session: Hashable, generation: int, now: float) -> bool:
        """Renew the claim of a server that still runs a session; return False if the session has another owner by now."""
        claim = self._claims.get(session)
        if claim is None or claim.generation != generation:
            return False
        self._claims[session] = replace(claim, lease=now + self.settings.lease)
        return True

    def release(self, session: Hashable) -> None:
        """Drop the claim of a session that has ended, or is on no server for now."""
        claim = self._claims.pop(session)
        self._of[claim.server].pop(session)
        self._count_in(claim.server, self._demands.pop(session), -1)

    def move(self, session: Hashable, now: float, away: bool = True, only: frozenset[int] | None = None) -> Claim:
        """Place a session on another server, with the next generation, as if it came now. ``only``: on one of these. Raises
        NoRoom, and leaves it where it is."""
        claim, demand = self._claims[session], self._demands[session]
        self.release(session)
        try:
            return self._place(session, demand if only is None else replace(demand, only=only), now,
                               claim.server if away else None)
        except NoRoom:
            self._take(claim, demand)
            raise

    def lose(self, servers: Iterable[int]) -> list[Hashable]:
        """Mark servers as gone; return their sessions, which must be routed again."""
        lost = []
        for server in servers:
            sessions = self.sessions(server)
            for session in sessions:
                self.release(session)
            self._alive[server] = self._takes[server] = False
            self._base[server] = math.inf
            lost += sessions
        return lost

    def lose_rack(self, rack: int) -> list[Hashable]:
        """As ``lose``, for a whole rack."""
        return self.lose(np.flatnonzero((self._rack == rack) & self._alive).tolist())

    def restore(self, server: int, speed: float | None = None, sessions: int | None = None) -> None:
        """
        Mark a server as there again, empty, or as taking sessions again. ``speed``, ``sessions``: its speed and the number of
        sessions that it has memory for now; None: as before. Raises ValueError for a speed that changes while it has
        sessions, or is invalid.
        """
        if speed is not None:
            if not 0.0 < speed < math.inf or self._of[server]:
                raise ValueError(f'server {server} with {len(self._of[server])} sessions cannot have the speed {speed}')
            self._slowness[server] = self._speed[server] = 1.0 / speed
        if sessions is not None:
            self._most[server] = sessions
        self._alive[server] = self._open[server] = True
        self._takes[server] = self._count[server] < self._most[server]
        self._rate(server)

    def drain(self, server: int) -> list[Hashable]:
        """Let a server take no more sessions; return those that must be moved away before it is ended."""
        self._open[server] = self._takes[server] = False
        self._base[server] = math.inf
        return self.sessions(server)

    def overloaded(self, but: Set[Hashable] = _EMPTY) -> list[tuple[Hashable, int]]:
        """Return sessions to move, and from where, so that no server is above ``high``: the newest that are not in ``but``, as
        long as others are below ``low``."""
        settings, moves = self.settings, []
        room = float(np.clip(settings.low - self._busy[self._alive & self._open], 0.0, None).sum())
        for server in np.flatnonzero((self._busy > settings.high) & self._alive):
            busy = self._busy[server]
            for session in reversed(self._of[server]):
                if busy <= settings.high:
                    break
                if session in but:
                    continue
                share = self._share(server, self._demands[session])
                if room < share:
                    return moves
                busy, room = busy - share, room - share
                moves.append((session, int(server)))
        return moves

    def claims_of(self, claims: Iterable[tuple[Claim, Demand]]) -> None:
        """
        Adopt the claims that servers report, as after this router was lost. Of two that claim one session, the one with the
        higher generation has it; of equals, the later one, since a store gives a generation to one server only. The server that
        a session was placed on knows its generation: the router's is a guess, too high if a placement or move came to nothing.
        """
        for claim, demand in claims:
            known = self._claims.get(claim.session)
            if known is not None:
                is_there = known.server == claim.server
                if known.generation == claim.generation if is_there else known.generation > claim.generation:
                    continue
                self.release(claim.session)
            self._take(claim, demand)

    def _place(self, session: Hashable, demand: Demand, now: float, but: int | None = None) -> Claim:
        waits = self._waits[int(demand.phase * PHASES) % PHASES]
        server = self._cheapest(demand, waits, but)
        if server is None:
            server = choose(self.settings, self._takes, self._busy, self._slowness, waits, demand, but)
        if server is None:
            raise NoRoom(f'no server has {demand.cost * 1e3:.1f} ms of each {demand.period * 1e3:.0f} ms left')
        claim = Claim(session, server, self._generations.get(session, 0) + 1, now + self.settings.lease)
        self._take(claim, demand)
        return claim

    def _cheapest(self, demand: Demand, waits: np.ndarray, but: int | None) -> int | None:
        """Return what ``choose`` would choose if all servers were feasible; None if that one is not."""
        settings, costs = self.settings, self._costs
        share = demand.cost / demand.period
        np.multiply(self._slowness, settings.load * share, out=costs)
        costs += self._base
        costs += settings.phase * waits
        for server in demand.resident:
            costs[server] -= settings.transfer * demand.transfer
        if but is not None:
            costs[but] = math.inf
        server = int(costs.argmin())
        feasible = (self._takes[server] and server != but and waits[server] <= settings.blocking
                    and self._busy[server] + self._speed[server] * share <= settings.full
                    and (demand.only is None or server in demand.only))
        return server if feasible else None

    def _rate(self, server: int) -> None:
        self._base[server] = self.settings.load * self._busy[server] if self._takes[server] else math.inf

    def _take(self, claim: Claim, demand: Demand) -> None:
        self._claims[claim.session], self._demands[claim.session] = claim, demand
        self._generations[claim.session] = max(claim.generation, self._generations.get(claim.session, 0))
        self._of[claim.server][claim.session] = None
        self._count_in(claim.server, demand, 1)

    def _count_in(self, server: int, demand: Demand, sign: int) -> None:
        self._count[server] += sign
        self._takes[server] = self._alive[server] and self._open[server] and self._count[server] < self._most[server]
        phase, work = int(demand.phase * PHASES) % PHASES, demand.cost * self._speed[server]
        self._busy[server] += sign * work / demand.period
        self._rate(server)
        # Ticks that come within the duration of this one wait for it.
        reach = min(PHASES // 2 - 1, int(work / demand.period * PHASES))
        waits, work = self._waits, sign * work
        for part in range(phase - reach, phase + reach + 1):
            waits[part % PHASES, server] += work

    def _share(self, server: int, demand: Demand) -> float:
        return demand.cost * self._speed[server] / demand.period


def choose(settings: RouterSettings, takes: np.ndarray, busy: np.ndarray, slowness: np.ndarray, waits: np.ndarray,
           demand: Demand, but: int | None = None) -> int | None:
    """
    Return the server for a session, of those that take one (``takes``, bool); None if it would be late on each.

    ``busy``, ``slowness`` (1 / speed): of each server; ``waits`` [s]: how long a tick at the session's phase waits there for
    others'. A server is feasible if all its ticks fit into its time up to ``full``, and the session's own waits no longer than
    ``blocking``; the cheapest feasible one is taken.
    """
    after = busy + slowness * (demand.cost / demand.period)
    feasible = takes & (after <= settings.full) & (waits <= settings.blocking)
    if but is not None:
        feasible[but] = False
    if demand.only is not None:
        feasible &= np.isin(np.arange(len(feasible)), list(demand.only))
    cost = settings.load * after + settings.phase * waits
    for server in demand.resident:  # all others have to wait for the transfer
        cost[server] -= settings.transfer * demand.transfer
    server = int(np.where(feasible, cost, np.inf).argmin())
    return server if feasible[server] else None


def fallback(session: str, servers: Sequence[str]) -> list[str]:
    """
    Return servers in the order in which a robot tries them while no router can be asked (rendezvous hashing, Thaler and
    Ravishankar 1998): every robot and server computes the same order, and if one is gone, only its sessions go elsewhere.
    """
    return sorted(servers, key=lambda server: hashlib.blake2b(f'{session}\0{server}'.encode(), digest_size=8).digest())

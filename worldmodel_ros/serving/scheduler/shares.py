"""Device time used by each robot: one that has used more than its share goes after the others."""
from __future__ import annotations

from dataclasses import dataclass
from collections.abc import Hashable

ACTIVE = 1.0     # s after its last request for which an account still counts
LONGEST = 1.0    # s by which a deadline is postponed at most: time used while no other robot wanted it is forgiven
_KEPT = 64       # accounts, before those without debt are dropped


@dataclass
class _Account:
    debt: float = 0.0  # device time used beyond the share [s]; negative: saved
    at: float = 0.0    # when ``debt`` was last updated
    seen: float = 0.0


class Shares:
    """
    A budget of device time for each account (one session, or several in common), after the constant bandwidth server
    of Abeni and Buttazzo, "Integrating Multimedia Applications in Hard Real-Time Systems" (RTSS 1998).

    An account's bandwidth is ``share`` of the device's time, or an equal part for each account with a request within the
    last ACTIVE s, whichever is less (``share`` 0: the equal part). Its budget refills at that rate, up to ``period`` [s]
    worth, and is charged with the device time it was served. Once it is exhausted, the next deadline is postponed by the
    time it takes to refill. So an account that always claims the earliest deadline gets its share and what others leave,
    and no more. Branches of questions are ordered by the postponed deadlines; ticks, which are promised an answer on
    arrival, are admitted by them (``ticks.py``).
    """

    def __init__(self, share: float, period: float, longest: float = LONGEST) -> None:
        """``longest``: the most by which a deadline is postponed [s]."""
        self._share, self._period, self._longest = share, period, longest
        self._accounts: dict[Hashable, _Account] = {}

    def postponement(self, account: Hashable, now: float) -> float:
        """Record a request of an account; return by how much its deadline is postponed [s]."""
        if account not in self._accounts and len(self._accounts) >= _KEPT:
            self._forget(now)
        self._accounts.setdefault(account, _Account(at=now)).seen = now
        part = self._part(now)
        return max(0.0, self._settled(account, now, part).debt) / part

    def charge(self, account: Hashable, seconds: float, now: float) -> float:
        """Charge device time [s] to the budget of an account; negative: refund it. Return what was charged: the debt is
        bounded, and no more than that may be refunded."""
        if account not in self._accounts:
            return 0.0
        part = self._part(now)
        owing = self._settled(account, now, part)
        room = max(0.0, part * self._longest - owing.debt)
        owing.debt = min(owing.debt + seconds, part * self._longest)
        return min(seconds, room)

    def _part(self, now: float) -> float:
        """Return the bandwidth of each account, 0 to 1."""
        equal = 1.0 / max(1, sum(now - each.seen <= ACTIVE for each in self._accounts.values()))
        return min(self._share or 1.0, equal)

    def _settled(self, account: Hashable, now: float, part: float) -> _Account:
        owing = self._accounts[account]
        owing.debt = max(-part * self._period, owing.debt - part * max(0.0, now - owing.at))
        owing.at = now
        return owing

    def _forget(self, now: float) -> None:
        part = self._part(now)
        self._accounts = {account: each for account, each in self._accounts.items()
                          if now - each.seen <= ACTIVE or self._settled(account, now, part).debt > 0.0}

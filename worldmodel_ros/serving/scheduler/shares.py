"""How much of the device's time each robot has used: one that has used more than its share goes after the others."""
from __future__ import annotations

from dataclasses import dataclass
from collections.abc import Hashable

ACTIVE = 1.0     # s after its last request, for which an account still has a part of the device
LONGEST = 1.0    # s by which a deadline is postponed at most: what was used while no other robot wanted it is forgotten
_KEPT = 64       # accounts, before those that owe nothing are forgotten


@dataclass
class _Account:
    debt: float = 0.0  # device time used beyond the share [s]; negative: saved
    at: float = 0.0    # when that was worked out
    seen: float = 0.0


class Shares:
    """
    A budget of device time for each account (a session, or what its sessions have in common), after the constant
    bandwidth server of Abeni and Buttazzo, "Integrating Multimedia Applications in Hard Real-Time Systems" (RTSS 1998).

    Every account has a bandwidth: ``share`` of the device's time, or an equal part of it for each account that has asked
    for something within ACTIVE, whichever is less (0: the equal part). Its budget is filled at that rate, up to what
    ``period`` [s] gives, and is charged with the time of what it was served. Where the budget is exhausted, what comes
    next is postponed by the time that fills it again. So an account that always claims the earliest deadline gets its
    share and what others leave, and no more. Branches of questions are ordered by the postponed deadlines; ticks, to
    whom promises are made at their arrival, are admitted by them (ticks.py).
    """

    def __init__(self, share: float, period: float, longest: float = LONGEST) -> None:
        """``longest``: by which a deadline is postponed at most [s]."""
        self._share, self._period, self._longest = share, period, longest
        self._accounts: dict[Hashable, _Account] = {}

    def postponement(self, account: Hashable, now: float) -> float:
        """Note that an account asks for something; return by how much its deadline is postponed [s]."""
        if account not in self._accounts and len(self._accounts) >= _KEPT:
            self._forget(now)
        self._accounts.setdefault(account, _Account(at=now)).seen = now
        part = self._part(now)
        return max(0.0, self._settled(account, now, part).debt) / part

    def charge(self, account: Hashable, seconds: float, now: float) -> None:
        """Take device time from the budget of an account, or give it back."""
        if account in self._accounts:
            part = self._part(now)
            owing = self._settled(account, now, part)
            owing.debt = min(owing.debt + seconds, part * self._longest)

    def _part(self, now: float) -> float:
        """Bandwidth of each account, 0 to 1."""
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

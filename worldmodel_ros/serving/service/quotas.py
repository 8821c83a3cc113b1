"""Limits on what one robot may ask of a shared service: how often, and how soon."""
from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from collections.abc import Hashable

TICKS_SAVED, QUESTIONS_SAVED = 0.5, 4.0  # s of a quota that may be used in one burst after a pause
_KEPT = 256                              # accounts, before those with full buckets are dropped


@dataclass(frozen=True)
class Quotas:
    """
    Of one robot; 0 is no limit. ``ticks`` and ``questions`` per second. ``shortest_due`` [s]: a tick that is due sooner
    after its arrival is refused, since its deadline cannot be met.

    Its share of the device's time is limited by the scheduler: ``Settings.share``.
    """

    ticks: float = 0.0
    questions: float = 0.0
    shortest_due: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid quota."""
        for name, value in vars(self).items():
            if not isfinite(value) or value < 0.0:
                raise ValueError(f'{name} is {value}: it must be a number, 0 (no limit) or more')


class TokenBuckets:
    """A token bucket for each account: filled at ``rate`` per second, up to ``saved`` s worth, but at least one token."""

    def __init__(self, rate: float, saved: float) -> None:
        """``rate`` 0: no limit."""
        self.rate, self._full = rate, max(1.0, rate * saved)
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # tokens, and the time of that count

    def take(self, account: Hashable, now: float, count: int = 1) -> float:
        """
        Take ``count`` tokens and return 0; if there are too few, take none, and return the time until there are enough [s].
        More than a bucket holds are taken from a full one, which then lacks the rest. A negative ``count`` gives tokens back.
        """
        if not self.rate:
            return 0.0
        if account not in self._buckets and len(self._buckets) >= _KEPT:
            self._buckets = {each: bucket for each, bucket in self._buckets.items()
                             if self._tokens(bucket, now) < self._full}
        tokens = self._tokens(self._buckets.get(account, (self._full, now)), now)
        needed = min(count, self._full)
        if tokens >= needed:
            tokens -= count
            wait = 0.0
        else:
            wait = (needed - tokens) / self.rate
        self._buckets[account] = tokens, now
        return wait

    def _tokens(self, bucket: tuple[float, float], now: float) -> float:
        tokens, at = bucket
        return min(self._full, tokens + self.rate * max(0.0, now - at))

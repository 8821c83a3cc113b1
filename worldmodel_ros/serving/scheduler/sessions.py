"""What the scheduler remembers of a session: its order, its open requests, and the best tier it may have now."""
from __future__ import annotations

from collections.abc import Hashable

from .jobs import Job
from .work import Request, Tier


class SessionRecord:
    """
    `sequence`: of its newest tick. `current`: its open tick, `held` the one that waits until that has ended. `jobs`:
    all its open requests.

    Its best tier goes down as soon as a better one does not fit, and up by one after `recovery_ticks` ticks in a
    row that were in time, with room to spare for the better tier: what flickers is worse than what is plain.
    """

    def __init__(self, recovery_ticks: int) -> None:
        self.sequence: int | None = None
        self.current: Job | None = None
        self.held: Job | None = None
        self.jobs: dict[Hashable, Job] = {}
        self._recovery_ticks = recovery_ticks
        self._best = Tier.TWO_STEP
        self._streak = 0

    def tiers(self, request: Request) -> list[Tier]:
        """Return the tiers that may be tried, best first; there is always one."""
        tiers = sorted(request.routes)
        return [tier for tier in tiers if tier >= self._best] or tiers[-1:]

    def fell(self, tier: Tier) -> None:
        """Nothing better than `tier` fitted."""
        if tier > self._best:
            self._best = tier
            self._streak = 0

    def refused(self, tier: Tier) -> None:
        """Not even `tier`, the last one, fitted."""
        self._best, self._streak = tier, 0

    def ended(self, job: Job, met: bool) -> None:
        """A tick has ended that was begun, or should have been."""
        self._streak = self._streak + 1 if met and job.headroom else 0
        better = [tier for tier in job.request.routes if tier < self._best]
        if better and self._streak >= self._recovery_ticks:
            self._best = max(better)
            self._streak = 0

    def recovering(self) -> str:
        """Say why the best tier was not tried."""
        return f'in time with room to spare for {self._streak} of {self._recovery_ticks} ticks'

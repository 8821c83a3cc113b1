"""The scheduler's record of a session: its newest sequence, its open requests, and the best tier it may have now."""
from __future__ import annotations

from collections.abc import Hashable

from worldmodel_ros.control.ladder import Recovery
from .jobs import Job
from .work import Request, Tier


class SessionRecord:
    """
    ``sequence``: of its newest tick. ``current``: its open tick; ``held``: the tick waiting for that one to end. ``jobs``:
    all its open requests.

    Its best tier goes down as soon as a better one does not fit, and up by one after ``recovery_ticks`` good ticks.
    """

    def __init__(self, recovery_ticks: int) -> None:
        self.sequence: int | None = None
        self.current: Job | None = None
        self.held: Job | None = None
        self.jobs: dict[Hashable, Job] = {}
        self._recovery_ticks, self._recovery = recovery_ticks, Recovery()

    def tiers(self, request: Request) -> list[Tier]:
        """Return the tiers that may be tried, best first; there is always one."""
        tiers = sorted(request.routes)
        return [tier for tier in tiers if tier >= self._recovery.best] or tiers[-1:]

    def fell(self, tier: Tier) -> None:
        """Note that nothing better than ``tier`` fitted."""
        if tier > self._recovery.best:
            self._recovery.allow(tier)

    def refused(self, tier: Tier) -> None:
        """Note that not even ``tier``, the last one, fitted."""
        self._recovery.allow(tier)

    def ended(self, job: Job, met: bool) -> None:
        """Note the end of a tick that was begun, or should have been."""
        self._recovery.ended(met and job.headroom)
        better = [tier for tier in job.request.routes if tier < self._recovery.best]
        if better:
            self._recovery.climb(max(better), self._recovery_ticks)

    def recovering(self) -> str:
        """Return why the best tier was not tried."""
        return f'in time with room to spare for {self._recovery.streak} of {self._recovery_ticks} ticks'

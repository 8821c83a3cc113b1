"""Background work: what-if branches and idle work, in the gaps between ticks."""
from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf

from .arrivals import Arrivals
from .jobs import Job, Place, Queues, dequeue, enqueue
from .plan import Planner, network_of
from .settings import Settings
from .shares import Shares
from .step_table import StepTable
from .work import Kind, Request

LONGEST = 10.0  # s that a branch is postponed at most, behind earlier ones of its robot


class Background:
    """
    What-if branches are ordered by deadline and idle work by age, on one time scale: both move up as time goes by, so
    neither can starve. The deadlines of branches are postponed where their robot asks for more than its share of the
    device (``shares.py``), so that its questions leave room for those of others.

    A batch is begun only if, by its high quantile, it delays no expected tick by more than ``settings.blocking``. Where
    every gap is too short for that, one is begun anyway after its typical time divided by ``settings.background_share``,
    and after ``settings.longest_wait`` at the latest. Where ticks are refused and none has been admitted for
    ``settings.starving``, units run back to back: no request is kept waiting, and only measurements can show that the
    device has time.
    """

    def __init__(self, table: StepTable, planner: Planner, settings: Settings, arrivals: Arrivals) -> None:
        self._table, self._planner, self._settings, self._arrivals = table, planner, settings, arrivals
        self._shares = Shares(settings.share, settings.share_period, LONGEST)
        self._queues: Queues = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._since = inf  # when a queued unit was last begun, or the first one queued
        self._refusing = inf  # since when ticks have been refused, and none admitted

    def key(self, request: Request) -> float:
        """Return the sort key of a request [s]."""
        if request.kind is Kind.WHAT_IF:
            return request.deadline
        return request.arrival + self._settings.idle_patience

    def submit(self, job: Job, now: float) -> None:
        """Queue a new job."""
        if job.request.kind is Kind.WHAT_IF:
            # Charged at once, so that the next branch is ordered behind it even while both wait.
            job.key += self._shares.postponement(job.account, now)
            job.charged = self._shares.charge(job.account, job.work, now)
        self.wait(job, now)
        if job.request.deadline < inf:
            heapq.heappush(self._deadlines, (job.request.deadline, job.order, job))

    def wait(self, job: Job, now: float) -> None:
        """Queue a job for its next unit."""
        if not self._queues:
            self._since = now
        enqueue(self._queues, job, job.position)

    def remove(self, job: Job, now: float) -> None:
        """Remove a job that has ended."""
        dequeue(self._queues, job)
        if job.request.kind is Kind.WHAT_IF and job.begun < len(job.route):
            left = sum(self._table.typical(unit.network, 1) for unit in job.route[job.begun:])
            self._shares.charge(job.account, -min(left, job.charged), now)

    def answered(self, admitted: bool, now: float) -> None:
        """Note that a tick was admitted, or refused."""
        self._refusing = inf if admitted else min(self._refusing, now)

    def expired(self, now: float) -> Iterator[Job]:
        """Yield the open jobs whose deadline has passed."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].outcome):
            job = heapq.heappop(self._deadlines)[2]
            if job.outcome is None:
                yield job

    def draw(self, now: float, slack: float) -> tuple[list[Place], float, float] | None:
        """
        Return the places of the next batch and its typical and high time [s], or None if none may begin now.

        ``slack``: how much longer the waiting ticks can wait [s], infinite if there are none.
        """
        if not self._queues:
            return None
        labels = sorted(self._queues, key=lambda name: self._queues[name][0])
        if now >= self._forced(labels[0]):
            del labels[1:]  # out of turn: only the most urgent queue, and no longer than one unit
            bound = now + min(slack, self._alone(labels[0]))
        elif slack < inf:
            return None
        else:
            bound = self._gap(now)
        for label in labels:
            if now + self._alone(label) <= bound:
                self._since = now
                return self._planner.take(self._queues, label, now, bound)
        return None

    def wake_at(self, now: float) -> float | None:
        """Return when a batch may begin or a job expires, if nothing else happens [s]; None if nothing is queued."""
        if not self._queues:
            return None
        times = [self._forced(min(self._queues, key=lambda name: self._queues[name][0]))]
        expected = self._arrivals.next(now, self._settings.overdue)
        if expected is not None:
            times.append(expected + self._settings.overdue)
        times.extend(deadline for deadline, _, _ in self._deadlines[:1])
        return max(now, min(times))

    def rebase(self, now: float) -> None:
        """Handle a clock that was set back to ``now``."""
        self._since, self._refusing = min(self._since, now), inf

    def _gap(self, now: float) -> float:
        expected = self._arrivals.next(now, self._settings.overdue)
        return inf if expected is None else max(expected, now) + self._settings.blocking

    def _alone(self, label: str) -> float:
        """Return a high quantile of the time of one unit [s]."""
        return self._table.curve(network_of(self._queues[label][0])).high[1]

    def _forced(self, label: str) -> float:
        starving = self._refusing + self._settings.starving
        share = self._settings.background_share
        unit = self._table.curve(network_of(self._queues[label][0])).typical[1]
        return min(starving, self._since + min(unit / share, self._settings.longest_wait) if share > 0.0 else inf)

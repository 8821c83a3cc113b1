"""Queues of waiting ticks: one per network, or per unit where steps are not mixed; one tick per session at a time."""
from __future__ import annotations

from math import inf

from .jobs import Job, Queues, dequeue, enqueue
from .settings import Policy, Settings
from .step_table import StepTable
from .work import Request, Tier


class TickQueues:
    """The queues; a tick's place in them depends on its tier, the policy's order and its session."""

    def __init__(self, table: StepTable, policy: Policy, settings: Settings) -> None:
        self._table, self._policy, self._settings = table, policy, settings
        self.queues: Queues = {}

    def limit(self, request: Request) -> float:
        """Return by when a request must be done [s]."""
        return request.deadline - self._settings.reserve

    def take_tier(self, job: Job, tier: Tier) -> None:
        """Give a job that is not queued the route of a tier."""
        by_deadline = self._policy.order == 'edf'
        limit = self.limit(job.request) if by_deadline or self._policy.ladder else inf
        key = job.request.deadline if by_deadline else job.request.arrival
        job.take_route(tier, key, limit, self._table, self._policy.mixed_steps)

    def change_tier(self, job: Job, tier: Tier, position: int) -> None:
        """Continue with another tier, from ``position``, whether the job is queued or not."""
        waited = not job.flying and dequeue(self.queues, job)
        self.take_tier(job, tier)
        job.position = position
        if waited:
            enqueue(self.queues, job, position)

    def place(self, job: Job) -> None:
        """Queue a new job for its first unit, or hold it until its session's older one has ended."""
        session = job.session
        if session.current is None:
            session.current = job
            enqueue(self.queues, job, 0)
        else:
            session.held = session.current.follower = job

    def wait(self, job: Job) -> None:
        """Queue a job for its next unit."""
        enqueue(self.queues, job, job.position)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended or was refused; the tick held behind it, if any, is queued."""
        session = job.session
        if session.held is job:
            session.held = session.current.follower = None
            return
        if not job.flying:
            dequeue(self.queues, job)
        session.current, session.held = session.held, None
        if session.current:
            enqueue(self.queues, session.current, 0)


def lower_tier(job: Job) -> tuple[Tier, int] | None:
    """
    Return the next lower tier that a job can be served with from its current position, and its position there.

    Either the units begun are also the first of that tier's route, or the tier uses other networks altogether and nothing
    is in flight: then it starts over.
    """
    routes, begun = job.request.routes, job.begun
    for tier in sorted(tier for tier in routes if tier > job.tier):
        route = routes[tier]
        if len(route) > begun and route[:begun] == job.route[:begun]:
            return tier, job.position
        if not job.flying and not {unit.network for unit in route} & {unit.network for unit in job.route}:
            return tier, 0
    return None

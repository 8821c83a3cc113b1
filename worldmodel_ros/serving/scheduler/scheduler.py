"""Decides, for one device, which requests are admitted and which batch runs next."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf, isfinite

from .arrivals import Arrivals
from .background import Background
from .jobs import Job
from .overruns import Overruns
from .plan import Device, Planner
from .sessions import SessionRecord
from .settings import EDF_LADDER, Policy, Settings
from .step_table import StepTable
from .ticks import Ticks
from .work import TIER_WORDS, Admission, Batch, Completion, Entry, Kind, Outcome, Request, Route, Tier

SET_BACK = 1.0  # s; a clock that goes back by less is treated as standing still, by more as having been set


class Scheduler:
    """
    A state machine on the time passed in: it runs no networks, never waits and has no clock.

    The caller submits requests, asks for the ``next`` batch whenever the device is free, reports it ``finished`` or
    ``failed``, and fetches the ``completions`` after every call. Every admitted request completes exactly once, a refused
    one never. A request's tier can be lowered after its admission if others overrun: the entries of a batch say what to
    compute. ``now`` is a steady time in s; one that goes back is treated as standing still. Not thread-safe.
    """

    def __init__(self, table: StepTable, policy: Policy = EDF_LADDER, settings: Settings | None = None) -> None:
        self._table, self._policy, self._settings = table, policy, settings or Settings()
        self._overruns = Overruns()
        planner = Planner(table, self._settings, self._overruns)
        self._arrivals = Arrivals()
        self._background = Background(table, planner, self._settings, self._arrivals)
        self._ticks = Ticks(table, planner, policy, self._settings, self._give_up, self._arrivals)
        self._sessions: dict[Hashable, SessionRecord] = {}
        self._jobs: dict[Hashable, Job] = {}
        self._flying: tuple[Batch, list[Job]] | None = None
        self._completions: list[Completion] = []
        self._now = -inf
        self._count = 0  # of requests and batches

    def batches(self, route: Route) -> tuple[list[str], Callable[[str, int], float], int]:
        """Return the networks of a route, their typical batch times [s] as a function, and the largest batch of all."""
        networks = [unit.network for unit in route]
        limits = (self._settings.max_batch.get(network, self._table.largest(network)) for network in networks)
        return networks, self._table.typical, max(1, min(limits))

    @property
    def waiting(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self._jobs)

    def submit(self, request: Request, now: float) -> Admission:
        """
        Take a request, or refuse it; raises ValueError for an id that is in use or a network without step times.

        A tick supersedes an older one of its session that has not been begun, and waits for one that has.
        """
        now = self._at(now)
        self.check(request)
        session = self._session(request.session)
        job = Job(request, session, self._number())
        if request.kind is Kind.TICK:
            admission = self._admit(job, now)
        else:
            tier = min(request.routes)
            job.take_route(tier, self._background.key(request), inf, self._table, self._policy.mixed_steps)
            self._background.submit(job, now)
            admission = Admission(tier)
        if admission.admitted:
            job.admission = admission
            self._jobs[request.id] = session.jobs[request.id] = job
        return admission

    def check(self, request: Request) -> None:
        """Raise what ``submit`` would raise for a request."""
        if request.id in self._jobs:
            raise ValueError(f'request {request.id!r} is open already: every request needs an id of its own')
        for route in request.routes.values():
            for unit in route:
                self._table.curve(unit.network)

    def next(self, now: float) -> Batch | None:
        """Begin the next batch; None if the device is busy, or nothing may begin now."""
        now = self._at(now)
        if self._flying:
            return None
        for job in self._background.expired(now):
            self._end(job, Outcome.GIVEN_UP, 'its deadline has come')
        self._ticks.settle(Device(now))
        drawn = self._background.draw(now, self._ticks.slack(now)) or self._ticks.draw(now)
        if drawn is None:
            return None
        places, typical, high = drawn
        jobs = [job for _, _, job, _ in places]
        for job in jobs:
            job.flying = True
        entries = tuple(Entry(job.request, job.route[job.position], job.tier) for job in jobs)
        batch = Batch(self._number(), entries[0].unit.network, entries[0].request.kind, entries, now, now + typical,
                      now + high)
        self._flying = batch, jobs
        return batch

    def finished(self, batch: Batch, now: float) -> None:
        """Report that the device has finished the batch; its duration goes into the step table."""
        now = self._at(now)
        self._charge(batch, now)
        for job in self._landed(batch):
            job.position += 1
            if job.position == len(job.route):
                self._end(job, Outcome.DONE)
            elif job.request.kind is Kind.TICK:
                self._ticks.wait(job)
            else:
                self._background.wait(job, now)
        if now >= batch.begun:
            self._overruns.record(batch.expected - batch.begun, batch.finish - batch.begun, now - batch.begun,
                                  self._table.slowness, now)
            self._table.record(batch.network, len(batch.entries), now - batch.begun, now)

    def failed(self, batch: Batch, now: float, reason: str) -> None:
        """Report that the batch failed, and with it the requests in it; everything else continues."""
        self._charge(batch, self._at(now))
        for job in self._landed(batch):
            self._end(job, Outcome.FAILED, reason)

    def completions(self) -> list[Completion]:
        """Return the requests that have ended since the last call."""
        completions, self._completions = self._completions, []
        return completions

    def wake_at(self, now: float) -> float | None:
        """Return when to call ``next`` again if nothing else happens before; None for never."""
        now = self._at(now)
        if self._flying:
            return None
        return now if self._ticks.waiting else self._background.wake_at(now)

    def cancel(self, request_id: Hashable, now: float) -> bool:
        """End a request; return whether it was open. The caller drops what the device still computes of it."""
        self._at(now)
        job = self._jobs.get(request_id)
        if job:
            self._end(job, Outcome.CANCELLED)
        return job is not None

    def close(self, session: Hashable, now: float) -> None:
        """End all requests of a session, and forget it."""
        self._at(now)
        record = self._sessions.pop(session, None)
        # Newest first, so that a held tick does not take the place of one that has ended.
        for job in reversed(list(record.jobs.values()) if record else []):
            self._end(job, Outcome.CANCELLED)
        self._arrivals.forget(session)
        self._ticks.forget(session)

    def expect(self, session: Hashable, at: float) -> None:
        """Set when the next tick of a session is expected [s, steady], for background work to keep clear of it."""
        self._arrivals.expect(session, at)

    def phase(self, period: float) -> float:
        """
        Return the best phase for another robot that ticks every ``period`` [s], as time modulo ``period``: the middle of
        the widest gap between the expected ticks. Evenly spaced robots wait least for each other.
        """
        return self._arrivals.phase(period)

    def _admit(self, job: Job, now: float) -> Admission:
        request, session = job.request, job.session
        if session.sequence is not None and request.sequence <= session.sequence:
            return Admission(Tier.NONE, reason=f'sequence {request.sequence} came after {session.sequence}')
        self._arrivals.forget(request.session)
        session.sequence = request.sequence
        older = session.held or session.current
        if older and not older.begun:
            self._end(older, Outcome.SUPERSEDED, f'sequence {request.sequence} came before it was begun')
        admission = self._ticks.admit(job, self._device(now), now)
        self._background.answered(admission.admitted, now)
        return admission

    def _device(self, now: float) -> Device:
        if self._flying is None:
            return Device(now)
        batch, jobs = self._flying
        at = max(now, batch.expected)
        ticks = tuple(job for job in jobs if job.request.kind is Kind.TICK and job.outcome is None)
        return Device(at, max(0.0, batch.finish - at), ticks)

    def _landed(self, batch: Batch) -> list[Job]:
        """Mark the device as free after ``batch``; return its jobs that are still open."""
        if self._flying is None or self._flying[0] is not batch:
            raise ValueError(f'batch {batch.id} is not the one that was begun last')
        jobs, self._flying = self._flying[1], None
        for job in jobs:
            job.flying = False
        return [job for job in jobs if job.outcome is None]

    def _charge(self, batch: Batch, now: float) -> None:
        """Charge the robots in the finished batch with their parts of its typical time."""
        if batch.kind is Kind.TICK and self._flying:
            for job in self._flying[1]:
                self._ticks.took(job, (batch.expected - batch.begun) / len(batch.entries), now)

    def _give_up(self, job: Job, reason: str) -> None:
        self._end(job, Outcome.GIVEN_UP, reason)

    def _end(self, job: Job, outcome: Outcome, reason: str = '') -> None:
        request, session = job.request, job.session
        job.outcome = outcome
        if outcome is Outcome.DONE and job.tier is not job.admission.tier:
            reason = f'admitted for {TIER_WORDS[job.admission.tier]}, lowered since, to keep it or another one in time'
        completion = Completion(request, outcome, job.tier, job.admission, self._now, job.position, reason)
        self._completions.append(completion)
        del self._jobs[request.id], session.jobs[request.id]
        if request.kind is not Kind.TICK:
            self._background.remove(job, self._now)
            return
        self._ticks.remove(job)
        if outcome in (Outcome.DONE, Outcome.GIVEN_UP, Outcome.FAILED):
            session.ended(job, completion.met)
            if not job.admission.attempted:
                self._overruns.answered(completion.met)

    def _session(self, session: Hashable) -> SessionRecord:
        if session not in self._sessions:
            self._sessions[session] = SessionRecord(self._settings.recovery_ticks)
        return self._sessions[session]

    def _at(self, now: float) -> float:
        if not isfinite(now):
            raise ValueError(f'now must be a finite time, not {now}')
        if now < self._now - SET_BACK:
            self._background.rebase(now)
            self._now = now
        self._now = max(self._now, now)
        return self._now

    def _number(self) -> int:
        self._count += 1
        return self._count

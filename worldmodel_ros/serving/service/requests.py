"""Everything in flight for the clients of the service: turns their ticks and questions into requests, and results into replies.

Not thread-safe: the service calls it under its lock, and calls what ``take_deliveries`` returns outside of it.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worldmodel_ros.engine.what_if import QuestionError
from worldmodel_ros.serving.scheduler import Admission, Batch, Completion, Kind, Outcome, Request, Scheduler, Tier
from worldmodel_ros.serving.scheduler.phases import PhaseAdvice
from worldmodel_ros.serving.scheduler.work import Route
from .client import Client
from .jobs import CallJob, FrameJob, Job, PictureJob, TickJob
from .messages import Picture, Tick
from .networks import Networks, routes
from .questions import BranchJob
from .quotas import QUESTIONS_SAVED, TICKS_SAVED, Quotas, TokenBuckets
from .states import Event, State
from .statistics import Statistics

_CLOSEST = 0.05  # of the period: the least spacing of a camera's images
_WORDS = {Outcome.SUPERSEDED: 'a newer tick came before it was begun',
          Outcome.GIVEN_UP: 'it could not be in time any more'}


class Requests:
    """``models``: the best one and, if there is one, the smaller one."""

    def __init__(self, scheduler: Scheduler, models: Sequence[Networks], pictures: bool, quotas: Quotas):
        self._deliveries: list[Callable[[], Any]] = []
        self.statistics = Statistics()
        self._scheduler, self._models, self._pictures = scheduler, models, pictures
        self._routes = routes(models)
        self._jobs: dict[int, Job] = {}
        self._taking_in: list[Job] = []  # jobs on the device that take in frames, with the best model
        self._numbers = itertools.count(1)
        self._quotas = quotas
        self._ticks = TokenBuckets(quotas.ticks, TICKS_SAVED)
        self._questions = TokenBuckets(quotas.questions, QUESTIONS_SAVED)
        self._period = models[0].engine.spec.step_period
        self._phases = PhaseAdvice(self._period)

    def tick(self, client: Client, tick: Tick, now: float) -> None:
        """Take a tick, or refuse it."""
        wait = self._ticks.take(client.account, now)
        if wait:  # nothing is computed for it, and its frame is not taken in either
            self.statistics.counts['over_rate'] += 1
            client.total = client.total.plus(tick.executed)
            reason = f'this robot may tick {self._ticks.rate:g} times a second: again in {wait * 1e3:.0f} ms'
            self._refuse(TickJob(client, tick, now), Admission(Tier.NONE, reason=reason), now)
            return
        if client.episode not in (None, tick.episode):
            self.begin_anew(client, Event.RESET, 'a new episode has begun', now)
        client.episode = tick.episode
        if client.sequence is not None and tick.sequence <= client.sequence:
            reason = f'sequence {tick.sequence} came after {client.sequence}'
            self._refuse(TickJob(client, tick, now), Admission(Tier.NONE, reason=reason), now)
            return
        client.event(Event.TICK)
        client.sequence, client.total = tick.sequence, client.total.plus(tick.executed)
        client.ticks += 1
        job, admission = TickJob(client, tick, now), Admission(Tier.NONE, reason='no answer was wanted')
        if tick.answer:
            job.earlier = self._offer(client, tick, now)
        soonest = self._quotas.shortest_due
        if tick.answer and soonest and tick.due < now + soonest:
            self.statistics.counts['due_too_soon'] += 1
            admission = Admission(Tier.NONE, reason=f'it is due in {(tick.due - now) * 1e3:.1f} ms, and at least '
                                                    f'{soonest * 1e3:g} ms must be left')
        elif tick.answer:
            admission = self._submit(job, self._request(job, Kind.TICK, tick.due, self._routes, now), now)
        if admission.admitted:  # otherwise its frame replaces a waiting one, and inherits its age
            self._supersede(client, 'frame', now)
        self._settle(now)  # it may have superseded another tick
        self._scheduler.expect(client.number, client.timing.ticked(now))
        if not admission.admitted:
            self._refuse(job, admission, now)
            self._tick_ended(job, now)

    def refuse(self, client: Client, tick: Tick, reason: str, expected: float, now: float) -> None:
        """Refuse a tick unexamined: its frame is not taken in. ``expected``: when it could have been begun."""
        client.total = client.total.plus(tick.executed)
        self._refuse(TickJob(client, tick, now), Admission(Tier.NONE, finish=expected, reason=reason), now)

    def _offer(self, client: Client, tick: Tick, now: float) -> float:
        """Return by how much earlier [s] a client's ticks should come."""
        counts = self.statistics.counts
        counts['phase_shifts_taken'] += tick.moved > client.moved
        client.moved = tick.moved
        # Offer moves only if a period has a few images to choose from.
        spacing = tick.spacing if _CLOSEST * self._period <= tick.spacing < self._period else 0.0
        self._phases.ticked(client.number, now, tick.due - now, spacing)
        earlier = self._phases.earlier(client.number, now, *self._scheduler.batches(self._routes[Tier.TWO_STEP]))
        counts['phase_shifts_offered'] += earlier > 0.0
        return earlier

    def over_questions(self, client: Client, now: float) -> QuestionError | None:
        """Return why a client may not ask now; None if it may, which counts as a question."""
        wait = self._questions.take(client.account, now)
        if not wait:
            return None
        self.statistics.counts['what_if_over_rate'] += 1
        return QuestionError(f'this robot may ask {self._questions.rate:g} questions a second: the next one in {wait:.2f} s',
                             wait)

    def question(self, client: Client, branches: Sequence[tuple[BranchJob, Route]], due: float, now: float) -> None:
        """Submit the branches of a question; raises SessionError if the session's state does not allow questions, and
        ValueError for branches that cannot be scheduled."""
        requests = [self._request(job, Kind.WHAT_IF, due, {Tier.TWO_STEP: route}, now) for job, route in branches]
        for request in requests:  # before anything changes: a session that counts a question without branches never settles
            self._scheduler.check(request)
        client.event(Event.ASK)
        client.questions += 1
        for (job, _), request in zip(branches, requests, strict=True):
            self._submit(job, request, now)

    @property
    def waiting(self) -> int:
        """Ticks and questions that were let in and have not ended."""
        return self._scheduler.waiting

    def settled(self, client: Client) -> bool:
        """Return whether no frame of a client is in flight."""
        return not any(isinstance(job, FrameJob) and job.client is client and not job.stale
                       for job in self._jobs.values())

    def call(self, job: CallJob, now: float) -> None:
        """Submit a call with a session, for idle time."""
        self._submit_idle(job, (self._models[0].unit('snapshot'),), now)

    def begin_anew(self, client: Client, event: Event, reason: str, now: float) -> None:
        """Handle a reset, a failure or the end of a session: what is in flight for it is cancelled."""
        client.begin_anew(event, reason)
        self._phases.forget(client.number)
        self._scheduler.close(client.number, now)
        self._settle(now)

    def next(self, now: float) -> tuple[Batch, list[Job]] | None:
        """Return the next batch and its jobs; None if none may begin now."""
        batch = self._scheduler.next(now)
        self._settle(now)
        if batch is None:
            return None
        jobs = [self._jobs[entry.request.id] for entry in batch.entries]
        self._taking_in = [job for entry, job in zip(batch.entries, jobs)
                           if job.took_in(entry.unit) and entry.tier is not Tier.SMALLER]
        return batch, jobs

    def finished(self, batch: Batch, jobs: Sequence[Job], errors: Sequence[Exception | None], now: float) -> None:
        """Take the end of a batch, with the error of each of its jobs, if any."""
        self._taking_in = []
        for entry, job, error in zip(batch.entries, jobs, errors):
            if error:
                self._scheduler.cancel(entry.request.id, now)
                self._failed(job, error, now)
            elif not job.stale and job.took_in(entry.unit):
                job.client.event(Event.OBSERVED)
                self.statistics.counts['frames_taken_in_later'] += type(job) is FrameJob
        self._scheduler.finished(batch, now)
        if batch.kind is Kind.TICK:
            self.statistics.batch_took(now - batch.begun, batch.expected - batch.begun)
        self._settle(now)

    def wake_at(self, now: float) -> float | None:
        """Return when to call ``next`` again if nothing else happens before; None for never."""
        return self._scheduler.wake_at(now)

    def phase(self, period: float) -> float:
        """Return the best phase for another client; see ``Scheduler.phase``."""
        return self._scheduler.phase(period)

    def take_deliveries(self) -> list[Callable[[], Any]]:
        """Return the calls to listeners and promises that have become due since the last call."""
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def _request(self, job: Job, kind: Kind, due: float, routes: Mapping[Tier, Route], since: float) -> Request:
        return Request(next(self._numbers), job.client.number, job.tick.sequence if kind is Kind.TICK else 0, kind, since, due,
                       routes, job.client.account)

    def _submit(self, job: Job, request: Request, now: float) -> Admission:
        admission = self._scheduler.submit(request, now)
        if admission.admitted:
            self._jobs[request.id] = job
        return admission

    def _submit_idle(self, job: Job, route: Route, now: float, latest: str = '') -> None:
        """``latest``: a kind of work of which only the client's newest is of use; it replaces the one before."""
        older, since = job.client.latest.get(latest, (None, now))
        waits = older in self._jobs
        if not waits or self._jobs[older].begun is not None:
            since = now
        self._submit(job, self._request(job, Kind.IDLE, math.inf, {Tier.TWO_STEP: route}, since), now)
        if latest:
            job.client.latest[latest] = next(reversed(self._jobs)), since
        if waits:  # only now, so that the background queue is never empty in between
            self._scheduler.cancel(older, now)

    def _supersede(self, client: Client, latest: str, now: float) -> None:
        if latest in client.latest:
            self._scheduler.cancel(client.latest.pop(latest)[0], now)

    def _settle(self, now: float) -> None:
        """Handle requests that have ended, and those that end as a result."""
        while completions := self._scheduler.completions():
            for completion in completions:
                self._ended(self._jobs.pop(completion.request.id), completion, now)

    def _ended(self, job: Job, completion: Completion, now: float) -> None:
        if job.stale:
            if isinstance(job, TickJob) and not job.answered:  # the client frees the frame's slot on the answer
                self.statistics.counts['stale_dropped'] += 1
                self.statistics.replied(Tier.NONE)
                self._deliver(job.client, job.client.listener.replied, job.reply(Tier.NONE, job.client.reason, None, now))
            if job.promise:
                self._raise_later(job, QuestionError(job.client.reason))
        elif isinstance(job, TickJob):
            self._answer(job, completion, now)
        elif isinstance(job, BranchJob):
            self._branch_ended(job, job.future if completion.outcome is Outcome.DONE else None)
        elif isinstance(job, PictureJob) and completion.outcome is Outcome.DONE:
            self._deliver(job.client, job.client.listener.pictured, Picture(job.reply, job.future, job.seconds))

    def _answer(self, job: TickJob, completion: Completion, now: float) -> None:
        client, admission, finish = job.client, completion.admission, completion.finish
        done = completion.outcome is Outcome.DONE
        tier = completion.tier if done else Tier.NONE
        reason = completion.reason or _WORDS.get(completion.outcome, admission.reason)
        reply = job.reply(tier, reason, admission.expected, finish)
        self.statistics.replied(tier)
        late = finish > job.tick.due or completion.outcome is Outcome.GIVEN_UP
        self.statistics.counts['late'] += late
        self.statistics.counts['attempted'] += admission.attempted
        self.statistics.counts['attempted_late'] += admission.attempted and late
        self.statistics.counts['given_up'] += completion.outcome is Outcome.GIVEN_UP
        if done and tier is not admission.tier:
            self.statistics.counts['lowered'] += 1
        elif done and admission.expected is not None:
            self.statistics.predicted(job.arrival, admission.expected, finish)
        self._deliver(client, client.listener.replied, reply)
        self._tick_ended(job, now)
        if done and self._pictures:
            route = (self._models[tier is Tier.SMALLER].unit('decode'),)
            self._submit_idle(PictureJob(client, job.model.session, reply, job.future), route, now, 'picture')

    def _refuse(self, job: TickJob, admission: Admission, now: float) -> None:
        self.statistics.replied(Tier.NONE)
        self.statistics.counts['refused_at_arrival'] += 1
        self._deliver(job.client, job.client.listener.replied,
                      job.reply(Tier.NONE, admission.reason, admission.finish, now))

    def _tick_ended(self, job: TickJob, now: float) -> None:
        client = job.client
        client.tick_ended()
        if client.ticks == 0 and not client.models[0].saw(job.total) and job not in self._taking_in:
            # Refused, or answered by the smaller model. A gap in the session's frames would cost more than idle time; and
            # a model that is skipped for its slow times can only be found fast enough again if it is measured.
            route = self._models[0].tick(1) if job.tick.answer else (self._models[0].unit('observe'),)
            self._submit_idle(job.frame(), route, now, 'frame')

    def _branch_ended(self, job: BranchJob, future: Any) -> None:
        asked, client = job.asked, job.client
        if not asked.ended(job.index, future):
            return
        client.question_ended()
        outcome = 'failed' if asked.error else 'complete' if asked.inquiry.answer.complete else 'incomplete'
        self.statistics.counts[f'what_if_{outcome}'] += 1
        if asked.error:
            self._raise_later(job, asked.error)
        else:
            self._deliveries.append(lambda: asked.promise.set_result(asked.inquiry.answer))

    def _failed(self, job: Job, error: Exception, now: float) -> None:
        """Handle a unit that raised, or whose results cannot be used."""
        client, reason = job.client, f'{type(error).__name__}: {error}'
        if job.stale:
            if client.state is State.CLOSED:
                client.discard()
            return
        if isinstance(job, FrameJob):
            self._deliver(client, client.listener.failed, reason, error)
            for other in self._jobs.values():
                if isinstance(other, TickJob) and other.client is client and not other.stale:
                    self.statistics.counts['failed'] += 1
                    self.statistics.replied(Tier.NONE)
                    self._deliver(client, client.listener.replied,
                                  other.reply(Tier.NONE, reason, None, now, failed=True))
                    other.answered = True
            client.discard()
            self.begin_anew(client, Event.FAIL, f'the model failed: {reason}', now)
        elif isinstance(job, BranchJob):
            job.asked.error = QuestionError(f'it could not be imagined: {reason}')
            for number in [number for number, other in self._jobs.items()
                           if isinstance(other, BranchJob) and other.asked is job.asked]:
                self._scheduler.cancel(number, now)
        elif isinstance(job, CallJob):
            self._raise_later(job, error)
        else:
            self._deliver(client, client.listener.failed, f'decoding: {reason}', error)

    def _deliver(self, client: Client, function: Callable[..., None], *what: Any) -> None:
        self._deliveries.append(lambda: client.state is State.CLOSED or function(*what))

    def _raise_later(self, job: Job, error: Exception) -> None:
        self._deliveries.append(lambda: job.promise.done() or job.promise.set_exception(error))

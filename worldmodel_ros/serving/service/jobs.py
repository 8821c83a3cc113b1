"""What the scheduler's requests stand for: a job gives the work of its next unit, and takes what came of it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from typing import Any

import numpy as np

from worldmodel_ros.engine.calls import Backend, Boundary, Calls, Work, run_unit
from worldmodel_ros.engine.futures import Future
from worldmodel_ros.engine.session import Session
from worldmodel_ros.serving.scheduler import Batch, Tier, Unit
from .client import Client, Past, Twin
from .messages import Reply, Tick


class OutputError(RuntimeError):
    """The model gave something that cannot be used."""


class Job:
    """One request of a client, on its way through the device. `work` and `done` are the service's thread's."""

    def __init__(self, client: Client):
        self.client = client
        self.generation = client.generation
        self.promise: Promise | None = None  # of somebody who waits for it
        self.begun: float | None = None  # when its first unit was, steady s

    @property
    def stale(self) -> bool:
        """Whether the client has begun anew since."""
        return self.generation != self.client.generation

    def work(self, unit: Unit, tier: Tier) -> Work | None:
        """The work of ``unit``; None if it has been done here."""
        raise NotImplementedError

    def done(self, unit: Unit, seconds: float) -> None:
        """Takes what the unit gave, and the time of its batch; raises what makes it useless."""

    def took_in(self, unit: Unit) -> bool:
        """Whether the session has seen a frame by it."""
        return False


class FrameJob(Job):
    """Takes in the frame of a tick and, where its route says so, imagines standing still."""

    def __init__(self, client: Client, tick: Tick, past: Past):
        super().__init__(client)
        self.tick, self.past = tick, past
        self.observed = False
        self.twin: Twin | None = None
        self.plan: np.ndarray | None = None
        self._imagining: Work[Future] | None = None

    def work(self, unit: Unit, tier: Tier) -> Work:
        if self.took_in(unit):
            self.twin = self.client.twins[tier is Tier.SMALLER]
            self.twin.begin(self.generation, self.past)
            return Work(self._observe(self.twin))
        if unit.step == 0:
            self._imagining = Work(self.twin.session.imagining(self.plan, unit.steps))
        return self._imagining

    def done(self, unit: Unit, seconds: float) -> None:
        if self.took_in(unit):
            self.twin.observed(self.past, self.tick.stamp)
            self.observed = True

    def took_in(self, unit: Unit) -> bool:
        return unit.network.endswith('/observe')

    def _observe(self, twin: Twin) -> Calls[None]:
        yield Boundary('observe')
        yield from twin.session.observing(twin.frame(self.tick.image), twin.executed(self.tick.executed, self.past))
        spec = twin.session.spec
        self.plan = np.zeros((spec.chunk_frames, spec.actions), np.float32)


class TickJob(FrameJob):
    """Answers a tick: takes in its frame, plans, and imagines the plan."""

    def __init__(self, client: Client, tick: Tick, arrival: float):
        super().__init__(client, tick, client.past)
        self.arrival = arrival
        self.answered = False  # before it has ended
        self.future: Future | None = None
        self.timings: dict[str, float] = {}

    def done(self, unit: Unit, seconds: float) -> None:
        super().done(unit, seconds)
        part = unit.network.rpartition('/')[2]
        self.timings[part] = self.timings.get(part, 0.0) + seconds
        if self.took_in(unit):
            _require_finite(self.plan, 'the plan')
        elif unit.step + 1 == unit.steps:
            self.future = self._imagining.result
            _require_finite(self.future.collision_risk, 'the collision risk')

    def _observe(self, twin: Twin) -> Calls[None]:
        yield from super()._observe(twin)
        if self.tick.goal:
            self.plan = yield from twin.session.planning(self.tick.goal, self.tick.prefix)

    def frame(self) -> FrameJob:
        """What takes in the same frame, and no more."""
        return FrameJob(self.client, self.tick, self.past)

    def reply(self, tier: Tier, reason: str, predicted: float | None, finish: float, failed: bool = False) -> Reply:
        """The reply to the tick, with what there is for ``tier``."""
        tick, future = self.tick, None if tier is Tier.NONE else self.future
        queue = (finish if self.begun is None else self.begun) - self.arrival
        return Reply(self.client.number, tick.sequence, tick.stamp, tick.episode, tier, self.plan if future else None,
                     reason, predicted, finish, queue, {**self.timings, 'total': finish - self.arrival},
                     future.collision_risk if future else None, future.progress if future else {}, failed)


class PictureJob(Job):
    """Decodes the future of a reply."""

    def __init__(self, client: Client, session: Session, reply: Reply, future: Future):
        super().__init__(client)
        self._session, self.reply, self.future = session, reply, future
        self.seconds = 0.0

    def work(self, unit: Unit, tier: Tier) -> Work:
        return Work(self._session.decoding(self.future))

    def done(self, unit: Unit, seconds: float) -> None:
        self.seconds = seconds


class CallJob(Job):
    """Calls a function with the client's session: saves it, or loads another."""

    def __init__(self, client: Client, function: Callable[[Session], Any], promise: Promise, loads: bool):
        super().__init__(client)
        self._function, self.promise, self.loads = function, promise, loads
        self._past = client.past

    def work(self, unit: Unit, tier: Tier) -> None:
        twin = self.client.twins[0]
        twin.begin(self.generation, self._past)
        try:
            self.promise.set_result(self._function(twin.session))
        except Exception as error:  # the caller's: a path that cannot be written, say
            self.promise.set_exception(error)
            self.loads = False
        if self.loads:
            twin.observed(self._past, 0)

    def took_in(self, unit: Unit) -> bool:
        return self.loads


def run_batch(batch: Batch, jobs: Sequence[Job], backend: Backend, clock: Callable[[], float]
              ) -> tuple[list[Exception | None], float]:
    """Runs the batch's unit of each of ``jobs``; returns what each of them raised, and when the device was done."""
    works: dict[int, Work] = {}
    errors: list[Exception | None] = [None] * len(jobs)
    for index, (entry, job) in enumerate(zip(batch.entries, jobs)):
        job.begun = batch.begun if job.begun is None else job.begun
        try:
            work = job.work(entry.unit, entry.tier)
            if work:
                works[index] = work
        except Exception as error:
            errors[index] = error
    for index, error in zip(works, run_unit(list(works.values()), backend)):
        errors[index] = error
    backend.settle()
    finish = clock()
    for index, (entry, job) in enumerate(zip(batch.entries, jobs)):
        try:
            if errors[index] is None:
                job.done(entry.unit, finish - batch.begun)
        except Exception as error:
            errors[index] = error
    return errors, finish


def firm_promise() -> Promise:
    """A promise that cannot be cancelled any more: who does not want it may forget it."""
    promise: Promise = Promise()
    promise.set_running_or_notify_cancel()
    return promise


def _require_finite(values: np.ndarray, what: str) -> None:
    if not np.isfinite(values).all():
        raise OutputError(f'{what} is not finite')

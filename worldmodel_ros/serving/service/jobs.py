"""Jobs behind the scheduler's requests: each gives the work of its next unit, and takes its results."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from typing import Any

import numpy as np

from worldmodel_ros.control.responder import require_finite
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.network_calls import Backend, Boundary, Calls, Work, run_unit
from worldmodel_ros.engine.futures import Future
from worldmodel_ros.engine.session import Session
from worldmodel_ros.serving.scheduler import Batch, Tier, Unit
from .client import ActionTotal, Client, ModelSession
from .messages import Reply, Tick
from .states import State


class Job:
    """One request of a client. ``work`` and ``done`` are called from the service's thread."""

    def __init__(self, client: Client):
        self.client = client
        self.generation = client.generation
        self.promise: Promise | None = None  # if a thread waits for the result
        self.begun: float | None = None  # when its first unit was begun, steady s

    @property
    def stale(self) -> bool:
        """Whether the client has begun again since the request."""
        return self.generation != self.client.generation

    def work(self, unit: Unit, tier: Tier) -> Work | None:
        """Return the work of ``unit``; None if it has been done here."""
        raise NotImplementedError

    def done(self, unit: Unit, seconds: float) -> None:
        """Take the results of the unit and the time of its batch [s]; raise if they cannot be used."""

    def took_in(self, unit: Unit) -> bool:
        """Return whether the session takes in a frame with this unit."""
        return False


class FrameJob(Job):
    """Takes in the frame of a tick and, if its route includes that, imagines standing still."""

    def __init__(self, client: Client, tick: Tick, total: ActionTotal):
        super().__init__(client)
        self.tick, self.total = tick, total
        self.observed = False
        self.model: ModelSession | None = None
        self.plan: np.ndarray | None = None
        self._imagining: Work[Future] | None = None

    def work(self, unit: Unit, tier: Tier) -> Work:
        if self.took_in(unit):
            self.model = self.client.models[tier is Tier.SMALLER]
            self.model.begin(self.generation, self.total)
            return Work(self._observe(self.model))
        if unit.step == 0:
            self._imagining = Work(self.model.session.imagining(self.plan, unit.steps))
        return self._imagining

    def done(self, unit: Unit, seconds: float) -> None:
        if self.took_in(unit):
            self.model.observed(self.total, self.tick.stamp)
            self.observed = True

    def took_in(self, unit: Unit) -> bool:
        return unit.network.endswith('/observe')

    def _observe(self, model: ModelSession) -> Calls[None]:
        yield Boundary('observe')
        yield from model.session.observing(model.frame(self.tick.image), model.executed(self.tick.executed, self.total))
        spec = model.session.spec
        self.plan = np.zeros((spec.chunk_frames, spec.actions), np.float32)


class TickJob(FrameJob):
    """Answers a tick: takes in its frame, plans unless the robot has planned, and imagines the plan."""

    def __init__(self, client: Client, tick: Tick, arrival: float):
        super().__init__(client, tick, client.total)
        self.arrival = arrival
        self.answered = False  # before it has ended
        self.earlier = 0.0     # s by which the client's ticks should come earlier
        self.future: Future | None = None
        self.timings: dict[str, float] = {}

    def done(self, unit: Unit, seconds: float) -> None:
        super().done(unit, seconds)
        part = unit.network.rpartition('/')[2]
        self.timings[part] = self.timings.get(part, 0.0) + seconds
        if self.took_in(unit):
            require_finite(self.plan, 'the plan')
        elif unit.step + 1 == unit.steps:
            self.future = self._imagining.result
            require_finite(self.future.collision_risk, 'the collision risk')

    def _observe(self, model: ModelSession) -> Calls[None]:
        yield from super()._observe(model)
        if self.tick.plan is not None:
            self.plan = np.asarray(self.tick.plan, np.float32)
        elif self.tick.goal:
            self.plan = yield from model.session.planning(self.tick.goal, self.tick.prefix)

    def frame(self) -> FrameJob:
        """Return a job that takes in the same frame without an answer."""
        return FrameJob(self.client, self.tick, self.total)

    def reply(self, tier: Tier, reason: str, predicted: float | None, finish: float, failed: bool = False) -> Reply:
        """Return the reply to the tick, with the results there are for ``tier``."""
        tick, future = self.tick, None if tier is Tier.NONE else self.future
        queue = (finish if self.begun is None else self.begun) - self.arrival
        return Reply(self.client.number, tick.sequence, tick.stamp, tick.episode, tier, self.plan if future else None,
                     reason, predicted, finish, queue, {**self.timings, 'total': finish - self.arrival},
                     future.collision_risk if future else None, future.progress if future else {}, failed,
                     self.earlier)


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

    def __init__(self, client: Client, function: Callable[[Session], Any], promise: Promise, loads: bool,
                 seen: ActionTotal | None = None, stamp: int = 0):
        """``loads``: the call replaces the session by another one, whose newest frame came at ``seen`` (None: now), with
        ``stamp``."""
        super().__init__(client)
        self._function, self.promise, self.loads = function, promise, loads
        self._total, self._seen, self._stamp = client.total, seen or client.total, stamp

    def work(self, unit: Unit, tier: Tier) -> None:
        self.run()

    def run(self) -> None:
        """Make the call, in the service's thread; an error is passed to the promise."""
        model = self.client.models[0]
        model.begin(self.generation, self._total)
        try:
            self.promise.set_result(self._function(model.session))
        except Exception as error:  # the caller's, e.g. a path that cannot be written
            self.promise.set_exception(error)
            self.loads = False
        if self.loads:
            model.observed(self._seen, self._stamp)

    def took_in(self, unit: Unit) -> bool:
        return self.loads


class BorderJob:
    """Calls a function between two batches, for no particular client."""

    loads = stale = False

    def __init__(self, function: Callable[[], Any], promise: Promise):
        self._function, self.promise = function, promise

    def run(self) -> None:
        """Make the call, in the service's thread; an error is passed to the promise. Do nothing if the promise was cancelled:
        a caller that has timed out assumes that the session is unchanged."""
        if not self.promise.set_running_or_notify_cancel():
            return
        try:
            self.promise.set_result(self._function())
        except Exception as error:
            self.promise.set_exception(error)


class PagesJob(BorderJob):
    """Changes a client's session on the best model without a frame: gives it pages, or takes them."""

    def __init__(self, client: Client, function: Callable[[ModelSession], Any], promise: Promise):
        super().__init__(lambda: function(client.models[0]), promise)
        self.client = client

    @property
    def stale(self) -> bool:
        return self.client.state is State.CLOSED


def run_batch(batch: Batch, jobs: Sequence[Job], backend: Backend, clock: Callable[[], float]
              ) -> tuple[list[Exception | None], float]:
    """Run the batch's unit of each of ``jobs``; return the error of each, if any, and when the device was done."""
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
    try:
        backend.settle()
    except Exception as error:  # of any of them: the device is free anyway, and can take other work
        end_if_lost(error)
        errors = [each or error for each in errors]
    finish = clock()
    for index, (entry, job) in enumerate(zip(batch.entries, jobs)):
        try:
            if errors[index] is None:
                job.done(entry.unit, finish - batch.begun)
        except Exception as error:
            errors[index] = error
    return errors, finish

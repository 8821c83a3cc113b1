"""Questions on their way through the service: they wait to be begun, then their branches are jobs of their own."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from worldmodel_ros.cache.allocator import OutOfPages
from worldmodel_ros.engine.calls import Work
from worldmodel_ros.engine.futures import Future, Moment, OwnPlan
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.what_if import Answer, Distinct, Question, QuestionError, actions_of, distinct
from worldmodel_ros.serving.scheduler import Tier, Unit
from worldmodel_ros.serving.scheduler.work import Route
from .client import Client
from .jobs import Job, firm_promise
from .messages import SessionError
from .networks import Networks


class Asked:
    """A question whose branches are under way."""

    def __init__(self, distinct: Distinct, stamp: int, promise: Promise):
        self.promise = promise
        self.answer = Answer(stamp)
        self.error: Exception | None = None
        self.distinct = distinct
        self._futures: dict[int, Future] = {}
        self._open = len(distinct.branches)

    def ended(self, index: int, future: Future | None) -> bool:
        """Branch ``index`` of the different ones has ended, with its future if it was finished; returns whether all
        have."""
        self._open -= 1
        if future is not None:
            self._futures[index] = future
        if self._open:
            return False
        self.answer.branches = self.distinct.answered(self._futures)
        self.answer.complete = len(self._futures) == len(self.distinct.branches)
        return True


class BranchJob(Job):
    """One branch of a question: ``actions`` from a moment of a session, each chunk in ``steps``."""

    def __init__(self, client: Client, asked: Asked, index: int, session: Session, moment: Moment,
                 actions: np.ndarray | OwnPlan, steps: int):
        super().__init__(client)
        self.asked, self.promise, self.index = asked, asked.promise, index
        self._begin = lambda: Work(session.branching(actions, steps, moment))
        self._work: Work[Future] | None = None

    def work(self, unit: Unit, tier: Tier) -> Work:
        if self._work is None:
            self._work = self._begin()
        return self._work

    @property
    def future(self) -> Future | None:
        """What was imagined, once it was to its end."""
        return self._work.result


@dataclass(frozen=True, eq=False)
class Waiting:
    """A question that has not been begun; ``generation``: of the client when it asked."""

    client: Client
    generation: int
    question: Question
    promise: Promise

    def branches(self, networks: Networks) -> list[tuple[BranchJob, Route]]:
        """Keeps the moment that the question is about; a job for each branch, and what it goes through on the best
        model. Raises QuestionError and OutOfPages. The service's thread's."""
        question, twin = self.question, self.client.twins[0]
        if self.generation != self.client.generation or not twin.current(self.generation):
            raise QuestionError('nothing has been observed yet, or the session has begun anew: ask after a tick')
        if question.stamp and question.stamp != twin.stamp:
            raise QuestionError(f'observation_stamp {question.stamp / 1e9:.9f} is not the newest observation '
                                f'({twin.stamp / 1e9:.9f}), and older ones are not kept: leave it zero')
        asked = Asked(distinct(question, twin.session.spec.goals), twin.stamp, self.promise)
        moment, branches = twin.session.moment(), []
        for index, branch in enumerate(asked.distinct.branches):
            actions = actions_of(branch, question.goal)
            job = BranchJob(self.client, asked, index, twin.session, moment, actions, question.denoising_steps)
            route = networks.branch(len(actions), question.denoising_steps)
            branches.append((job, (networks.unit('policy'), *route) if isinstance(actions, OwnPlan) else route))
        return branches

    def refuse(self, error: Exception) -> None:
        """Tells whoever waits for the answer why it could not be begun."""
        if isinstance(error, OutOfPages):
            error = QuestionError(f'no memory is left to imagine in: {error}')
        elif isinstance(error, (SessionError, ValueError)):
            error = error if isinstance(error, QuestionError) else QuestionError(str(error))
        else:
            error = QuestionError(f'it could not be begun: {type(error).__name__}: {error}')
        self.promise.set_exception(error)


class Questions:
    """Those that wait, in the order they came. Not thread-safe: the service calls it under its lock."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def ask(self, client: Client, question: Question) -> Promise:
        """Takes a question; the promise is the one that `Service.ask` speaks of."""
        promise = firm_promise()
        self._waiting.append(Waiting(client, client.generation, question, promise))
        return promise

    def next(self) -> Waiting | None:
        """The first one, which waits no more."""
        return self._waiting.popleft() if self._waiting else None

    def take_expired(self, now: float) -> list[Callable[[], Any]]:
        """What answers those whose time is over before they could be begun: ticks go first."""
        over = [each for each in self._waiting if now >= each.question.due]
        if over:
            self._waiting = deque(each for each in self._waiting if now < each.question.due)
        return [partial(each.promise.set_result, Answer(each.client.twins[0].stamp)) for each in over]

    def cancel(self) -> None:
        """The service has ended."""
        while waiting := self.next():
            waiting.promise.set_exception(QuestionError('the service was stopped'))

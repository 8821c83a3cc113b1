"""Questions in the service: they wait to be begun, then each branch is a job of its own."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from functools import partial
from typing import Any

from worldmodel_ros.control.worker import uncancellable_future
from worldmodel_ros.engine.network_calls import Work
from worldmodel_ros.engine.futures import Future, OwnPlan
from worldmodel_ros.engine.what_if import Answer, Inquiry, Question, QuestionError
from worldmodel_ros.serving.scheduler import Tier, Unit
from worldmodel_ros.serving.scheduler.work import Route
from .client import Client
from .jobs import Job
from .messages import SessionError
from .networks import Networks


class Asked:
    """A question whose branches are in flight."""

    def __init__(self, inquiry: Inquiry, promise: Promise):
        self.inquiry, self.promise = inquiry, promise
        self.error: Exception | None = None
        self._open = len(inquiry)

    def ended(self, index: int, future: Future | None) -> bool:
        """Note the end of a branch, with its future if it was finished; return whether all branches have ended."""
        self._open -= 1
        if future is not None:
            self.inquiry.finished(index, future)
        return not self._open


class BranchJob(Job):
    """One branch of a question."""

    def __init__(self, client: Client, asked: Asked, index: int):
        super().__init__(client)
        self.asked, self.promise, self.index = asked, asked.promise, index
        self._work: Work[Future] | None = None

    def work(self, unit: Unit, tier: Tier) -> Work:
        if self._work is None:
            self._work = Work(self.asked.inquiry.branching(self.index))
        return self._work

    def done(self, unit: Unit, seconds: float) -> None:
        if self.asked.inquiry.kept is not None and not self.stale:
            self.client.models[0].kept = self.asked.inquiry.kept

    @property
    def future(self) -> Future | None:
        """The imagined future, once it is complete."""
        return self._work.result


@dataclass(frozen=True, eq=False)
class Waiting:
    """A question that has not been begun; ``generation``: the client's when it asked."""

    client: Client
    generation: int
    question: Question
    promise: Promise

    def branches(self, networks: Networks) -> list[tuple[BranchJob, Route]]:
        """Capture the moment that the question is about; return a job for each branch with its route on the best model.
        Raises QuestionError. Called from the service's thread."""
        best = self.client.models[0]
        if self.generation != self.client.generation or not best.current(self.generation):
            raise QuestionError('nothing has been observed yet, or the session has begun again: ask after a tick')
        inquiry = Inquiry(self.question, best.session, best.stamp, best.kept)
        asked = Asked(inquiry, self.promise)
        branches = []
        for index in range(len(asked.inquiry)):
            actions = asked.inquiry.actions(index)
            begun = best.kept.imagined if self.question.onward else 0
            route = networks.branch(len(actions), self.question.denoising_steps, begun, self.question.keep)
            plan = (networks.unit('policy'),) if isinstance(actions, OwnPlan) else ()
            branches.append((BranchJob(self.client, asked, index), plan + route))
        return branches

    def refuse(self, error: Exception) -> None:
        """Fail the promise with the reason why the question could not be begun."""
        if isinstance(error, (SessionError, ValueError)):
            error = error if isinstance(error, QuestionError) else QuestionError(str(error))
        else:
            error = QuestionError(f'it could not be begun: {type(error).__name__}: {error}')
        self.promise.set_exception(error.with_traceback(None))  # its frames refer to the promise: a reference cycle


class Questions:
    """Waiting questions, in order of arrival. Not thread-safe: the service calls it under its lock."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()

    def ask(self, client: Client, question: Question) -> Promise:
        """Take a question; return the promise described in ``Service.ask``."""
        promise = uncancellable_future()
        self._waiting.append(Waiting(client, client.generation, question, promise))
        return promise

    def next(self) -> Waiting | None:
        """Remove and return the first one; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def take_expired(self, now: float) -> list[Callable[[], Any]]:
        """Remove questions that fell due before they could be begun; return functions that answer them, without branches."""
        over = [each for each in self._waiting if now >= each.question.due]
        if over:
            self._waiting = deque(each for each in self._waiting if now < each.question.due)
        return [partial(each.promise.set_result, Answer(each.client.models[0].stamp)) for each in over]

    def cancel(self) -> None:
        """Fail all waiting questions: the service has ended."""
        while waiting := self.next():
            waiting.promise.set_exception(QuestionError('the service was stopped'))

"""
What-if questions: asked from any thread, answered in units that ticks can interrupt.
"""
from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..cache.pool import OutOfPages
from .network_calls import Calls
from .futures import OwnPlan

if TYPE_CHECKING:
    from .session import Future, Moment, Session


MAX_STEPS = 200  # of one branch in a request
MAX_BRANCHES = 32
DENOISING_STEPS = (1, 2)  # what models are trained for


class QuestionError(ValueError):
    """A question that cannot be answered; the text says why and what to do. ``again``: time after which to retry [s]; 0 if it
    can never be answered as it is."""

    def __init__(self, text: str, again: float = 0.0) -> None:
        super().__init__(text)
        self.again = again


@dataclass(frozen=True)
class Branch:
    """One sequence to imagine: ``actions`` (T, A) in SI units or, if None, the model's own plan over ``steps``."""

    name: str
    steps: int
    actions: np.ndarray | None = None


@dataclass(frozen=True)
class Question:
    """
    ``due``: steady time by which the answer is wanted [s]. ``stamp``: of the observation to branch from [ns], 0
    for the newest. ``goal``: of the model's own plan. ``denoising_steps`` of each chunk: two give sharper images; one takes a
    quarter less time, and tells branches apart a little better (docs/training.md).

    ``keep``: keep the end of the one branch, whose actions fill whole chunks, so that another can continue from it;
    ``onward``: continue from the one kept last. Only the service of many sessions keeps any.
    """

    branches: tuple[Branch, ...]
    goal: str
    due: float
    stamp: int = 0
    denoising_steps: int = 2
    keep: bool = False
    onward: bool = False

    def __post_init__(self) -> None:
        """Raise QuestionError for a question that can never be answered."""
        if not self.branches:
            raise QuestionError('the question has no branch: ask for at least one')
        if not math.isfinite(self.due):
            raise QuestionError(f'due is {self.due}: give a steady time in s')
        if self.denoising_steps not in DENOISING_STEPS:
            raise QuestionError(f'{self.denoising_steps} denoising steps: models are trained for 1 or 2')
        if (self.keep or self.onward) and (len(self.branches) > 1 or self.branches[0].actions is None):
            raise QuestionError('only one branch of given actions is gone on from')


@dataclass
class Answer:
    """The finished branches, in the order of the question, each with its name and its Future of T frames."""

    stamp: int
    branches: list[tuple[str, Future]] = field(default_factory=list)
    complete: bool = False


class Inquiry:
    """
    A question that is being answered.

    All branches start from the observation that was the newest at the start. The model's own plan is imagined once for
    each number of steps, however often it is asked for.
    """

    def __init__(self, question: Question, session: Session, stamp: int, kept: Moment | None = None) -> None:
        """``stamp``: of the newest observation of ``session`` [ns]; ``kept``: the end of the branch kept last. Raises
        QuestionError."""
        if question.stamp and question.stamp != stamp:
            raise QuestionError(f'observation_stamp {question.stamp / 1e9:.9f} is not the newest observation '
                                f'({stamp / 1e9:.9f}), and older ones are not kept: leave it zero')
        self.question, self.answer = question, Answer(stamp)
        self._session = session
        self._places: list[tuple[str, int]] = []  # name of each branch, and its index in ``_distinct``
        self._distinct = self._different(session.spec.goals)
        self._futures: dict[int, Future] = {}
        if question.onward and kept is None:
            raise QuestionError('no branch was kept since the newest observation: keep one first')
        self.kept: Moment | None = None  # the end of this question's branch, if it is to be kept
        with _out_of_memory_explained():
            self._moment = kept if question.onward else session.moment()
        self._units: Generator[None, None, Future] | None = None  # of the first branch that is not finished

    def __len__(self) -> int:
        """Number of distinct branches to imagine."""
        return len(self._distinct)

    def actions(self, index: int) -> np.ndarray | OwnPlan:
        """Return the actions of a distinct branch, or an ``OwnPlan`` for the model's own plan."""
        branch = self._distinct[index]
        return OwnPlan(self.question.goal, branch.steps) if branch.actions is None else branch.actions

    def branching(self, index: int) -> Calls[Future]:
        """Return the network calls that imagine a branch, for a scheduler that batches many sessions' calls."""
        if self.question.keep:
            return self._extending(self.actions(index))
        return self._session.branching(self.actions(index), self.question.denoising_steps, self._moment)

    def finished(self, index: int, future: Future) -> None:
        """Add the future of a branch to the answer."""
        self._futures[index] = future
        self.answer.branches = [(name, self._futures[place]) for name, place in self._places if place in self._futures]
        self.answer.complete = len(self._futures) == len(self)

    def advance(self) -> bool:
        """Fork the session for a branch, or run one unit of its work, a network call; return whether the answer is complete."""
        index = len(self._futures)
        if self._units is None:
            self._units = self._session.what_if(self.actions(index), self.question.denoising_steps, self._moment)
        with _out_of_memory_explained():
            try:
                next(self._units)
            except StopIteration as end:
                self._units = None
                self.finished(index, end.value)
        return self.answer.complete

    def _extending(self, actions: np.ndarray) -> Calls[Future]:
        future, self.kept = yield from self._session.extending(actions, self.question.denoising_steps, self._moment)
        return future

    def _different(self, goals: Sequence[str]) -> list[Branch]:
        """Return the distinct branches; raise QuestionError for a plan without a known goal."""
        different: dict[object, Branch] = {}
        for index, branch in enumerate(self.question.branches):
            if branch.actions is None and not self.question.goal:
                raise QuestionError(
                    f'branch {branch.name!r} is the plan for a goal, and there is none: set goal in the request')
            if branch.actions is None and self.question.goal not in goals:
                raise QuestionError(f'unknown goal {self.question.goal!r}; this model knows {", ".join(goals)}')
            key = index if branch.actions is not None else ('plan', branch.steps)
            different.setdefault(key, branch)
            self._places.append((branch.name, list(different).index(key)))
        return list(different.values())


@contextmanager
def _out_of_memory_explained() -> Iterator[None]:
    try:
        yield
    except OutOfPages as error:
        raise QuestionError(f'no memory is left to imagine in: {error}') from error

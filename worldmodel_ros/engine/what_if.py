"""
Questions of the kind *what if I did this*: asked from any thread, answered in units that a tick can come
between.
"""
from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..cache.allocator import OutOfPages
from .futures import OwnPlan

if TYPE_CHECKING:
    from .session import Future, Session


MAX_STEPS = 200  # of one branch in a request
MAX_BRANCHES = 32
DENOISING_STEPS = (1, 2)  # those that models are trained for


class QuestionError(ValueError):
    """A question that cannot be answered; the text says why and what to do."""


@dataclass(frozen=True)
class Branch:
    """
    One sequence to be imagined: `actions` (T, A) in SI units, or, where None, the model's own plan for
    `steps`.
    """

    name: str
    steps: int
    actions: np.ndarray | None = None


@dataclass(frozen=True)
class Question:
    """
    `due`: steady time by which the answer is wanted [s]. `stamp`: of the observation to branch from [ns], 0
    for the newest. `goal`: that the model's own plan is for. `denoising_steps` of each chunk: two give sharper
    images; one takes a quarter less time, and tells branches apart a little better (docs/training.md).
    """

    branches: tuple[Branch, ...]
    goal: str
    due: float
    stamp: int = 0
    denoising_steps: int = 2

    def __post_init__(self) -> None:
        """Raises QuestionError for one that could never be answered."""
        if not self.branches:
            raise QuestionError('the question has no branch: ask for at least one')
        if math.isnan(self.due):
            raise QuestionError('due is nan: give a steady time in s')
        if self.denoising_steps not in DENOISING_STEPS:
            raise QuestionError(f'{self.denoising_steps} denoising steps: models are trained for 1 or 2')


@dataclass
class Answer:
    """
    The branches that were finished, in the order of the question, each with its name and its Future of T
    frames.
    """

    stamp: int
    branches: list[tuple[str, Future]] = field(default_factory=list)
    complete: bool = False


class Inquiry:
    """
    A question on its way to its answer. All branches start from the observation that is the newest at the
    start.
    """

    def __init__(self, question: Question, session: Session, stamp: int) -> None:
        """`stamp`: of the newest observation of `session` [ns]. Raises QuestionError."""
        if question.stamp and question.stamp != stamp:
            raise QuestionError(f'observation_stamp {question.stamp / 1e9:.9f} is not the newest observation '
                                f'({stamp / 1e9:.9f}), and older ones are not kept: leave it zero')
        self.question = question
        self.answer = Answer(stamp)
        self._session, self._distinct = session, distinct(question, session.spec.goals)
        try:
            self._moment = session.moment()
        except OutOfPages as error:
            raise _no_memory(error) from error
        self._units: Generator[None, None, Future] | None = None  # of the first branch that is not finished
        self._futures: dict[int, Future] = {}

    def advance(self) -> bool:
        """Fork the session for a branch, or do one unit of its work, a network call; return whether the answer is
        complete."""
        index = len(self._futures)
        if self._units is None:
            branch = self._distinct.branches[index]
            self._units = self._session.what_if(actions_of(branch, self.question.goal), self.question.denoising_steps,
                                                self._moment)
        future = _next(self._units)
        if future is not None:
            self._futures[index], self._units = future, None
            self.answer.branches = self._distinct.answered(self._futures)
        self.answer.complete = len(self._futures) == len(self._distinct.branches)
        return self.answer.complete


@dataclass(frozen=True)
class Distinct:
    """The different branches of a question: what the model's own plan leads to is imagined once, however often it is
    asked for. `places`: which of them each branch of the question is, with its name."""

    branches: tuple[Branch, ...]
    places: tuple[tuple[str, int], ...]

    def answered(self, futures: Mapping[int, Future]) -> list[tuple[str, Future]]:
        """The branches of the question that are finished, by what is known of the different ones."""
        return [(name, futures[place]) for name, place in self.places if place in futures]


def distinct(question: Question, goals: Sequence[str]) -> Distinct:
    """Return the different branches of a question; raises QuestionError where a plan has no goal that is known."""
    different: dict[object, Branch] = {}
    places = []
    for index, branch in enumerate(question.branches):
        if branch.actions is None and not question.goal:
            raise QuestionError(
                f'branch {branch.name!r} is the plan for a goal, and there is none: set goal in the request')
        if branch.actions is None and question.goal not in goals:
            raise QuestionError(f'unknown goal {question.goal!r}; this model knows {", ".join(goals)}')
        key = index if branch.actions is not None else ('plan', branch.steps)
        different.setdefault(key, branch)
        places.append((branch.name, list(different).index(key)))
    return Distinct(tuple(different.values()), tuple(places))


def actions_of(branch: Branch, goal: str) -> np.ndarray | OwnPlan:
    """Return the actions of a branch, or what stands for the model's own plan where it gives none."""
    return OwnPlan(goal, branch.steps) if branch.actions is None else branch.actions


def _next(units: Generator[None, None, Future]) -> Future | None:
    try:
        next(units)
    except StopIteration as end:
        return end.value
    except OutOfPages as error:
        raise _no_memory(error) from error
    return None


def _no_memory(error: OutOfPages) -> QuestionError:
    return QuestionError(f'no memory is left to imagine in: {error}')

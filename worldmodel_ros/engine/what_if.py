"""
Questions of the kind *what if I did this*: asked from any thread, answered in units that a tick can come
between.
"""
from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..cache.allocator import OutOfPages

if TYPE_CHECKING:
    from .session import Future, Session


MAX_STEPS = 200  # of one branch that somebody else asks for
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
    pictures; one takes a quarter less time, and tells branches apart a little better (docs/training.md).
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
        self._running = [
            (branch.name, session.what_if(resolve(branch, question.goal, session), question.denoising_steps))
            for branch in question.branches]
        for _, units in self._running:
            _next(units)  # forks the session; the network calls begin with the second one

    def advance(self) -> bool:
        """Do one unit of work, a network call; return whether the answer is complete."""
        name, units = self._running[0]
        future = _next(units)
        if future is not None:
            self.answer.branches.append((name, future))
            del self._running[0]
        self.answer.complete = not self._running
        return self.answer.complete


def resolve(branch: Branch, goal: str, session: Session) -> np.ndarray:
    """Return the actions of a branch, those of the model's own plan where it gives none; raises QuestionError."""
    if branch.actions is not None:
        return branch.actions
    if not goal:
        raise QuestionError(
            f'branch {branch.name!r} is the plan for a goal, and there is none: set goal in the request')
    plan = session.plan(goal)[:branch.steps]
    # A plan is as long as a chunk; beyond it, its last action goes on.
    return np.concatenate([plan, np.repeat(plan[-1:], branch.steps - len(plan), 0)])


def _next(units: Generator[None, None, Future]) -> Future | None:
    try:
        next(units)
    except StopIteration as end:
        return end.value
    except OutOfPages as error:
        raise QuestionError(f'no memory is left to imagine in: {error}') from error
    return None

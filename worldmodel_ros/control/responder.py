"""Inputs and outputs of the control loop, and the rule between them: one answer per observation, none late."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .ladder import STEPS, Counts, Decision, Ladder, LastPlan, Settings, Tier, Verdict
from .task import Task

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Future
    from .deciding_worker import Decided

_REMEMBERED = 16  # answers; a prediction is published at most a few ticks after its observation was answered


@dataclass(frozen=True)
class Observation:
    """
    A frame for the session, uint8 (H, W, 3) RGB, with what is needed to answer it.

    ``stamp`` [ns] is that of the frame; ``received`` and ``due`` are steady times [s], ``due`` that by which the robot
    must have the answer; ``age`` is that of the frame on receipt [s]. It is not answered if ``stale`` says why that would be
    too late, nor without a ``goal`` or a ``task``; the latter is for workers that decide on a forecast of the scene.
    """

    image: np.ndarray
    stamp: int
    received: float
    due: float
    episode: int
    sequence: int
    goal: str = ''
    stale: str = ''
    task: Task = Task()
    age: float = 0.0
    spacing: float = 0.0  # s, between the camera's images, if there are several per tick to choose from
    moved: float = 0.0    # s, by which ticks come earlier because a server has asked for it

    @property
    def wants_answer(self) -> bool:
        return bool(self.goal or self.task.terms) and not self.stale

    @property
    def course(self) -> tuple[int, str, Task]:
        """What a plan is valid for: another episode, goal or task needs another plan."""
        return self.episode, self.goal, self.task

    @property
    def number(self) -> tuple[int, int]:
        """Identity of the observation, however its image is changed."""
        return self.episode, self.sequence


@dataclass(frozen=True)
class Answer:
    """
    The answer to an observation. Times in s.

    ``actions`` (T, A): the first is for now; None for a stop, and for tier NONE, which commands nothing.
    ``latency``: from the receipt of the observation; ``predicted``: the expected ``latency``. ``counts``: since the
    activation.
    """

    stamp: int
    episode: int
    sequence: int
    tier: Tier
    verdict: Verdict
    reason: str
    counts: Counts
    actions: np.ndarray | None = None
    budget: float = 0.0
    latency: float = 0.0
    predicted: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """
    An imagined and decoded future, and where the time went [s]: queue, encode, commit, policy, denoise,
    decode, total and predicted.

    ``tier`` is how it was imagined: TWO_STEP, ONE_STEP or SMALLER. ``command_tier`` is what the observation was answered
    with; if it is none of these three, the command left before this was ready. ``decided``: how the command was decided, if
    on a forecast of the scene.
    """

    observation: Observation
    tier: Tier
    command_tier: Tier
    future: Future
    timings: dict[str, float]
    decided: Decided | None = None


class OutputError(RuntimeError):
    """The model's output cannot be used."""


def require_finite(values: np.ndarray, what: str) -> np.ndarray:
    """Return a model's output if all of it is finite; else raise OutputError."""
    if not np.isfinite(values).all():
        raise OutputError(f'{what} is not finite')
    return values


class Listener(Protocol):
    """Receives results. Must return quickly, and must not call back."""

    def answered(self, answer: Answer) -> None:
        """Called as soon as a command, or its absence, is known; from any thread, one call at a time."""

    def predicted(self, prediction: Prediction) -> None:
        """Called with a predicted future and its images, after the command is out."""

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Called when something failed and was given up; ``restarted``: the session has started over."""


class Responder:
    """
    Arbitrates between the model thread and the deadline timer: the first of them to come answers.

    Thread-safe.
    """

    def __init__(self, listener: Listener, settings: Settings, step_period: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._listener, self._clock = listener, clock
        self._lock = threading.Lock()
        self._ladder = Ladder(settings)
        self._plan = LastPlan(step_period)
        self._newest: tuple[int, int] | None = None  # number of the newest observation
        self._course: tuple[int, str, Task] | None = None  # of the newest observation; the plan is for it
        self._open: Observation | None = None  # the one still to be answered
        self._finish = 0.0  # predicted, of the newest observation
        self._planned = 0.0  # when it had a plan
        self._decision: Decision | None = None  # on it, once it is being worked on
        # Number and tier of the last answers.
        self._served: deque[tuple[tuple[int, int], Tier]] = deque(maxlen=_REMEMBERED)

    @property
    def settings(self) -> Settings:
        return self._ladder.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        with self._lock:
            self._ladder.settings = settings

    @property
    def best(self) -> Tier:
        """The best tier allowed at present; STOP: the robot is kept at a stop until the model has been good again."""
        return self._ladder.best

    @property
    def counts(self) -> Counts:
        """Ticks by tier."""
        with self._lock:
            return replace(self._ladder.counts)

    def open(self, observation: Observation) -> None:
        """
        Make an observation the one to be answered; an earlier one that is still open gets tier NONE.

        Opening one again, when one engine hands it on to another, has no effect.
        """
        with self._lock:
            if observation.number == self._newest:
                return
            self._newest = observation.number
            if self._open:
                self._ladder.counts.late += 1  # not even ``overdue`` got to it: the worst overload
                self._answer(
                    self._open, Tier.NONE, Verdict.LATE, 'a newer observation came before it was answered')
            course = observation.course
            if course != self._course:
                self._course = course
                self._plan.forget()
            self._open = observation if observation.wants_answer else None
            self._finish = observation.due
            self._decision = None

    def close(self) -> None:
        """Leave the open observation unanswered."""
        with self._lock:
            self._open = None

    def decide(self, observation: Observation, begun: float,
               predict: Callable[[int], float]) -> Decision | None:
        """
        Choose the tier for work that has ``begun``; answer at once if the answer does not wait for the model.

        ``predict`` returns the duration of a tick with so many denoising steps [s]. None: only observe, without a
        prediction, since the observation is stale or a newer one has come.
        """
        with self._lock:
            limit = observation.due - self.settings.reserve
            if not observation.wants_answer:
                self._pass_over(observation)
                if observation.stale:
                    return None
                # No command, so nothing can be late; the future is imagined all the same.
                tier = next((t for t, steps in STEPS.items() if begun + predict(steps) <= limit), Tier.ONE_STEP)
                return Decision(tier, begun + predict(STEPS[tier]), limit, False, '')
            if not self._is_open(observation):
                return None
            decision = self._ladder.decide(
                begun, observation.due, predict, self._plan.has_action(observation.stamp))
            self._finish = decision.finish
            self._decision = decision
            if decision.tier is Tier.STOP:
                self._answer(observation, decision.tier, Verdict.DEGRADED, decision.reason)
            return decision

    def planned(self, observation: Observation, decision: Decision, plan: np.ndarray) -> None:
        """Take the plan (T, A) for an observation: the fallback from now on, if it was in time."""
        with self._lock:
            self._remember(observation, plan)
            if decision.tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN):
                self._answer(observation, decision.tier, Verdict.DEGRADED, decision.reason)

    def served(self, observation: Observation) -> Tier | None:
        """Return what an observation was answered with; None if it was not yet, or too long ago."""
        with self._lock:
            return next((tier for number, tier in reversed(self._served) if number == observation.number), None)

    def finished(self, observation: Observation, decision: Decision, plan: np.ndarray) -> None:
        """Note that the future of a plan has been imagined; answer with the plan if the answer waited for that."""
        with self._lock:
            verdict = Verdict.ON_TIME if decision.tier is Tier.TWO_STEP else Verdict.DEGRADED
            self._answer(observation, decision.tier, verdict, decision.reason, plan)
            self._ladder.finished(decision, self._planned if decision.tier is Tier.STOP else self._clock())

    def relay(self, observation: Observation, tier: Tier, finish: float, reason: str, plan: np.ndarray) -> bool:
        """
        Answer with the plan (T, A) that a remote engine has made by a ladder of its own; return whether it came in
        time. ``finish``: when that ladder expected to have it.
        """
        with self._lock:
            in_time = self._remember(observation, plan)
            if self._is_open(observation):
                self._finish = finish
                decision = self._ladder.relay(tier, self._planned, observation.due, reason)
                standing = decision.tier is Tier.STOP
                verdict = Verdict.ON_TIME if decision.tier is Tier.TWO_STEP else Verdict.DEGRADED
                self._answer(observation, decision.tier, verdict, decision.reason, None if standing else plan)
                self._ladder.finished(decision, self._planned)
            return in_time

    def bridge(self, observation: Observation, finish: float, reason: str) -> bool:
        """
        Answer with the last plan an observation that a remote engine refuses. Return False, without an answer, if the
        plan has no action left or the robot is kept at a stop.
        """
        with self._lock:
            if not self._is_open(observation):
                return True
            if self._ladder.best is Tier.STOP or not self._plan.has_action(observation.stamp):
                return False
            self._finish = finish
            decision = self._ladder.bridge(self._clock(), reason)
            self._answer(observation, decision.tier, Verdict.DEGRADED, decision.reason)
            return True

    def pass_over(self, observation: Observation) -> None:
        """Report an observation that wants no answer: it is stale, or there is no goal."""
        with self._lock:
            self._pass_over(observation)

    def overdue(self) -> None:
        """Answer the newest observation now, without the model, unless it has been answered."""
        with self._lock:
            observation = self._open
            if observation is None:
                return
            decision = self._ladder.overrun(
                self._decision, self._clock(), self._plan.has_action(observation.stamp))
            verdict = Verdict.DEGRADED if decision is self._decision else Verdict.LATE
            self._answer(observation, decision.tier, verdict, decision.reason)

    def fault(self, observation: Observation, reason: str) -> None:
        """Stop, after the model failed on an observation, until it has been good for a while."""
        with self._lock:
            self._ladder.fault(reason)
            self._plan.forget()
            if self._is_open(observation):
                self._answer(observation, Tier.STOP, Verdict.INVALID, reason)
            else:
                self._report(observation, Verdict.INVALID, reason)

    def halt(self, answer: Answer) -> None:
        """Stop without an observation: ``answer`` goes out as it is, and the open observation is dropped."""
        with self._lock:
            self._open = None
            self._plan.forget()
            self._ladder.counts.served(answer.tier)
            self._listener.answered(replace(answer, counts=replace(self._ladder.counts)))

    def forget_plan(self) -> None:
        """Drop the plan, which was made from another past."""
        with self._lock:
            self._plan.forget()

    def _is_open(self, observation: Observation) -> bool:
        return self._open is not None and self._open.number == observation.number

    def _remember(self, observation: Observation, plan: np.ndarray) -> bool:
        """Return whether a plan is in time. If so, it becomes the last plan, unless another goal was set meanwhile."""
        self._planned = self._clock()
        in_time = self._planned <= observation.due - self.settings.reserve
        if in_time and observation.course == self._course:
            self._plan.remember(plan, observation.stamp)
        return in_time

    def _pass_over(self, observation: Observation) -> None:
        if observation.stale:
            self._report(observation, Verdict.STALE_INPUT, observation.stale)
        else:
            self._report(observation, Verdict.IDLE, 'no goal')

    def _answer(self, observation: Observation, tier: Tier, verdict: Verdict, reason: str,
                plan: np.ndarray | None = None) -> None:
        if not self._is_open(observation):
            return
        self._open = None
        actions = plan
        if tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN):
            # The decision was a prediction; serve and report the plan that there is.
            actions = self._plan.rest(observation.stamp)
            if actions is None:
                tier = Tier.STOP
            elif self._plan.is_of(observation.stamp):
                tier, reason = Tier.PLAN_ONLY, f'{reason}; a plan alone is in time'
            else:
                tier, reason = Tier.LAST_PLAN, f'{reason}; the last plan goes on'
        # Half of the reserve covers lateness of the fallback, the other half is for what comes after.
        last = observation.due - self.settings.reserve / 2
        if tier not in (Tier.STOP, Tier.NONE) and self._clock() > last:
            self._ladder.counts.late += verdict is not Verdict.LATE
            tier, verdict, actions = Tier.NONE, Verdict.LATE, None
            reason = 'even the fallback would have been late: the machine is overloaded; nothing is commanded'
        self._ladder.counts.served(tier)
        self._served.append((observation.number, tier))
        self._report(observation, verdict, reason, tier, actions)

    def _report(self, observation: Observation, verdict: Verdict, reason: str, tier: Tier = Tier.NONE,
                actions: np.ndarray | None = None) -> None:
        received = observation.received
        self._listener.answered(Answer(
            observation.stamp, observation.episode, observation.sequence, tier, verdict, reason,
            replace(self._ladder.counts), actions, observation.due - received, self._clock() - received,
            self._finish - received))

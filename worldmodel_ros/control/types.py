"""What goes into the control loop and what comes out of it: observations, answers, predictions."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .ladder import Counts, Tier, Verdict

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Future


@dataclass(frozen=True)
class Observation:
    """
    A frame for the session, uint8 (H, W, 3) RGB, with what its answer needs.

    `stamp` [ns] is its own; `received` and `due` are steady times [s], the latter that by which the robot
    must have the answer. No answer is made where `stale` says why it would be too late, nor without a `goal`.
    """

    image: np.ndarray
    stamp: int
    received: float
    due: float
    episode: int
    sequence: int
    goal: str = ''
    stale: str = ''

    @property
    def wants_answer(self) -> bool:
        return bool(self.goal) and not self.stale

    @property
    def number(self) -> tuple[int, int]:
        """Which one it is, whatever becomes of its image on the way."""
        return self.episode, self.sequence


@dataclass(frozen=True)
class Answer:
    """
    What an observation is answered with. Times in s.

    `actions` (T, A): the first is for now; None for a stop, and for tier NONE, which commands nothing.
    `latency`: from the receipt of the observation; `predicted`: what `latency` was expected to be. `counts`:
    since the activation.
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

    `tier` is how it was imagined: TWO_STEP, ONE_STEP or SMALLER. `command_tier` is what the observation was answered
    with; where that is none of these three, the command left before this was ready.
    """

    observation: Observation
    tier: Tier
    command_tier: Tier
    future: Future
    timings: dict[str, float]


class Listener(Protocol):
    """Where results go. Must return quickly, and must not call back."""

    def answered(self, answer: Answer) -> None:
        """A command, or its absence: called as soon as it is known, from any thread, one at a time."""

    def predicted(self, prediction: Prediction) -> None:
        """A predicted future with its pictures, after the command is out."""

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Something failed and was given up; `restarted`: the session has begun anew."""

"""Chooses a plan by its outcome: several are imagined, and the best is taken."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.motion import MANEUVERS, maneuver

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Future, Session

_TURN = 0.5   # rad/s that variations of the plan turn more to either side
_SLOW = 0.5   # share of the plan's speed in the slower variation


@dataclass(frozen=True)
class PlannerSettings:
    """``contact_cost``: m of progress that a certain contact outweighs. ``margin``: m by which another branch must beat
    the policy's own plan, which knows more than the outcome of one chunk shows. ``steps``: of denoising."""

    contact_cost: float = 0.5
    margin: float = 0.1
    steps: int = 2


@dataclass(frozen=True)
class Choice:
    """The branch that was taken, by name, and the score (m) of each."""

    name: str
    future: Future
    scores: dict[str, float]


class Planner:
    """Has a session imagine the policy's plan, variations of it and the maneuvers.

    For a differential-drive base, whose actions are linear.x [m/s] and angular.z [rad/s]. A choice takes as long as
    imagining that many chunks, more than a tick has on two cores: for GPUs, or for slower decisions.
    """

    def __init__(self, session: Session, settings: PlannerSettings = PlannerSettings()) -> None:
        self._session, self._settings = session, settings

    def choose(self, goal: str) -> Choice:
        """Return the best branch towards ``goal`` from the newest observation."""
        branches = candidates(self._session.plan(goal), self._session.spec)
        futures = {name: self._session.imagine(actions, self._settings.steps) for name, actions in branches.items()}
        scores = {name: self._score(future, goal) for name, future in futures.items()}
        best = max(scores, key=scores.__getitem__)
        if scores[best] < scores['plan'] + self._settings.margin:
            best = 'plan'
        return Choice(best, futures[best], scores)

    def _score(self, future: Future, goal: str) -> float:
        # Risks of successive steps are not independent: take the highest.
        return future.progress[goal] - self._settings.contact_cost * float(future.collision_risk.max())


def candidates(plan: np.ndarray, spec) -> dict[str, np.ndarray]:
    """Return action sequences (K, 2) by name: the ``plan`` (K, 2) itself, variations of it, and the maneuvers."""
    found = {'plan': plan, 'slower': plan * np.float32((_SLOW, 1.0)), 'more left': plan + np.float32((0.0, _TURN)),
             'more right': plan - np.float32((0.0, _TURN)), **{name: maneuver(name, len(plan)) for name in MANEUVERS}}
    return {name: np.clip(actions, spec.action_low, spec.action_high).astype(np.float32)
            for name, actions in found.items()}

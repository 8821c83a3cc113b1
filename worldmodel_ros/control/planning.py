"""Choosing a command by what it would lead to: several are imagined, and the one of the best outcome is taken."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.motion import MANEUVERS, maneuver

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Future, Session

_TURN = 0.5   # rad/s, that variations of the plan turn more to either side
_SLOW = 0.5   # share of the plan's speed that a slower variation keeps


@dataclass(frozen=True)
class PlannerSettings:
    """``contact_cost``: m of progress that a certain contact outweighs. ``margin``: m by which another branch must be
    better than the policy's own plan, which knows more than a chunk's outcome tells. ``steps``: of denoising."""

    contact_cost: float = 0.5
    margin: float = 0.1
    steps: int = 2


@dataclass(frozen=True)
class Choice:
    """The branch that was taken, by its name, and the ``score`` (m) of each."""

    name: str
    future: Future
    scores: dict[str, float]


class Planner:
    """Asks a session *what if* for the policy's plan, for variations of it and for the maneuvers.

    For a differential-drive base, whose actions are linear.x [m/s] and angular.z [rad/s]. A question takes as long as
    imagining that many chunks, which is more than a tick has on two cores: for GPUs, and for slower decisions.
    """

    def __init__(self, session: Session, settings: PlannerSettings = PlannerSettings()) -> None:
        self._session, self._settings = session, settings

    def choose(self, goal: str) -> Choice:
        """The best branch towards ``goal`` from the newest observation."""
        branches = candidates(self._session.plan(goal), self._session.spec)
        futures = {name: self._session.imagine(actions, self._settings.steps) for name, actions in branches.items()}
        scores = {name: self._score(future, goal) for name, future in futures.items()}
        best = max(scores, key=scores.__getitem__)
        if scores[best] < scores['plan'] + self._settings.margin:
            best = 'plan'
        return Choice(best, futures[best], scores)

    def _score(self, future: Future, goal: str) -> float:
        # Steps share what they see: the likeliest contact stands for all.
        return future.progress[goal] - self._settings.contact_cost * float(future.collision_risk.max())


def candidates(plan: np.ndarray, spec) -> dict[str, np.ndarray]:
    """Action sequences (K, 2) by name: the ``plan`` (K, 2) itself, variations of it, and the maneuvers."""
    found = {'plan': plan, 'slower': plan * np.float32((_SLOW, 1.0)), 'more left': plan + np.float32((0.0, _TURN)),
             'more right': plan - np.float32((0.0, _TURN)), **{name: maneuver(name, len(plan)) for name in MANEUVERS}}
    return {name: np.clip(actions, spec.action_low, spec.action_high).astype(np.float32)
            for name, actions in found.items()}

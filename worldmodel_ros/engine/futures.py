"""What a session gives: what it imagines, what it plans ahead, and what it had seen."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cache.sequence import SequenceCache


@dataclass
class Future:
    """An imagined chunk of T frames under ``actions`` (T, A), SI units.

    latents (T, h, w, Z); collision_risk (T,) in [0, 1], probability of a contact within each step; progress, per goal,
    the expected decrease (m) of the distance to it over the whole chunk; frames uint8 (T, H, W, 3) once decoded.
    """

    actions: np.ndarray
    latents: np.ndarray
    collision_risk: np.ndarray
    progress: dict[str, float]
    before: np.ndarray  # (h, w, Z), the latent that the first frame follows
    frames: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Moment:
    """What a session had seen by frame ``time``, whose latent is ``latent`` and whose features (P, D) are ``features``.
    ``sinks``: latent (h, w, Z) and action (A,) of each of the last ``Preset.kept_frames``; the first frame of all stands
    for those that never were. ``imagined``: frames up to ``time`` that were not observed, at the end of a branch."""

    cache: SequenceCache
    time: int
    latent: np.ndarray
    sinks: tuple[tuple[np.ndarray, np.ndarray], ...]
    features: np.ndarray
    imagined: int = 0


@dataclass(frozen=True)
class OwnPlan:
    """Stands for the actions of a branch: the model's own plan for a goal, of which the last action goes on until
    ``steps``."""

    goal: str
    steps: int

    def __len__(self) -> int:
        return self.steps

    def actions(self, plan: np.ndarray) -> np.ndarray:
        """Actions (steps, A) by the plan of a chunk."""
        plan = plan[:self.steps]
        return np.concatenate([plan, np.repeat(plan[-1:], self.steps - len(plan), 0)])


@dataclass(frozen=True)
class LookAhead:
    """A plan, and the future under it; each call waits for what it returns. The plan is to be asked for first."""

    plan: Callable[[], np.ndarray]
    future: Callable[[], Future]

"""Results of a session: imagined futures, plans, and snapshots to branch from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cache.sequence import SequenceCache


@dataclass
class Future:
    """An imagined chunk of T frames under ``actions`` (T, A), SI units.

    latents (T, h, w, Z); collision_risk (T,) in [0, 1], probability of a contact within each step; progress, per goal,
    the expected decrease (m) of the distance to it, over whole chunks, also where ``actions`` end
    within one; frames uint8 (T, H, W, 3) once decoded.
    """

    actions: np.ndarray
    latents: np.ndarray
    collision_risk: np.ndarray
    progress: dict[str, float]
    before: np.ndarray  # (h, w, Z), the latent that the first frame follows
    frames: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Moment:
    """What a session had seen by frame ``time``, with that frame's ``latent`` and ``features`` (P, D). ``sinks``: latent
    (h, w, Z) and action (A,) of each of the last ``Preset.kept_frames``; where there were fewer frames, the very first is
    repeated. ``imagined``: how many of the last frames up to ``time`` were not observed, at the end of a branch.

    Only of a session that keeps anchors (``engine.anchors``): these, and ``pose``, x and y [m] and heading [rad] relative to
    the first frame, as the actions give it."""

    cache: SequenceCache
    time: int
    latent: np.ndarray
    sinks: tuple[tuple[np.ndarray, np.ndarray], ...]
    features: np.ndarray
    imagined: int = 0
    pose: tuple[float, float, float] = (0.0, 0.0, 0.0)
    anchors: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class OwnPlan:
    """Stands for the actions of a branch: the model's own plan for a goal, its last action repeated up to ``steps``."""

    goal: str
    steps: int

    def __len__(self) -> int:
        return self.steps

    def actions(self, plan: np.ndarray) -> np.ndarray:
        """Return actions (steps, A) from the plan of a chunk."""
        plan = plan[:self.steps]
        return np.concatenate([plan, np.repeat(plan[-1:], self.steps - len(plan), 0)])


@dataclass(frozen=True)
class LookAhead:
    """A plan and the future under it; each call waits for what it returns. Call ``plan`` first."""

    plan: Callable[[], np.ndarray]
    future: Callable[[], Future]

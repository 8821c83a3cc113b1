"""What to judge, and the definitions of the result's terms."""
from __future__ import annotations

from dataclasses import dataclass

from ...sim.behaviour import DEFAULT_MIX
from .drift import SECONDS as DRIFT_SECONDS
from .seeds import QualityError, require_unseen

PARTS = ('horizons', 'what_if', 'drift', 'closed_loop')
MIN_DRIFT_SECONDS = 4.0

DEFINITIONS = {
    'drives': 'by the drivers of the training data: ' + ', '.join(f'{n} {share:g}' for n, share in DEFAULT_MIX.items()),
    'moments': 'starts after 8 pictures more than a window, from which the robot really moves in most steps up to the horizon',
    'bearing': 'of the goal of the expert, the same from start to horizon, visible in the true picture; median '
               'absolute error; 90 degrees for one that is not found; all_objects: every visible object of every drive',
    'teacher': 'the flow in 32 steps; truncated, truncated_one_step: the same flow in 2 steps and in 1',
    'deployed': 'sessions on the back end named next to it, against float32 in two_step and one_step; none: it is float32',
    'simulator': 'run again from the true state under the same commands, each with the mean latency instead of its '
                 'own; nominal_gains: and without knowing how the wheels differ',
    'action_response': 'median over the steps that turn of pixels that the picture moves sideways for each rad/s',
    'what_if_ranking': 'share of true branches whose nearest imagined one, in PSNR, is their own, in two steps',
}


@dataclass(frozen=True)
class Task:
    """``model``, ``teacher``: shipped models or folders; no teacher: the model's own flow, in 32 steps. ``backend``: what
    robots run, which drives the closed loop and is compared with float32. ``dreams``: number of rooms with a long rollout,
    the first ones; one takes as long as all the rest of a room."""

    seeds: range
    model: str = 'tiny'
    teacher: str | None = None
    backend: str = 'auto'
    parts: tuple[str, ...] = PARTS
    drift_seconds: float = DRIFT_SECONDS
    dreams: int = 4

    def __post_init__(self) -> None:
        require_unseen(self.seeds)
        if self.drift_seconds < MIN_DRIFT_SECONDS:
            raise QualityError(f'a rollout of {self.drift_seconds:g} s is too short to compare its beginning with its '
                               f'end: give at least {MIN_DRIFT_SECONDS:g} s')
        if self.dreams < 1:
            raise QualityError(f'{self.dreams} long rollouts cannot be judged: ask for at least 1, or leave out drift')
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise QualityError(f'parts {", ".join(unknown) or "are none"}: choose from {", ".join(PARTS)}')

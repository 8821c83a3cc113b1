"""Chooses a command by what it would lead to: candidates are a short manoeuvre, then the policy, in a forecast scene.

Constant actions to the horizon make every future of a moving scene look like a collision, and a robot that sees only those
stands still; 0.4 to 0.8 s of manoeuvre, followed by the policy, does not (docs/tasks.md).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.control.terms import Outcome, Term, Thing, score
from . import policy
from .forecast import View
from .motion import PERIOD, limited, move, under_way


@dataclass(frozen=True)
class Candidate:
    """`hold`: command (m/s, rad/s) of the first `steps` steps; then the policy drives to where its target will be `lead`
    s later."""

    name: str
    lead: float = 0.0
    hold: tuple[float, float] = (0.0, 0.0)
    steps: int = 0


def _held(name: str, v: float, w: float, steps: int) -> Candidate:
    return Candidate(f'{name} {steps * PERIOD:.1f} s', 0.0, (v, w), steps)


CANDIDATES = (
    Candidate('policy'), *(Candidate(f'lead {lead:.1f} s', lead) for lead in (0.4, 0.8, 1.2, 1.6)),
    _held('stop', 0.0, 0.0, 4), _held('stop', 0.0, 0.0, 8), _held('back', -0.3, 0.0, 4), _held('back', -0.3, 0.0, 8),
    _held('ahead', 0.6, 0.0, 4), _held('ahead', 0.6, 0.0, 8), _held('left', 0.4, 1.2, 4), _held('left', 0.4, 1.2, 8),
    _held('right', 0.4, -1.2, 4), _held('right', 0.4, -1.2, 8), _held('slow', 0.2, 0.0, 8))


@dataclass(frozen=True)
class PlannerSettings:
    """`horizon`: s of imagined future; `margin`: of score by which another candidate must beat what is followed now."""

    horizon: float = 2.0
    margin: float = 0.02
    candidates: tuple[Candidate, ...] = CANDIDATES


@dataclass(frozen=True)
class Decision:
    """`command` (2,), m/s and rad/s; the name of the candidate that it is of, and each candidate's score."""

    command: np.ndarray
    name: str
    scores: dict[str, float]


class Planner:
    """Decides once a tick; one for each episode."""

    def __init__(self, settings: PlannerSettings = PlannerSettings()) -> None:
        self._settings = settings
        self._last: Candidate | None = None
        self._search = policy.Search()

    def times(self, delay: float) -> np.ndarray:
        """The times (T,), s from the observation on, at which a view is needed: 0, and from `delay` on each PERIOD."""
        return np.concatenate([[0.0], delay + PERIOD * np.arange(round(self._settings.horizon / PERIOD) + 1)])

    def choose(self, terms: Sequence[Term], view: View, sent: list[tuple[float, np.ndarray]], previous: np.ndarray
               ) -> Decision:
        """The first command of the best candidate.

        `view`: at `times(delay)`. `sent`: commands (2,) that hold until this one takes effect, with the seconds that each
        does. `previous` (2,): the newest of them, which the limits of acceleration count from.
        """
        aim = policy.Aim.of(terms)
        pose, twist = under_way(view.pose, view.twist, sent)
        if aim.target not in view.things:
            self._last = None
            places = np.array([thing.path[-1] for thing in view.things.values()]).reshape(-1, 2)
            radii = np.array([thing.radius for thing in view.things.values()])
            return Decision(self._search.command(pose, places, radii, view.walls, PERIOD), 'search', {})
        self._search.found()
        followed = self._last and Candidate('followed', self._last.lead, self._last.hold, max(0, self._last.steps - 1))
        candidates = (*((followed,) if followed else ()), *self._settings.candidates)
        times = self.times(sum(seconds for seconds, _ in sent))
        poses, first = imagine(aim, candidates, view, pose, twist, previous, len(times) - 1)
        poses = np.concatenate([np.broadcast_to(view.pose, (len(poses), 1, 3)), poses], 1)
        scores = score(terms, Outcome(times, poses, view.things, view.walls))
        best = int(scores.argmax())
        # Candidate 0 is what is followed now: changing for nothing makes the robot waver.
        if scores[0] >= scores[best] - self._settings.margin:
            best = 0
        self._last = candidates[best]
        return Decision(first[best], candidates[best].name,
                        {candidate.name: float(value) for candidate, value in zip(candidates, scores, strict=True)})


def imagine(aim: policy.Aim, candidates: Sequence[Candidate], view: View, pose: np.ndarray, twist: np.ndarray,
            previous: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Poses (C, steps, 3) of the robot from `pose` on, at the view's times after the first, and first commands (C, 2)."""
    count = len(candidates)
    leads = np.array([round(candidate.lead / PERIOD) for candidate in candidates])
    holds = np.array([candidate.hold for candidate in candidates], float)
    held = np.array([candidate.steps for candidate in candidates])
    path, others, radii = scene_of(aim, view)
    poses, twists, commands = np.tile(pose, (count, 1)), np.tile(twist, (count, 1)), np.tile(previous, (count, 1))
    found, first = [poses], commands
    for step in range(steps - 1):
        target = path[np.minimum(step + 1 + leads, steps)]
        reaction = policy.drive(aim, poses, target, others[:, step + 1], radii, view.walls)
        commands = limited(np.where((step < held)[:, None], holds, reaction), commands)
        if step == 0:
            first = commands
        poses, twists = move(poses, twists, commands, PERIOD)
        found.append(poses)
    return np.stack(found, 1), first


def scene_of(aim: policy.Aim, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Path (T, 2) of the target, and of all else paths (N, T, 2) and radii (N,), wider where the task wants it."""
    others = {name: thing for name, thing in view.things.items() if name != aim.target}
    path = view.things[aim.target].path
    paths = np.array([thing.path for thing in others.values()]).reshape(len(others), len(path), 2)
    return path, paths, np.array([thing.radius + _wider(aim, name, thing) for name, thing in others.items()])


def _wider(aim: policy.Aim, name: str, thing: Thing) -> float:
    return max((margin for what, margin in aim.wide.items() if what in (name, thing.colour)), default=0.0)

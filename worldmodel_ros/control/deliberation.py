"""Chooses a command by its outcome: each candidate is a short manoeuvre followed by the policy, in a forecast scene.

With constant actions up to the horizon every future in a moving scene looks like a collision, and the robot stands still;
with 0.4 to 0.8 s of manoeuvre followed by the policy it does not (docs/task_results.md).
"""
from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache

import numpy as np

from worldmodel_ros.motion import LIMITS, PERIOD, Limits, limited, move, under_way
from . import reactive_policy as policy
from .scene_view import View, with_places
from .terms import Avoid, Outcome, Term, Thing, Touch, utilities


@dataclass(frozen=True)
class Candidate:
    """``hold``: command (m/s, rad/s) for the first ``steps`` steps, a PERIOD each, the last perhaps in part; after that the
    policy drives to where its target will be ``lead`` s later."""

    name: str
    lead: float = 0.0
    hold: tuple[float, float] = (0.0, 0.0)
    steps: float = 0


def _held(name: str, v: float, w: float, steps: int) -> Candidate:
    return Candidate(f'{name} {steps * PERIOD:.1f} s', 0.0, (v, w), steps)


CANDIDATES = (
    Candidate('policy'), *(Candidate(f'lead {lead:.1f} s', lead) for lead in (0.4, 0.8, 1.2, 1.6)),
    _held('stop', 0.0, 0.0, 4), _held('stop', 0.0, 0.0, 8), _held('back', -0.3, 0.0, 4), _held('back', -0.3, 0.0, 8),
    _held('ahead', 0.6, 0.0, 4), _held('ahead', 0.6, 0.0, 8), _held('left', 0.4, 1.2, 4), _held('left', 0.4, 1.2, 8),
    _held('right', 0.4, -1.2, 4), _held('right', 0.4, -1.2, 8), _held('slow', 0.2, 0.0, 8))


_log = logging.getLogger(__name__)
WALL = 'wall'  # name of a contact with a wall
_BEST, _EACH = 4, 4  # later rounds: candidates to draw around, and draws around each
_LEAD_STEP, _HOLD_STEP = 0.3, (0.15, 0.4)  # s; m/s and rad/s: standard deviations of these draws
FEWEST = 4  # candidates of a decision on the slowest machine
_BY_WORTH = ('policy', 'lead 0.8 s', 'stop 0.4 s', 'back 0.8 s', 'left 0.4 s', 'right 0.4 s', 'lead 1.6 s', 'stop 0.8 s',
             'ahead 0.8 s', 'lead 0.4 s', 'left 0.8 s', 'right 0.8 s', 'lead 1.2 s', 'slow 0.8 s', 'back 0.4 s',
             'ahead 0.4 s')


class Effort(Enum):
    """How candidates are compared: in one round; in three, each around the best of those before; or in one round imagined
    farther ahead. The values are suffixes of the names of the measured times."""

    ONE_ROUND = ''
    THREE_ROUNDS = ' thrice'
    FARTHER = ' farther'

    @classmethod
    def of(cls, terms: Sequence[Term], steps: int) -> Effort | None:
        """Return what so many steps are spent on; None if nothing is compared. Two steps buy two more rounds if something is
        to be touched, since the last decimetre counts; else a longer horizon, which shows that waiting pays, unless something
        is to be avoided, for which that did harm (docs/task_results.md)."""
        if steps < 2:
            return cls.ONE_ROUND if steps else None
        if any(isinstance(term, Touch) for term in terms):
            return cls.THREE_ROUNDS
        return cls.ONE_ROUND if any(isinstance(term, Avoid) for term in terms) else cls.FARTHER

    @property
    def rounds(self) -> int:
        """Number of rounds of candidates."""
        return 3 if self is Effort.THREE_ROUNDS else 1


def candidates_by_worth(count: int) -> tuple[Candidate, ...]:
    """Return ``count`` of CANDIDATES in their order, chosen so that each kind comes before a second one of any kind."""
    chosen = set(_BY_WORTH[:max(1, count)])
    return tuple(candidate for candidate in CANDIDATES if candidate.name in chosen)


@dataclass(frozen=True)
class Veto:
    """A confidently predicted contact, with a wall or a thing that is there with probability ``presence`` or more: ``within``
    so many s after the command takes effect (about the robot's stopping time), by at least ``overlap`` m, and at least
    ``approach`` m nearer than at that moment."""

    within: float = 0.6
    overlap: float = 0.05
    approach: float = 0.02
    presence: float = 0.8

    def of(self, terms: Sequence[Term], outcome: Outcome) -> list[str]:
        """Return what each candidate has such a contact with: a name, 'wall', or '' for none. What the terms want touched does
        not count. The command takes effect at the second of the times."""
        wanted = {term.target for term in terms if isinstance(term, Touch)}
        count = 1 + int((outcome.times[1:] <= outcome.times[1] + self.within + 1e-9).sum())
        gaps = {WALL: outcome.wall_gap()[:, 1:count]}
        gaps |= {name: outcome.gap(name)[:, 1:count] for name, thing in outcome.things.items()
                 if thing.solid and name not in wanted and thing.presence >= self.presence}
        least, first = np.min(list(gaps.values()), 2), np.array(list(gaps.values()))[:, :, 0]
        contacts = (least <= -self.overlap) & (least <= first - self.approach)
        names = list(gaps)
        return [names[int(np.where(hit, gap, np.inf).argmin())] if hit.any() else ''
                for hit, gap in zip(contacts.T, least.T, strict=True)]


@dataclass(frozen=True)
class Settings:
    """``horizon``: s of imagined future, ``far_horizon``: the same for ``Effort.FARTHER``; ``margin``: score by which another
    candidate must beat the one followed now; ``veto``: what forbids a candidate, None for no veto; ``limits``: of the base;
    ``period``: s between two decisions."""

    horizon: float = 2.0
    far_horizon: float = 3.0
    margin: float = 0.02
    candidates: tuple[Candidate, ...] = CANDIDATES
    veto: Veto | None = None
    limits: Limits = LIMITS
    period: float = PERIOD


@dataclass(frozen=True)
class Decision:
    """The chosen command, and how the candidates compared.

    ``command`` (2,), m/s and rad/s; the ``name`` of its candidate, and each candidate's score by name. ``commands`` (T, 2):
    those of the chosen candidate, a PERIOD apart; ``command`` is the first. ``poses`` (C, T, 3): of each candidate, in the
    frame of the view, at ``times`` (T,), s from the observation on; empty if nothing was compared. ``vetoed``: by name, the
    candidates ruled out for a contact, and what that is with. ``utilities`` (K, C): of each term for each candidate; they sum
    to its score.
    """

    command: np.ndarray
    name: str
    scores: dict[str, float]
    commands: np.ndarray
    poses: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 3)))
    times: np.ndarray = field(default_factory=lambda: np.zeros(0))
    vetoed: Mapping[str, str] = field(default_factory=dict)
    utilities: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class Question:
    """What candidates are compared on: the task's ``terms`` and ``aim``; ``view`` at ``times`` (T,), s from the observation on;
    ``pose`` (3,) and ``twist`` (2,) when the command takes effect, and the ``previous`` command (2,), in force until then."""

    terms: Sequence[Term]
    aim: policy.Aim
    view: View
    times: np.ndarray
    pose: np.ndarray
    twist: np.ndarray
    previous: np.ndarray


@dataclass(frozen=True)
class Compared:
    """Outcomes of candidates: ``poses``, ``commands`` (C, T - 1, 2), ``worth`` (K, C) as ``Decision.utilities``, and
    ``contacts``: what each has a vetoed contact with, '' for none."""

    candidates: tuple[Candidate, ...]
    poses: np.ndarray
    commands: np.ndarray
    worth: np.ndarray
    contacts: Sequence[str]

    @property
    def best(self) -> int:
        """Index of the highest-scoring candidate, among those without a veto if there are any."""
        return int(self._scores.argmax())

    @property
    def _scores(self) -> np.ndarray:
        return np.where([name != '' for name in self.contacts], -np.inf, self.worth.sum(0))

    def around_best(self, number: int) -> list[Candidate]:
        """Return candidates drawn around the best _BEST of these, _EACH around each, as in iteration ``number``, from 1 on, of
        the cross-entropy method; the same draws at every tick."""
        rng, found = np.random.default_rng(number - 1), []
        for at in np.argsort(-self._scores)[:_BEST].tolist():
            near = self.candidates[at]
            for each in range(_EACH):
                lead = max(0.0, near.lead + rng.normal(0.0, _LEAD_STEP))
                v, w = rng.normal(near.hold if near.steps else self.commands[at, 0], _HOLD_STEP).tolist()
                steps = max(0, near.steps + int(rng.integers(-2, 3))) if near.steps else int(rng.integers(0, 4))
                found.append(Candidate(f'{near.name} {number}.{each + 1}', lead, (v, w), steps))
        return found

    def joined(self, other: Compared) -> Compared:
        """Return these candidates together with others."""
        return Compared(self.candidates + other.candidates, np.concatenate([self.poses, other.poses]),
                        np.concatenate([self.commands, other.commands]), np.concatenate([self.worth, other.worth], 1),
                        [*self.contacts, *other.contacts])


class Deliberation:
    """Decides once a tick, by ``settings``; one for each robot and episode."""

    def __init__(self, settings: Settings = Settings()) -> None:
        self.settings = settings
        self._last: Candidate | None = None
        self._target = ''
        self._search = policy.Search()

    def times(self, delay: float, effort: Effort = Effort.ONE_ROUND) -> np.ndarray:
        """Return the times (T,), s from the observation on, that a view needs: 0, then each PERIOD from ``delay`` on."""
        return np.concatenate([[0.0], delay + PERIOD * np.arange(self._steps(effort) + 1)])

    def _steps(self, effort: Effort = Effort.ONE_ROUND) -> int:
        horizon = self.settings.far_horizon if effort is Effort.FARTHER else self.settings.horizon
        return round(horizon / PERIOD)

    def choose(self, terms: Sequence[Term], view: View, sent: list[tuple[float, np.ndarray]], previous: np.ndarray,
               candidates: Sequence[Candidate] | None = None, effort: Effort = Effort.ONE_ROUND) -> Decision:
        """Return the best candidate that is not vetoed, else a stop.

        ``view``: at ``times(delay, effort)``. ``sent``: commands (2,) in force until this one takes effect, each with its
        duration in s. ``previous`` (2,): the newest of them, the reference for acceleration limits. ``candidates``: replace
        those of the settings.
        """
        times = self.times(sum(seconds for seconds, _ in sent), effort)
        view = with_places(view, terms, len(times))
        aim = self._aim(terms, view)
        pose, twist = under_way(view.pose, view.twist, sent)
        if aim.target not in view.things:
            self._last = None
            return self._look_for_it(pose, view, previous)
        self._search.found()
        over = self.settings.period / PERIOD
        followed = self._last and replace(self._last, name='followed', steps=max(0, self._last.steps - over))
        candidates = (*((followed,) if followed else ()), *(candidates or self.settings.candidates))
        question = Question(terms, aim, view, times, pose, twist, previous)
        found = self.rounds(question, candidates, effort.rounds)
        scores = found.worth.sum(0)
        named = {candidate.name: float(value) for candidate, value in zip(found.candidates, scores, strict=True)}
        vetoed = {candidate.name: name for candidate, name in zip(found.candidates, found.contacts, strict=True) if name}
        if len(vetoed) == len(found.candidates):
            self._last = None
            stop = self._stop(previous)
            return Decision(stop[0], 'veto', named, stop, found.poses, times, vetoed, found.worth)
        best = found.best
        # Candidate 0 is the one followed now: switching for no gain makes the robot waver.
        if not found.contacts[0] and scores[0] >= scores[best] - self.settings.margin:
            best = 0
        self._last = found.candidates[best]
        return Decision(found.commands[best, 0], found.candidates[best].name, named, found.commands[best], found.poses, times,
                        vetoed, found.worth)

    def rounds(self, question: Question, candidates: Sequence[Candidate], count: int) -> Compared:
        """Compare candidates in ``count`` rounds, each later one around the best of those before."""
        found = self.compare(question, candidates)
        for number in range(1, count):
            found = found.joined(self.compare(question, found.around_best(number)))
        return found

    def compare(self, question: Question, candidates: Sequence[Candidate]) -> Compared:
        """Return the outcomes of candidates."""
        view, times = question.view, question.times
        poses, commands = imagine(question.aim, candidates, view, question.pose, question.twist, question.previous,
                                  len(times) - 1, self.settings.limits)
        poses = np.concatenate([np.broadcast_to(view.pose, (len(poses), 1, 3)), poses], 1)
        outcome = Outcome(times, poses, view.things, view.walls)
        veto = self.settings.veto
        contacts = veto.of(question.terms, outcome) if veto else [''] * len(candidates)
        return Compared(tuple(candidates), poses, commands, utilities(question.terms, outcome), contacts)

    def react(self, terms: Sequence[Term], view: View, previous: np.ndarray, steps: int) -> Decision:
        """Return what the policy does for ``steps`` periods without a forecast: everything stays where it is at the first time
        of ``view``, the present. Neither motion nor delay is compensated: one without the other is worse than none."""
        view = with_places(view, terms, 1)
        aim = self._aim(terms, view)
        self._last = None
        if aim.target not in view.things:
            return self._look_for_it(view.pose, view, previous)
        self._search.found()
        still = {name: replace(thing, path=np.tile(thing.path[0], (steps + 2, 1))) for name, thing in view.things.items()}
        _, commands = imagine(aim, CANDIDATES[:1], View(view.pose, view.twist, still, view.walls), view.pose, view.twist,
                              previous, steps + 1, self.settings.limits)
        return Decision(commands[0, 0], CANDIDATES[0].name, {}, commands[0])

    def _aim(self, terms: Sequence[Term], view: View) -> policy.Aim:
        """Return what the policy drives to. Neither the search for another target nor what was followed for it goes on."""
        aim = policy.Aim.of(terms, view.things)
        if aim.target != self._target:
            self._target, self._last = aim.target, None
            self._search.found()
        return aim

    def _look_for_it(self, pose: np.ndarray, view: View, previous: np.ndarray) -> Decision:
        things = [thing for thing in view.things.values() if thing.solid]
        # Where they are when the command takes effect, not where they will be at the horizon: the robot drives now.
        places = np.array([thing.path[min(1, len(thing.path) - 1)] for thing in things]).reshape(-1, 2)
        radii = np.array([thing.radius for thing in things])
        command = self._search.command(pose, places, radii, view.walls, self.settings.period, self.settings.limits.high[1])
        commands = self._towards(command, previous)
        return Decision(commands[0], 'search', {}, commands)

    def _stop(self, previous: np.ndarray) -> np.ndarray:
        return self._towards(np.zeros(2), previous)

    def _towards(self, command: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """Return the commands (T, 2) up to the horizon that approach one (2,) within the limits and then repeat it."""
        commands = [previous[None]]
        for _ in range(self._steps()):
            commands.append(limited(command[None], commands[-1], self.settings.limits))
        return np.concatenate(commands[1:])


def imagine(aim: policy.Aim, candidates: Sequence[Candidate], view: View, pose: np.ndarray, twist: np.ndarray,
            previous: np.ndarray, steps: int, limits: Limits = LIMITS) -> tuple[np.ndarray, np.ndarray]:
    """Roll candidates out: return poses (C, steps, 3) from ``pose`` on, at the view's times after the first, and the commands
    (C, steps - 1, 2) between them."""
    leads = np.array([round(candidate.lead / PERIOD) for candidate in candidates])
    holds = np.array([candidate.hold for candidate in candidates], float)
    held = np.array([candidate.steps for candidate in candidates], float)
    path, others, radii = scene_of(aim, view)
    if roll_out := compiled():
        return roll_out(
            *(np.ascontiguousarray(array, float) for array in (pose, twist, previous, path, others, radii, view.walls)),
            leads, holds, held, aim.apart, aim.in_view, math.nan if aim.yaw is None else aim.yaw, *limits.arrays, PERIOD)
    count, longest = len(candidates), math.ceil(held.max())
    poses, twists, commands = np.tile(pose, (count, 1)), np.tile(twist, (count, 1)), np.tile(previous, (count, 1))
    targets = policy.as_complex(path)[np.minimum(np.arange(1, steps)[:, None] + leads, steps)]
    obstacles, course = policy.as_complex(others.swapaxes(0, 1)), policy.Course(aim, radii, view.walls)
    found, given = [poses], []
    for step in range(steps - 1):
        reaction = course.drive(poses, targets[step], obstacles[step + 1])
        if step < longest:
            np.copyto(reaction, holds, where=(step < held)[:, None])
        commands = limited(reaction, commands, limits)
        given.append(commands)
        poses, twists = move(poses, twists, commands, PERIOD)
        found.append(poses)
    return np.stack(found, 1), np.stack(given, 1)


@cache
def compiled() -> Callable[..., tuple[np.ndarray, np.ndarray]] | None:
    """Return a version of ``imagine``'s loop that takes a hundredth of the time, compiled at its first call on a machine; None
    if Numba is not installed or has no cache folder."""
    try:
        from .compiled_rollout import roll_out
    except (ImportError, RuntimeError) as error:
        _log.warning('candidates are imagined by numpy, which takes some milliseconds of each decision: %s', error)
        return None
    return roll_out


def scene_of(aim: policy.Aim, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the path (T, 2) of the target, and paths (N, T, 2) and radii (N,) of all else, enlarged if the task wants it."""
    others = {name: thing for name, thing in view.things.items() if thing.solid and name != aim.target}
    path = view.things[aim.target].path
    paths = np.array([thing.path for thing in others.values()]).reshape(len(others), len(path), 2)
    return path, paths, np.array([thing.radius + _wider(aim, name, thing) for name, thing in others.items()])


def _wider(aim: policy.Aim, name: str, thing: Thing) -> float:
    return max((margin for what, margin in aim.wide.items() if what in (name, thing.colour)), default=0.0)

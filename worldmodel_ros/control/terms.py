"""Task terms: weighted utilities over imagined outcomes, each defined by a few numbers and names.

A term gives each of C outcomes a dimensionless utility, about 1 for what matters; the score of a task is the sum of weight
times utility. The same terms say whether a task that was really driven has succeeded or failed (``evaluate.control.judge``).
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from .sight import Sight

ROBOT_RADIUS = 0.16  # m
REACHED = 0.45       # m, between centres, at which a goal counts as reached
REACHED_PLACE = 0.15  # m, between the robot's centre and a place, at which the place counts as reached
KEPT = 0.3           # m, by which a kept distance may be off
FACED = math.radians(10.0)  # by which the robot may miss the yaw of a place
_FACING = 0.3        # m per rad: worth of the yaw at a place
_CRUISE = 0.5        # m/s: time is worth the distance that could be driven in it
_SIDE, _SIGHT = math.tan(math.radians(42.0)), 3.0  # ratio of side to ahead; m: where a camera of 90 degrees sees a thing
# Standard deviation in m, along each axis, of a forecast place after so many s out of view, and its growth with each s ahead:
# errors of the shipped forecast (docs/task_results.md).
_UNSEEN = (0.0, 0.5, 1.0, 1.6, 2.5, 4.0, 6.0)
_DOUBT, _AHEAD = (0.02, 0.035, 0.055, 0.1, 0.2, 0.35, 0.5), 0.04


@dataclass(frozen=True)
class Thing:
    """A forecast thing: ``path`` (T, 2) in m at the outcome's times, ``radius`` in m; ``colour`` as a person would name it;
    ``presence``: probability that it is there; not ``solid``: a place, which can be driven on; ``yaw`` in rad: of a robot
    that is to stand there, None for any; ``unseen``: s since it was in view, None: its path is not in doubt."""

    path: np.ndarray
    radius: float
    colour: str
    moves: bool = False
    presence: float = 1.0
    solid: bool = True
    yaw: float | None = None
    unseen: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Outcomes of C candidates, in one frame of reference.

    times (T,) in s, ascending; poses (C, T, 3), x and y in m and yaw in rad; things: forecasts by name, the same whatever
    the robot does; walls (W, 3): rows of unit normal and offset, with n . p <= offset inside the room.
    """

    times: np.ndarray
    poses: np.ndarray
    things: Mapping[str, Thing]
    walls: np.ndarray
    _gaps: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)  # cache of ``gap``

    def gap(self, name: str) -> np.ndarray:
        """Return metres (C, T) between the surfaces of the robot and a thing; do not modify."""
        if name not in self._gaps:
            thing = self.things[name]
            x, y = self.poses[..., 0] - thing.path[:, 0], self.poses[..., 1] - thing.path[:, 1]
            self._gaps[name] = np.hypot(x, y) - (thing.radius + ROBOT_RADIUS)
        return self._gaps[name]

    def doubt(self, name: str) -> np.ndarray:
        """Return the standard deviation in m (C, T) of the place of a thing with ``unseen``: it grows while the robot looks
        elsewhere, and becomes small once a candidate turns to it."""
        thing = self.things[name]
        x, y = thing.path[:, 0] - self.poses[..., 0], thing.path[:, 1] - self.poses[..., 1]
        cos, sin = np.cos(self.poses[..., 2]), np.sin(self.poses[..., 2])
        ahead, side = cos * x + sin * y, np.abs(cos * y - sin * x)
        in_view = (side < _SIDE * ahead) & (np.hypot(x, y) < _SIGHT)
        elapsed = _elapsed(self)
        since = elapsed - np.maximum.accumulate(np.where(in_view, elapsed, -thing.unseen), 1)
        return np.hypot(np.interp(since, _UNSEEN, _DOUBT), _AHEAD * elapsed)

    def wall_gap(self) -> np.ndarray:
        """Return metres (C, T) to the nearest wall; infinite without walls."""
        if not len(self.walls):
            return np.full(self.poses.shape[:2], np.inf)
        return (self.walls[:, 2] - self.poses[..., :2] @ self.walls[:, :2].T).min(-1) - ROBOT_RADIUS


@dataclass(frozen=True)
class Touch:
    """Touch a thing, the sooner the better: minus the least gap in m or, once touched, 1 plus the share of time left."""

    target: str
    weight: float = 1.0

    def utility(self, outcome: Outcome) -> np.ndarray:
        if self.target not in outcome.things:
            return np.zeros(len(outcome.poses))
        gap = outcome.gap(self.target)
        hit = gap <= 0.01
        first = np.where(hit.any(1), hit.argmax(1), len(outcome.times) - 1)
        left = 1.0 - _elapsed(outcome)[first] / _elapsed(outcome)[-1]
        return np.where(hit.any(1), 1.0 + left, -np.maximum(gap.min(1), 0.0))


@dataclass(frozen=True)
class Reach:
    """Be within REACHED m of a thing's centre, or REACHED_PLACE of a place: minus the metres left or, once there, the worth of
    the time left. ``place``: x and y in m in the frame of the odometry, and optionally a yaw in rad; ``target`` is then its
    name. ``sight``: what is to be seen from a place that is yet to be found."""

    target: str
    weight: float = 1.0
    place: tuple[float, ...] | None = None
    sight: Sight | None = None

    @property
    def within(self) -> float:
        """Metres between centres at which it is reached."""
        return REACHED if self.place is None and self.sight is None else REACHED_PLACE

    def utility(self, outcome: Outcome) -> np.ndarray:
        if self.target not in outcome.things:
            return np.zeros(len(outcome.poses))
        thing = outcome.things[self.target]
        left = np.maximum(outcome.gap(self.target) + thing.radius + ROBOT_RADIUS - self.within, 0.0)
        there = left <= 0.0
        first = np.where(there.any(1), there.argmax(1), len(outcome.times) - 1)
        elapsed = _elapsed(outcome)
        worth = np.where(there.any(1), _CRUISE * (elapsed[-1] - elapsed[first]), -left[:, -1])
        if thing.yaw is not None:  # on the way count the worst yaw, so that arriving is never worth less
            off = np.abs(np.remainder(outcome.poses[:, -1, 2] - thing.yaw + np.pi, 2 * np.pi) - np.pi)
            worth = worth - _FACING * np.where(there[:, -1], off, np.pi)
        return worth


@dataclass(frozen=True)
class KeepDistance:
    """Stay ``distance`` m from a thing, between centres: minus the mean deviation in m. ``place``: as in Reach."""

    target: str
    distance: float
    weight: float = 1.0
    place: tuple[float, ...] | None = None

    def utility(self, outcome: Outcome) -> np.ndarray:
        if self.target not in outcome.things:
            return np.zeros(len(outcome.poses))
        thing = outcome.things[self.target]
        apart = outcome.gap(self.target) + thing.radius + ROBOT_RADIUS
        return -np.abs(apart - self.distance).mean(1)


@dataclass(frozen=True)
class PassBehind:
    """Cross the line along which a thing moves only behind the thing: -1 for an outcome that crosses ahead of it."""

    target: str
    weight: float = 1.0
    REACH: ClassVar[float] = 3.0  # m ahead of the thing: crossing its line farther off does not count

    def utility(self, outcome: Outcome) -> np.ndarray:
        if self.target not in outcome.things:
            return np.zeros(len(outcome.poses))
        path = outcome.things[self.target].path
        return -self.crosses_ahead(outcome.poses[..., :2], path, outcome.times).any(1).astype(float)

    @classmethod
    def crosses_ahead(cls, places: np.ndarray, path: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return whether each interval between ``times`` (T,) crosses ahead of the thing, bool (C, T - 1), for robots at
        ``places`` (C, T, 2) and a thing along ``path`` (T, 2)."""
        steps = np.diff(path, axis=0)
        lengths = np.linalg.norm(steps, axis=1)
        ahead = steps / np.maximum(lengths, 1e-9)[:, None]
        moves = lengths > 0.02 * np.maximum(np.diff(times), 1e-9)  # faster than 2 cm/s
        before, after = places[:, :-1] - path[:-1], places[:, 1:] - path[1:]
        beside_before = ahead[:, 0] * before[..., 1] - ahead[:, 1] * before[..., 0]
        beside_after = ahead[:, 0] * after[..., 1] - ahead[:, 1] * after[..., 0]
        along = (ahead * after).sum(-1)
        return moves & ((beside_before >= 0.0) != (beside_after >= 0.0)) & (along > 0.0) & (along < cls.REACH)


@dataclass(frozen=True)
class Avoid:
    """Keep ``clearance`` m (0: do not touch) from the things of this name or colour: minus the missing share of a 0.1 m
    margin beyond that, and minus 1 if the clearance is not kept."""

    what: str
    clearance: float = 0.0
    weight: float = 1.0
    MARGIN: ClassVar[float] = 0.1

    def concerns(self, name: str, colour: str) -> bool:
        return self.what in (name, colour)

    def utility(self, outcome: Outcome) -> np.ndarray:
        gaps = [outcome.gap(name).min(1) for name, thing in outcome.things.items() if self.concerns(name, thing.colour)]
        return _penalty(np.min(gaps, 0) - self.clearance, self.MARGIN) if gaps else np.zeros(len(outcome.poses))


@dataclass(frozen=True)
class Clearance:
    """Keep ``margin`` m from everything, walls too, except the things in ``but``, which other terms want touched or reached:
    minus the missing share of the margin, and minus 1 for a contact; for a thing in doubt, the expectation of both at the
    worst moment."""

    margin: float = 0.1
    weight: float = 1.0
    but: tuple[str, ...] = ()

    def utility(self, outcome: Outcome) -> np.ndarray:
        kept = {name: thing.unseen is not None for name, thing in outcome.things.items()
                if thing.solid and name not in self.but}
        gaps = [outcome.gap(name) for name, in_doubt in kept.items() if not in_doubt]
        sure = _penalty(np.min([outcome.wall_gap(), *gaps], 0).min(1), self.margin)
        expected = [_expected_penalty(outcome.gap(name), outcome.doubt(name), self.margin).min(1)
                    for name, in_doubt in kept.items() if in_doubt]
        return np.min([sure, *expected], 0)


@dataclass(frozen=True)
class Time:
    """Be done soon: minus the share of the time that passes until the target is reached. ``place``: as in Reach."""

    target: str
    weight: float = 0.1
    place: tuple[float, ...] | None = None

    def utility(self, outcome: Outcome) -> np.ndarray:
        if self.target not in outcome.things:
            return np.zeros(len(outcome.poses))
        thing = outcome.things[self.target]
        within = REACHED if self.place is None else REACHED_PLACE
        there = outcome.gap(self.target) <= within - thing.radius - ROBOT_RADIUS
        first = np.where(there.any(1), there.argmax(1), len(outcome.times) - 1)
        return -_elapsed(outcome)[first] / _elapsed(outcome)[-1]


@dataclass(frozen=True)
class StayIn:
    """Stay in a rectangle of the outcome's frame: minus the largest distance outside of it in m."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    weight: float = 1.0

    def utility(self, outcome: Outcome) -> np.ndarray:
        x, y = outcome.poses[..., 0], outcome.poses[..., 1]
        outside = np.max([self.x_min - x, x - self.x_max, self.y_min - y, y - self.y_max, np.zeros_like(x)], 0)
        return -outside.max(1)


Term = Touch | Reach | KeepDistance | PassBehind | Avoid | Clearance | Time | StayIn


def place_name(place: Sequence[float]) -> str:
    """Return the name of a place, unique to it."""
    return f'({", ".join(f"{value:.3f}" for value in place)})'


def places(terms: Sequence[Term], times: int) -> dict[str, Thing]:
    """Return the places of terms by name, as things that stay in place for so many times and cannot be touched."""
    return {term.target: place_thing(term.place, times) for term in terms if _has_place(term)}


def place_thing(place: Sequence[float], times: int) -> Thing:
    """Return a place, x and y in m and optionally a yaw in rad, as a thing that stays there for so many times and cannot be
    touched."""
    x, y, *yaw = place
    return Thing(np.tile((float(x), float(y)), (times, 1)), 0.0, '', solid=False, yaw=float(yaw[0]) if yaw else None)


def has_places(terms: Sequence[Term]) -> bool:
    """Return whether terms are about places, for which a robot has to measure its own pose."""
    return any(map(_has_place, terms)) or bool(sights(terms))


def needs_odometry(terms: Sequence[Term]) -> bool:
    """Return whether terms are about places or regions of the odometry's frame, which a robot must measure its pose in."""
    return has_places(terms) or any(isinstance(term, StayIn) for term in terms)


def sights(terms: Sequence[Term]) -> dict[str, Sight]:
    """Return the sights of terms, by the names of their targets."""
    return {term.target: term.sight for term in terms if isinstance(term, Reach) and term.sight}


def _has_place(term: Term) -> bool:
    return isinstance(term, Reach | KeepDistance | Time) and term.place is not None


def utilities(terms: Sequence[Term], outcome: Outcome) -> np.ndarray:
    """Return weight times utility of each term for each candidate, (K, C); a candidate's score is their sum. A term about
    something unknown counts 0 for all."""
    return np.array([term.weight * term.utility(outcome) for term in terms])


def _elapsed(outcome: Outcome) -> np.ndarray:
    return outcome.times - outcome.times[0]


def _expected_penalty(gap: np.ndarray, doubt: np.ndarray, margin: float) -> np.ndarray:
    """Return the mean of ``_penalty`` for gaps that are normally distributed around ``gap`` with the standard deviation
    ``doubt``. The mean share of the margin is the mean probability of being within 0, 1, ... 4 quarters of it."""
    def below(least: float) -> np.ndarray:  # by the logistic function, which is off by 0.01 at most (Camilli 1994)
        return 1.0 / (1.0 + np.exp(np.clip(1.702 * (gap - least) / doubt, -40.0, 40.0)))
    contact = below(0.0)
    return -(contact + sum(below(margin * quarter / 4.0) for quarter in range(1, 5))) / 5.0 - contact


def _penalty(gap: np.ndarray, margin: float) -> np.ndarray:
    return -np.clip((margin - gap) / max(margin, 1e-6), 0.0, 1.0) - (gap <= 0.0)

"""Tasks given at run time: terms of plain names and numbers, checked before the robot acts on them."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .sight import NAME as SIGHT, Sight
from .terms import Avoid, Clearance, KeepDistance, PassBehind, Reach, StayIn, Term, Time, Touch, place_name

MAX_TERMS = 16
LONGEST_NAME = 100  # characters, of a task; it is published with every decision
MAX_WEIGHT = 100.0
FARTHEST = 100.0  # m, of a region
LEAST_APART, MOST_APART = 0.2, 5.0  # m, between centres, of a distance to keep
WIDEST = 2.0  # m, of a clearance
_AT_PLACES = ('reach', 'keep_distance', 'time')  # kinds whose target may be a place
KINDS = ('touch', 'reach', 'keep_distance', 'pass_behind', 'avoid', 'clearance', 'time', 'stay_in')


class TaskError(ValueError):
    """A task cannot be carried out; the text says why and what to do."""


@dataclass(frozen=True)
class Task:
    """The terms that a robot acts on, and a name for people. Without terms it stands still."""

    name: str = ''
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class Told:
    """A term as received; see msg/Term.msg."""

    kind: str
    target: str = ''
    weight: float = 0.0
    distance: float = 0.0
    but: tuple[str, ...] = ()
    region: tuple[float, ...] = ()
    place: tuple[float, ...] = ()


def to_place(place: Sequence[float]) -> Task:
    """
    Return the task of going to a place: x and y in m in the frame of the odometry, and optionally a yaw in rad. Raises
    TaskError.

    The clearance is less than on the way to an object: a place may be next to a wall, and a planner that wants more
    clearance than there is does not move.
    """
    place = _place(place)
    name = place_name(place)
    return Task(f'place {name}', (Reach(name, place=place), Clearance(0.05), Time(name, place=place)))


def to_sight(sight: Sight, standing: list[int]) -> Task:
    """Return the task of going to where the camera sees what an image shows. ``standing``: slots of things that do not move; if
    the image shows none of them, its walls are used. Raises TaskError for one that shows nothing at all."""
    if not sight.in_view(standing) and math.isnan(sight.similarity(sight.image)):
        raise TaskError('the image is of one colour: it shows neither a thing nor where a wall ends, by which the robot could '
                        'find the place')
    return Task('image', (Reach(SIGHT, sight=sight), Clearance(0.05), Time(SIGHT)))


def to_goal(goal: str) -> Task:
    """Return the default task for a goal: to reach it soon, and to touch nothing on the way."""
    return Task(goal, (Reach(goal), Clearance(0.12, weight=2.0, but=(goal,)), Time(goal))) if goal else Task()


def task_of(name: str, told: Sequence[Told], things: Mapping[str, str]) -> Task:
    """Return the task with the given terms. ``things``: colour of each thing that the robot knows, by name. Raises
    TaskError."""
    if len(told) > MAX_TERMS:
        raise TaskError(f'a task has at most {MAX_TERMS} terms, not {len(told)}')
    if len(name) > LONGEST_NAME:
        raise TaskError(f'the name of a task has at most {LONGEST_NAME} characters, not {len(name)}')
    terms = []
    for number, term in enumerate(told, 1):
        try:
            terms.append(_term(term, things))
        except TaskError as error:
            raise TaskError(f'term {number} of {len(told)} ({term.kind or "without a kind"}): {error}') from None
    if terms and not any(isinstance(term, Touch | Reach | KeepDistance) for term in terms):
        raise TaskError('nothing says what to drive to: add a term touch, reach or keep_distance')
    return Task(name, tuple(terms))


def in_words(task: Task) -> str:
    """Return the terms as one line of text."""
    return '; '.join(term_in_words(term) for term in task.terms) or 'nothing: stand still'


def _term(told: Told, things: Mapping[str, str]) -> Term:
    if told.kind not in KINDS:
        raise TaskError(f'unknown kind {told.kind!r}: choose from {", ".join(KINDS)}')
    if not 0.0 <= told.weight <= MAX_WEIGHT:  # false for a NaN, too
        raise TaskError(f'weight is {told.weight}: it must be above 0 and at most {MAX_WEIGHT:g}, or 0 for the default')
    weight = {'weight': told.weight} if told.weight else {}
    by_target: dict[str, Callable[..., Term]] = {'touch': Touch, 'reach': Reach, 'pass_behind': PassBehind, 'time': Time}
    if told.place and told.kind in _AT_PLACES:
        place = _place(told.place)
        at = {'target': place_name(place), 'place': place, **weight}
        if told.kind == 'keep_distance':
            return KeepDistance(distance=_between(told.distance, LEAST_APART, MOST_APART), **at)
        return Reach(**at) if told.kind == 'reach' else Time(**at)
    if told.place:
        raise TaskError(f'a place is no target of {told.kind}: choose from {", ".join(_AT_PLACES)}')
    if told.kind in by_target:
        return by_target[told.kind](_known(told.target, things), **weight)
    match told.kind:
        case 'keep_distance':
            return KeepDistance(_known(told.target, things), _between(told.distance, LEAST_APART, MOST_APART), **weight)
        case 'avoid':
            if told.target not in things.values():
                _known(told.target, things)
            return Avoid(told.target, _between(told.distance, 0.0, WIDEST), **weight)
        case 'clearance':
            but = tuple(dict.fromkeys(_known(name, things) for name in told.but))
            return Clearance(_between(told.distance, 0.0, WIDEST), but=but, **weight)
    if len(told.region) != 4 or not all(abs(side) <= FARTHEST for side in told.region):
        raise TaskError(f'region is {list(told.region)}: it must be least x, greatest x, least y and greatest y in m, '
                        f'within {FARTHEST:g} m')
    x_min, x_max, y_min, y_max = told.region
    if not (x_min < x_max and y_min < y_max):
        raise TaskError(f'region is {list(told.region)}: the least x and y must be below the greatest ones')
    return StayIn(x_min, x_max, y_min, y_max, **weight)


def _place(place: Sequence[float]) -> tuple[float, ...]:
    if len(place) not in (2, 3) or not all(abs(value) <= FARTHEST for value in place):  # false for a NaN, too
        raise TaskError(f'place is {list(place)}: it must be x and y in m, within {FARTHEST:g} m, and perhaps a yaw in rad')
    return tuple(map(float, place))


def _known(name: str, things: Mapping[str, str]) -> str:
    if name not in things:
        raise TaskError(f'unknown thing {name!r}: choose from {", ".join(things)}')
    return name


def _between(value: float, low: float, high: float) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        raise TaskError(f'distance is {value}: it must be between {low:g} and {high:g} m')
    return value


def term_in_words(term: Term) -> str:
    """Return what a term wants, and its weight, as text."""
    match term:
        case Touch():
            text = f'touch {term.target}'
        case Reach():
            text = f'reach {term.target}'
        case KeepDistance():
            text = f'stay {term.distance:g} m from {term.target}'
        case PassBehind():
            text = f'pass behind {term.target}'
        case Avoid():
            text = f'keep {term.clearance:g} m to {term.what}' if term.clearance else f'do not touch {term.what}'
        case Clearance():
            but = f' but {", ".join(term.but)}' if term.but else ''
            text = f'keep {term.margin:g} m to everything{but}'
        case Time():
            text = f'be soon at {term.target}'
        case StayIn():
            text = f'stay within x {term.x_min:g} to {term.x_max:g} m, y {term.y_min:g} to {term.y_max:g} m'
    return f'{text} (weight {term.weight:g})'

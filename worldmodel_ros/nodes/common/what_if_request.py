"""Parses requests of srv/WhatIf, for the nodes that answer them: the model's and the simulated robot's."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.engine.what_if import MAX_BRANCHES, Branch
from worldmodel_ros.motion import MANEUVERS, maneuver
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.srv import WhatIf

BASE = ('linear.x', 'angular.z')  # the action names of named sequences
POLICY = 'policy'
_SHOWN = 60  # characters of the request in an error message


class RequestError(ValueError):
    """A request that cannot be answered; the text is the answer's message."""


@dataclass(frozen=True)
class Askable:
    """
    What a node can be asked.

    ``step_period`` [s]; ``action_names``, and the lowest and highest action (A,) that is executed [SI units]; ``goals``;
    ``max_steps`` of a branch; default ``horizon`` [s]; ``max_branches`` of a request.
    """

    step_period: float
    action_names: Sequence[str]
    action_low: Sequence[float]
    action_high: Sequence[float]
    goals: Sequence[str]
    max_steps: int
    horizon: float
    max_branches: int = MAX_BRANCHES


def branches(request: WhatIf.Request, askable: Askable) -> tuple[Branch, ...]:
    """
    Return the branches of a request, at least one, in order; actions are None for ``policy``. Raises RequestError.

    Named sequences last for the horizon; explicit ones keep their length, but are cut to the horizon if one is given.
    """
    count = len(request.names) + len(request.actions)
    if not count:
        raise RequestError(f'no branch: give names ({", ".join(MANEUVERS)}, {POLICY}) or explicit actions')
    if count > askable.max_branches:  # before any is built
        raise RequestError(f'too long: {count} branches, and at most {askable.max_branches} of {askable.max_steps} steps '
                           'are imagined')
    return tuple(_branches(request, askable))


def goal(request: WhatIf.Request, askable: Askable, default: str = '') -> str:
    """Return the goal of a request, empty for none. Raises RequestError."""
    chosen = request.goal or default
    if chosen and chosen not in askable.goals:
        raise RequestError(f'goal {chosen!r} is unknown: use one of {", ".join(askable.goals)}')
    return chosen


def allowed_time(request: WhatIf.Request) -> float:
    """Return the time that a request allows for its answer [s], 0.0 for no limit. Raises RequestError."""
    allowed = request.deadline.sec + request.deadline.nanosec / 1e9
    if allowed < 0.0:
        raise RequestError(f'deadline is {allowed} s: give a time from now on, or 0 for none')
    return allowed


def _branches(request: WhatIf.Request, askable: Askable) -> Iterator[Branch]:
    period, longest = askable.step_period, askable.max_steps * askable.step_period
    horizon = request.horizon or askable.horizon
    if not (math.isfinite(horizon) and 0.0 < horizon <= longest):
        raise RequestError(
            f'horizon is {request.horizon}: give up to {longest:g} s, or 0 for {askable.horizon:g} s')
    steps = max(1, round(horizon / period))
    for name in request.names:
        if name == POLICY:
            yield Branch(name, steps)
        elif name not in MANEUVERS:
            raise RequestError(
                f'name {name[:_SHOWN]!r} is unknown: use one of {", ".join(MANEUVERS)}, {POLICY}, or give explicit actions')
        elif tuple(askable.action_names) != BASE:
            raise RequestError(f'name {name!r} is for a base ({", ".join(BASE)}), and here the actions are '
                               f'{", ".join(askable.action_names)}: give explicit ones')
        else:
            yield Branch(name, steps, maneuver(name, steps))
    for number, chunk in enumerate(request.actions):
        actions = _explicit(chunk, askable, f'actions[{number}]', steps if request.horizon else math.inf)
        yield Branch(f'explicit_{number}', len(actions), actions)


def _explicit(chunk: ActionChunk, askable: Askable, where: str, steps: float) -> np.ndarray:
    """Return at most the first ``steps`` rows of a chunk."""
    names = list(askable.action_names)
    if len(chunk.names) != len(names) or list(chunk.names) != names:
        shown = [name[:_SHOWN] for name in chunk.names[:len(names) + 1]]
        raise RequestError(f'{where}: names are {shown}: they must be {names}')
    if not math.isclose(chunk.step_period, askable.step_period, rel_tol=1e-6):
        raise RequestError(f'{where}: step_period is {chunk.step_period} s: it must be {askable.step_period} s')
    values, width = np.frombuffer(chunk.values, np.float32), len(names)
    if not len(values) or len(values) % width:
        raise RequestError(f'{where}: {len(values)} values: give rows of {width}, at least one')
    rows = min(len(values) // width, steps)
    if rows > askable.max_steps:
        raise RequestError(f'too long: {where} has {rows} steps, and at most {askable.max_steps} are imagined')
    values = values[:rows * width]
    if not np.isfinite(values).all():
        raise RequestError(f'{where}: values must be finite')
    # As the robot does: it clips commands to its limits.
    return np.clip(values.reshape(-1, width), askable.action_low, askable.action_high).astype(np.float32)

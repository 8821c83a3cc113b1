"""The rows of the fault matrix, and how one is played and judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from scenarios import speed
from scenarios.checks import Invariants
from scenarios.rig import Rig
from scenarios.stalls import Missed, watching

if TYPE_CHECKING:
    from faults.systems import Running

RECOVERED = 'recovered'  # it works again, without help from outside
REFUSED = 'refused'      # by name; what ran before goes on
DEGRADED = 'degraded to '


@dataclass(frozen=True)
class Seen:
    """
    What came of a fault: the outcome, the time that the reaction took [s], how much was lost that had been accepted.
    """

    outcome: str
    reaction: float
    lost: int = 0


@dataclass(frozen=True)
class Case:
    """
    One row. ``play`` has the fault happen to a running system and returns what was seen.

    ``outcome`` is what is expected to be seen, and ``bound`` how long the reaction may take [s]; ``reaction`` says from where
    to where that is. ``ends``: full names of the nodes that the fault ends; ``stops``: of those that it keeps from doing what
    is checked of them otherwise. ``needs`` returns why the case cannot be played on this machine, '' where it can.
    """

    name: str
    system: str
    play: Callable[[Running], Seen]
    what: str
    outcome: str
    reaction: str
    bound: float
    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    needs: Callable[[], str] = lambda: ''


@dataclass
class Result:
    """What became of a case: a row of the JSON file. Times in ms; ``failures`` is empty where all was as expected."""

    name: str
    outcome: str = ''
    expected: str = ''
    reaction_ms: float | None = None
    bound_ms: float | None = None
    late: int | None = None
    lost: int | None = None
    failures: list[str] = field(default_factory=list)
    skipped: str = ''
    seconds: float = 0.0
    played_again: list[str] = field(default_factory=list)
    missed: Missed | None = None  # where nothing but this is why it failed

    def as_dict(self) -> dict:
        """Return it for JSON, without what is empty."""
        needed = ('name', 'outcome', 'reaction_ms', 'late', 'lost')
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in values.items()
                if key in needed or (key != 'missed' and value not in ('', [], None))}


CASES: list[Case] = []


def case(system: str, outcome: str, reaction: str, bound: float, *, ends: tuple[str, ...] = (),
         stops: tuple[str, ...] = (), needs: Callable[[], str] = lambda: '', name: str = '', what: str = '') -> Callable:
    """Make a function of a ``Running`` system a row of the matrix; its name and docstring are the row's, unless given."""
    def register(play: Callable[[Running], Seen]) -> Callable[[Running], Seen]:
        text = what or ' '.join((play.__doc__ or '').split())
        add(Case(name or play.__name__, system, play, text, outcome, reaction, bound, ends, stops, needs))
        return play
    return register


def add(row: Case) -> None:
    """Add a row; names are unique."""
    assert row.name not in {other.name for other in CASES}, f'two cases are named {row.name}'
    CASES.append(row)


def play(row: Case, running: Running) -> Result:
    """Play a case on its system, undo what it has set, and check it against what is expected of it and of every case."""
    result = Result(row.name, expected=row.outcome, bound_ms=_ms(row.bound))
    watching()
    began = time.monotonic()
    if len(running.rigs) > 1:  # which one engine has to serve in time, on this machine
        budget = speed.budget(len(running.rigs), own=max(rig.expected_tick() for rig in running.rigs))
        for rig in running.rigs:
            rig.give(budget)
    invariants = [Invariants(rig) for rig in running.rigs]
    pids = running.pids()
    try:
        seen = row.play(running)
    except Missed as error:
        result.missed = error
        result.failures.append(str(error))
    except Exception as error:  # whatever a case stumbles over, the others are played
        result.failures.append(str(error) if isinstance(error, AssertionError) else repr(error))
    else:
        result.outcome, result.reaction_ms, result.lost = seen.outcome, _ms(seen.reaction), seen.lost
        if seen.outcome != row.outcome:
            result.failures.append(f'{seen.outcome}, and should be {row.outcome}')
        if seen.reaction > row.bound:
            result.missed = Missed(f'took {seen.reaction * 1e3:.0f} ms, {row.bound * 1e3:.0f} are allowed',
                                   seen.reaction - row.bound, began, time.monotonic())
            result.failures.append(str(result.missed))
        if seen.lost:
            result.failures.append(f'{seen.lost} lost that had been accepted')
    checks = [lambda i=i, rig=rig: i.check(_own((*row.ends, *row.stops), rig))
              for i, rig in zip(invariants, running.rigs, strict=True)]
    for step in (running.restore, *checks):  # what must hold is checked also where the case has failed
        try:
            step()
        except AssertionError as error:
            result.failures.append(str(error))
    for each in invariants:  # those of a driver that was started again, too
        each.late_commands.read()
    result.late = sum(each.late_commands.late for each in invariants)
    if result.late:
        result.failures.append(f'{result.late} commands came late to a robot')
    gone = sorted(name for name, pid in running.pids().items() if name not in row.ends and pid != pids[name])
    if gone:
        result.failures.append(f'{", ".join(gone)} did not live on')
    alive = [name for name in row.ends if pids[name] is not None and running.pids()[name] == pids[name]]
    if alive:
        result.failures.append(f'{", ".join(alive)} did not end')
    if result.failures != [str(result.missed)]:
        result.missed = None
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _own(ends: tuple[str, ...], rig: Rig) -> list[str]:
    """Return, by their names within a robot, which of its nodes end."""
    names = [name.rpartition('/')[2] for name in ends]
    return [own for own, name in zip(names, ends, strict=True) if rig.full_name(own) == name]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)

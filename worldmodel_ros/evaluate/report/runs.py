"""The one or two evaluations that a report is about, and how they are called in it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from worldmodel_ros.evaluate.drive.compare import names
from worldmodel_ros.evaluate.drive.evaluation import Evaluation

KINDS = ('a', 'b')  # style classes, in the order of the evaluations


@dataclass(frozen=True)
class Run:
    """`name`, as HTML: what tells this evaluation from the other one, after its `letter` if there are two.

    `kind`: its style class.
    """

    letter: str
    name: str
    kind: str
    evaluation: Evaluation


def runs(evaluations: Sequence[Evaluation]) -> list[Run]:
    """One or two evaluations, named by what differs between them."""
    if not 1 <= len(evaluations) <= len(KINDS):
        raise ValueError(f'a report shows one evaluation or two, not {len(evaluations)}')
    told = ['model'] if len(evaluations) == 1 else names(evaluations)
    letters = ('',) if len(evaluations) == 1 else ('A', 'B')
    return [Run(letter, f'{letter}: {escape(name)}' if letter else name, kind, e)
            for letter, name, kind, e in zip(letters, told, KINDS, evaluations)]

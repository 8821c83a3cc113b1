"""One evaluation: a model on a recording, with all that its report shows."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.bags.goals import Driven
from . import metrics, surprise
from .columns import Columns
from .deadline import Deadline
from .highlights import Highlights
from .surprise import Moment

if TYPE_CHECKING:
    from worldmodel_ros.model.presets import Preset

MOMENTS = 8  # shown at most


@dataclass(frozen=True)
class Subject:
    """What was evaluated: ``bag`` is its name and ``path`` where it is; ``mapping`` says in words what its topics are."""

    bag: str
    path: str
    model: str
    backend: str
    mapping: Sequence[str] = ()


@dataclass
class Evaluation:
    """The numbers and images of one model on one recording; ``health`` and ``findings`` come from reading the bag."""

    subject: Subject
    spec: Preset
    columns: Columns
    highlights: Highlights
    deadline: Deadline | None
    health: dict[str, Any]
    findings: Sequence[Any]
    has_actions: bool = True
    digest: str = ''  # SHA-256 of the file of windows
    forecast: dict[str, Any] | None = None  # numbers of a scene forecast that was run as well
    goals: Sequence[Driven] = ()  # by the recorded decisions

    @cached_property
    def moments(self) -> list[Moment]:
        """Where the model was wrong."""
        c = self.columns
        return surprise.moments(c['time_s'], c['episode'], c['surprise_db'], MOMENTS)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """All that depends only on the frames and the actions: the same on every run."""
        surprises = self.columns['surprise_db']
        there = surprises[np.isfinite(surprises)]
        return {
            'pace': metrics.pace(self.columns),
            'prediction': {subset: metrics.prediction(self.columns, subset) for subset in metrics.SUBSETS},
            'reconstruction_db': metrics.reconstruction(self.columns),
            'policy': metrics.policy(self.columns),
            'what_if': metrics.what_if(self.columns),
            'surprise': {'median_db': round(float(np.median(there)), 3) if len(there) else None,
                         'moments': [moment.to_dict() for moment in self.moments]},
        }

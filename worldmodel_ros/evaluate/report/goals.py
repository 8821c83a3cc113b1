"""Section: what was driven to along the recording."""
from __future__ import annotations

import cv2
import numpy as np

from .html import Run, escape, number, picture, section, table


_WIDTH = 128  # pixels, of an image at most


def goals(runs: list[Run]) -> str:
    """Goals and tasks in the order in which they were driven to; nothing where no decisions were recorded."""
    shown = [run for run in runs if run.evaluation.goals]
    return section('goals', 'Goals', *(_one(run, len(runs) > 1) for run in shown),
                   lead='Goals and tasks of the robot, from the recorded decisions.') if shown else ''


def _one(run: Run, named: bool) -> str:
    rows = [[number(goal.start, 1), escape(goal.name), '<br>'.join(map(escape, goal.terms)), number(goal.seconds, 1),
             f'{goal.decisions} <small>({goal.vetoed} with a veto)</small>',
             '' if goal.image is None else picture(_small(goal.image), 'what the camera shall see')]
            for goal in run.evaluation.goals]
    return (f'<h3>{run.name}</h3>' if named else '') + table(
        ['from <small>[s]</small>', 'goal or task', 'terms', 'for <small>[s]</small>', 'decisions', 'image'], rows)


def _small(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    scale = min(1.0, _WIDTH / width)
    return cv2.resize(image, (max(1, round(width * scale)), max(1, round(height * scale))), interpolation=cv2.INTER_AREA)

"""What-if ranking: is the imagined future nearest to a true branch's that of the same branch?"""
from __future__ import annotations

from itertools import combinations

import numpy as np

from worldmodel_ros.evaluate.drive.pictures import psnr, rms
from worldmodel_ros.motion import MANEUVERS, maneuver
from ...model.sampling import ONE_STEP, TWO_STEP
from .drives import Branch, Drive, drive_branch
from .horizons import HORIZONS, context_of, starts, steps_of
from .imagination import Imagination

HORIZON = 1.0  # s
SAMPLERS = {'two_step': TWO_STEP, 'one_step': ONE_STEP}
# Branches are told apart if the robot's end poses are this far from each other: m, and m per rad of yaw.
DECISIVE, _METRES_PER_RADIAN = 0.05, 0.5


def ranking_records(drive: Drive, model: Imagination) -> list[dict]:
    """Return one record for each moving start, sampler and branch that truly differs from all others: see ``_ranks``."""
    spec = model.spec
    steps, context = steps_of(HORIZON, spec.step_period), context_of(spec)
    moments = [s for s in starts(drive, steps_of(HORIZONS[-1], spec.step_period), context)
               if drive.is_moving(s, steps)]
    if not moments:
        return []
    truth = {start: {name: drive_branch(drive, start, maneuver(name, steps), spec.step_period) for name in MANEUVERS}
             for start in moments}
    memory = model.observe(np.stack([drive.frames[s - context + 1:s + 1] for s in moments]),
                           np.stack([drive.actions[s - context + 1:s + 1] for s in moments]),
                           tuple(range(len(moments)))).branches(len(MANEUVERS))
    # The actions that the robot executed, not those that were commanded.
    actions = np.stack([truth[start][name].actions for start in moments for name in MANEUVERS])
    actions = np.concatenate([actions, np.repeat(actions[:, -1:], -steps % spec.chunk_frames, 1)], 1)
    records = []
    for sampler_name, sampler in SAMPLERS.items():
        latents, _ = model.roll(memory, actions, sampler, keep=False)
        pictures = model.decode(latents[:, steps - 1], latents[:, steps - 2])
        for i, start in enumerate(moments):
            imagined = dict(zip(MANEUVERS, pictures[i * len(MANEUVERS):(i + 1) * len(MANEUVERS)]))
            records += [{'seed': drive.seed, 'start': start, 'way': sampler_name, **ranks}
                        for ranks in _ranks(imagined, truth[start])]
    return records


def _ranks(imagined: dict[str, np.ndarray], truth: dict[str, Branch]) -> list[dict]:
    """For each true branch that differs from all others: which imagined image is nearest to its last one.

    ``sensitivity``: how much the imagined branches differ from each other, root mean square, over how much the true ones
    do; 1 is as much, 0 a model that ignores the action. ``contact``: whether anything is hit on the true branch.
    """
    pairs = list(combinations(truth, 2))
    true_difference = np.mean([rms(truth[a].frames[-1], truth[b].frames[-1]) for a, b in pairs])
    sensitivity = np.mean([rms(imagined[a], imagined[b]) for a, b in pairs]) / max(true_difference, 1e-6)
    found = []
    for name, branch in truth.items():
        if min(_apart(branch.poses[-1], other.poses[-1]) for n, other in truth.items() if n != name) < DECISIVE:
            continue
        scores = {n: psnr(picture, branch.frames[-1]) for n, picture in imagined.items()}
        found.append({'branch': name, 'nearest': max(scores, key=scores.__getitem__), 'psnr_db': scores,
                      'sensitivity': float(sensitivity), 'contact': bool(branch.collided.any())})
    return found


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    turn = abs(np.remainder(a[2] - b[2] + np.pi, 2 * np.pi) - np.pi)
    return float(np.hypot(*(a[:2] - b[:2]))) + _METRES_PER_RADIAN * float(turn)

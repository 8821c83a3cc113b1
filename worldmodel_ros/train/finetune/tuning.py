"""Training loop with early stopping: steps under a schedule, with checks on a validation part."""
from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from worldmodel_ros.train.objectives.objective import Objective
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.log import Log
from worldmodel_ros.train.run.loop import Optimiser
from worldmodel_ros.train.run.ranks import Ranks

CHECKS = 12    # checks on the validation part, evenly spread over the schedule
PATIENCE = 4   # checks without a better result after which the training ends, once half of it is done


@dataclass(frozen=True)
class Tuned:
    """Result of ``tune``: ``scores`` [dB] are (step, score of the averaged weights); those of ``best_step`` were kept."""

    steps: int
    seconds: float
    best_step: int
    scores: tuple[tuple[int, float], ...]
    stopped_early: bool

    def to_dict(self) -> dict:
        return {'steps': self.steps, 'seconds': round(self.seconds, 1), 'best_step': self.best_step,
                'stopped_early': self.stopped_early,
                'validation_db': [{'step': step, 'psnr_db': round(score, 3)} for step, score in self.scores]}


def tune(module: nn.Module, averaged: nn.Module, objective: Objective, schedule: Schedule, log: Log, score: Callable[[], float],
         seed: int) -> Tuned:
    """Train ``module`` by an objective and leave it with the best averaged weights seen.

    ``score`` judges ``averaged``, higher is better; if no step improves it, the weights stay as they were. The
    objective's ``done`` is set to the share of the schedule that is over.
    """
    device = next(module.parameters()).device
    generator, rng = torch.Generator(device).manual_seed(seed), np.random.default_rng(seed)
    optimiser = Optimiser(module, averaged, objective.parameters(), schedule, Ranks(device))
    scores, best, step, begin = [(0, score())], copy.deepcopy(averaged.state_dict()), 0, time.monotonic()
    done, stopped, waited, best_step = 0.0, False, 0, 0
    while done < 1.0 and not stopped:
        objective.done = done
        _, values = optimiser.learn(objective, rng, generator, step, done)
        log.add(step, values)
        step += 1
        before, done = done, schedule.done(step, time.monotonic() - begin)
        if int(done * CHECKS) > int(before * CHECKS):
            scores.append((step, score()))
            best_step = max(scores, key=lambda pair: pair[1])[0]
            if best_step == step:
                best, waited = copy.deepcopy(averaged.state_dict()), 0
            else:
                waited += 1
            stopped = 0.5 <= done < 1.0 and waited >= PATIENCE
    log.close(step)
    module.load_state_dict(best)
    averaged.load_state_dict(best)
    return Tuned(step, time.monotonic() - begin, best_step, tuple(scores), stopped)

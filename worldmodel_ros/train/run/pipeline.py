"""The stages in their order: what each needs, and that a finished one is taken, not done again."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stages
from .config import STAGES
from .reading import ConfigError
from .run import Run


@dataclass(frozen=True)
class Stage:
    """`work` does the stage in all processes, leaves its results in the folder it is given, and returns what is worth
    recording of it in stage.json. `alone` says that only the main process does it."""

    name: str
    needs: Sequence[str]
    work: Callable[[Run, Path], dict[str, Any]]
    alone: bool = False


WORK = {stage.name: stage for stage in (
    Stage('data', (), stages.simulate_data, alone=True),
    Stage('vae', ('data',), stages.train_vae),
    Stage('teacher', ('data', 'vae'), stages.train_teacher),
    Stage('student', ('data', 'vae', 'teacher'), stages.train_student),
    Stage('self_forcing', ('data', 'vae', 'teacher', 'student'), stages.train_self_forcing),
    Stage('imitation', ('data', 'vae', 'teacher', 'student', 'self_forcing'), stages.train_policy),
    Stage('calibration', ('data', 'vae', 'teacher', 'student', 'self_forcing', 'imitation'), stages.calibrate_contacts,
          alone=True),
    Stage('evaluation', ('calibration',), stages.evaluate, alone=True))}


def run_stages(run: Run, names: Sequence[str] = ()) -> None:
    """
    Do the named stages, by default all of the configuration, in their order; what is complete is taken.

    Raises ConfigError for a stage that is unknown, left out by the configuration, or lacks what it needs.
    """
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise ConfigError(f'{", ".join(unknown)} is no stage: choose from {", ".join(STAGES)}')
    left_out = [name for name in names if not run.has(name)]
    if left_out:
        raise ConfigError(f'{", ".join(left_out)} is null in the configuration: give the section, or leave it out of '
                          '--stages')
    for stage in (WORK[name] for name in STAGES if run.has(name) and (not names or name in names)):
        folder = run.find(stage.name)
        if folder is not None:
            if run.ranks.main:
                print(f'[{stage.name}] taken from {folder}', flush=True)
            continue
        for name in stage.needs:
            if run.has(name):
                run.found(name)
        run.ranks.wait()  # nobody may look for a record while it is written
        run.record(stage.name, complete=False)
        began = time.monotonic()
        results: dict[str, Any] = {}
        if run.ranks.main or not stage.alone:
            results = stage.work(run, run.out / stage.name)
        run.ranks.wait()
        run.record(stage.name, complete=True, results={'seconds': round(time.monotonic() - began, 1), **results})
        run.ranks.wait()

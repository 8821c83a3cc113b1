"""A stage in progress as a model small enough to carry to another machine: averaged weights alone, no moments."""
from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.model.world_model import WorldModel
from .config import STAGES
from .reading import ConfigError

FOLDER = 'portable'  # in the folder of a run


@dataclass(frozen=True)
class Portable:
    """Averaged weights of a stage after ``step`` steps and ``seconds``, in float32."""

    step: int
    seconds: float
    weights: dict[str, Tensor]


def write(folder: Path, averaged: WorldModel, stage: str, step: int, seconds: float, bits: int = 16) -> None:
    """Write the weights as an ordinary model, with the layers' matrices in ``bits`` (16, or 8 row by row); earlier ones are
    replaced once everything is written."""
    _finish(folder)
    new, old = _next_to(folder)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    checkpoint.save(averaged, new, {'stages': {stage: {'steps': step, 'training_seconds': round(seconds, 1)}}},
                    dtype=torch.int8 if bits == 8 else torch.bfloat16)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def begun(folder: Path, stage: str) -> tuple[int, float] | None:
    """Return the steps and seconds after which the folder's weights of the stage were written; None if it has none of it."""
    _finish(folder)
    if not (folder / 'model.json').is_file():
        return None
    found = read_description(folder).provenance.get('stages', {}).get(stage)
    return None if found is None else (int(found['steps']), float(found['training_seconds']))


def load(folder: Path, stage: str, model: WorldModel) -> Portable | None:
    """Return what ``write`` left of the stage, or None. Raises ConfigError if it has another shape than ``model``, or is of a
    later stage, which this one would overwrite with its own start."""
    found = begun(folder, stage)
    if found is None:
        order = STAGES.index(stage)
        later = [name for name in STAGES[order + 1:] if begun(folder, name)]
        if later:
            raise ConfigError(f'{folder} has weights of the stage {later[0]}, and {stage}, which comes before it, is not '
                              f'complete here: bring its folder along, too, or delete {folder} to train from {stage} on')
        return None
    if read_description(folder).preset != model.preset:
        raise ConfigError(f'{folder} has weights of another preset than this run: delete it, or take the configuration that '
                          'it was made with')
    return Portable(*found, checkpoint.load(folder).state_dict())


def _next_to(folder: Path) -> tuple[Path, Path]:
    """Where new weights are until they are complete, and where those are that they replace."""
    return folder.with_name(f'{folder.name}.new'), folder.with_name(f'{folder.name}.old')


def _finish(folder: Path) -> None:
    """Finish the renaming if a process ended between the two renames of ``write``: then the new weights are complete."""
    new, old = _next_to(folder)
    if old.exists() and not folder.exists():
        try:
            (new if new.exists() else old).rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process of this run was faster
                raise

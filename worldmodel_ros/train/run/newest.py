"""Exports the newest weights of a run in progress in the shipped form, for machines that may be preempted.

    python -m worldmodel_ros.train.run.newest out/tiny saved/tiny
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.world_model import WorldModel
from .config import read_config

# Stages that leave a model which predicts, the last one first.
STAGES = ('decoder', 'imitation', 'self_forcing', 'student', 'teacher')


def newest(run: Path) -> tuple[WorldModel, dict]:
    """
    Return the model and its provenance: of the last finished stage, or of the one in progress, its averaged weights as last
    saved (``checkpoint_minutes``).

    Raises FileNotFoundError if no stage has left anything yet.
    """
    for stage in STAGES:
        record = run / stage / 'stage.json'
        if record.is_file() and json.loads(record.read_text())['complete']:
            done = json.loads(record.read_text())
            done.pop('config')
            return checkpoint.load(run / stage), {'unfinished': f'after {stage}', 'stages': {stage: done}}
        for progress in sorted((run / stage / 'progress').glob('step-*'), reverse=True):
            model = WorldModel(read_config(run / 'config.yaml').model_preset)
            averaged = {name.removeprefix('averaged.'): tensor for name, tensor in
                        load_file(str(progress / 'shared.safetensors')).items() if name.startswith('averaged.')}
            model.load_state_dict(averaged)
            step = json.loads((progress / 'progress.json').read_text())['step']
            return model, {'unfinished': f'in {stage}', 'stages': {stage: {'steps': step}}}
    raise FileNotFoundError(f'{run} has no weights of {", ".join(STAGES)} yet: wait for checkpoint_minutes, or for a '
                            'stage')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.run.newest', description=__doc__.splitlines()[0])
    parser.add_argument('run', type=Path, help='folder of the run')
    parser.add_argument('out', type=Path, help='folder for the model; an older one in it is replaced')
    options = parser.parse_args(arguments)
    try:
        model, provenance = newest(options.run)
    except FileNotFoundError as error:
        print(f'newest: {error}', file=sys.stderr)
        return 1
    checkpoint.save(model, options.out, provenance, dtype=torch.bfloat16)
    print(f'{options.out}: {provenance["unfinished"]}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

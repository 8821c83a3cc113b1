"""Averages the weights of a scene forecast before and after further training.

    python -m worldmodel_ros.train.scene.average FORECAST FURTHER --out FOLDER

The mean of the weights before and after further training is often better than both, and as fast as each (Wortsman et al. 2022,
"Robust fine-tuning of zero-shot models"): they lie in one basin.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from worldmodel_ros.engine.forecast.loading import forecast_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError, read_description
from worldmodel_ros.model.scene_forecast import SceneForecast


def average(first: Path, second: Path, share: float) -> SceneForecast:
    """Return a forecast with ``1 - share`` of the first one's weights and ``share`` of the second one's. Raises ModelError
    if they are of different networks."""
    found, other = SceneForecast.load(first, 'cpu'), SceneForecast.load(second, 'cpu').state_dict()
    weights = found.state_dict()
    if {name: weight.shape for name, weight in weights.items()} != {name: weight.shape for name, weight in other.items()}:
        raise ModelError(f'{first} and {second} are not of one network: average a model with one trained from it')
    found.load_state_dict({name: torch.lerp(weight.float(), other[name].float(), share).to(weight.dtype)
                           if weight.is_floating_point() else weight for name, weight in weights.items()})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.scene.average', description=__doc__.splitlines()[0])
    parser.add_argument('forecast', help='shipped forecast, or folder of one')
    parser.add_argument('further', help='folder of what was trained from it')
    parser.add_argument('--share', type=float, default=0.5, help='of the second one')
    parser.add_argument('--out', type=Path, required=True, help='folder for the weights')
    options = parser.parse_args(arguments)
    if not 0.0 <= options.share <= 1.0:
        parser.error(f'--share must be from 0 to 1, not {options.share:g}')
    try:
        folders = forecast_folder(options.forecast), forecast_folder(options.further)
        averaged = average(*folders, options.share)
        trained = [read_description(folder).provenance for folder in folders]
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    checkpoint.save(averaged, options.out, {'averaged': {'share_of_the_second': options.share}, 'of': trained}, torch.float16)
    print(json.dumps({'share_of_the_second': options.share, 'of': [each.get('scene_forecast') for each in trained]}))
    return 0


if __name__ == '__main__':
    sys.exit(main())

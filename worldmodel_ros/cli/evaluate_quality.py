"""``worldmodel evaluate quality``: evaluate a model on simulated rooms that were not used for training or tuning."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from worldmodel_ros.cli import arguments, simulated

EXAMPLES = """\
examples:
  worldmodel evaluate quality --seeds 5000000:5000020                  the shipped model; about 20 minutes on two cores
  worldmodel evaluate quality --seeds 5000000:5000020 --model out/tiny/final --json quality.json --pictures out/quality
  worldmodel evaluate quality --seeds 5000000:5000006 --parts horizons,what_if --json > near.json
  worldmodel evaluate quality --seeds 5000000:5000016 --parts drift --dreams 16    only long rollouts, ten minutes each

Prints one JSON object. The same seeds, model and machine give the same numbers, with any number of workers.
"""


def add_quality(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the run function of ``evaluate quality``."""
    parser.add_argument('--seeds', required=True, metavar='A:B',
                        help='seeds of the rooms, from A up to but not including B; none that training may use')
    parser.add_argument('--model', default='tiny', metavar='M', help='shipped model or folder of a trained one (default: tiny)')
    parser.add_argument('--teacher', metavar='M',
                        help='checkpoint of the 32-step teacher (default: the model\'s own flow)')
    parser.add_argument('--backend', default='auto', choices=('auto', 'torch', 'onnx', 'onnx-int8'),
                        help='back end of the networks on the robot (default: auto)')
    parser.add_argument('--parts', default='horizons,what_if,drift,closed_loop', metavar='NAMES',
                        help='parts to evaluate (default: horizons,what_if,drift,closed_loop)')
    parser.add_argument('--workers', type=int, metavar='N', help='number of processes (default: one per core)')
    parser.add_argument('--drift-seconds', type=arguments.positive, default=600.0, metavar='S',
                        help='length of a long rollout (default: 600)')
    parser.add_argument('--dreams', type=int, default=4, metavar='N',
                        help='number of rooms with a long rollout, from the first (default: 4)')
    simulated.add_json(parser)
    parser.add_argument('--pictures', type=Path, metavar='DIR',
                        help='folder for film strips of true and predicted images')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.evaluate.quality.seeds import QualityError
    from worldmodel_ros.model.checkpoint_description import ModelError
    try:
        return _evaluate(chosen)
    except (ModelError, QualityError) as error:
        print(f'worldmodel evaluate quality: {error}', file=sys.stderr)
        return 1


def _evaluate(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.evaluate.quality.run import evaluate
    from worldmodel_ros.evaluate.quality.seeds import parse_seeds
    from worldmodel_ros.evaluate.quality.task import Task
    parts = tuple(part.strip() for part in chosen.parts.split(',') if part.strip())
    task = Task(parse_seeds(chosen.seeds), chosen.model, chosen.teacher, chosen.backend, parts,
                drift_seconds=chosen.drift_seconds, dreams=chosen.dreams)
    strips = {}

    def judge(workers: int, progress: Callable[[float], None]) -> dict:
        result, found = evaluate(task, workers, progress)
        strips.update(found)
        return result
    result = simulated.report('quality', chosen, judge)
    if chosen.pictures:
        _write_strips(chosen.pictures, strips)
    return 1 if result['failed'] else 0


def _write_strips(folder: Path, strips: dict) -> None:
    """Write each strip as a PNG, with small images enlarged for viewing."""
    import numpy as np
    from PIL import Image
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in strips.items():
        picture = Image.fromarray(np.concatenate([np.concatenate(list(row), 1) for row in rows]))
        scale = max(1, 128 // rows.shape[2])
        size = scale * picture.width, scale * picture.height
        picture.resize(size, Image.Resampling.NEAREST).save(folder / f'{name}.png')

"""Evaluations of simulated drives for the tests, each made once per run and shared by files."""
from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from bags import Drive, write_bag
from made_once import made_once

from worldmodel_ros.engine import load
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.forecast.loading import Forecasts
from worldmodel_ros.evaluate.drive.bag_evaluation import Task, evaluate_bag
from worldmodel_ros.evaluate.drive.evaluation import Evaluation
from worldmodel_ros.evaluate.drive.step_times import MeasuredTimes

# Measured on two cores, without the spread.
TIMES = MeasuredTimes([{'encode': 0.003, 'commit': 0.003, 'policy': 0.0002, 'denoise': 0.007, 'decode': 0.008}] * 20,
                      'tiny', 'onnx-int8', {'cpu': 'test processor', 'cores': 2})
PROVENANCE = {'command': 'worldmodel evaluate bag kitchen', 'time': '2026-01-01T00:00:00+00:00',
              'versions': {'numpy': '2'}, 'machine': {'cpu': 'test processor', 'cores': 2, 'python': '3.11'}}
_known: dict[str, Evaluation] = {}


@lru_cache(maxsize=1)
def engine() -> Engine:
    return load('tiny', 'onnx-int8')


def evaluate(bag: Path, lines: Path | None = None, seconds: float | None = None, forecasts: Forecasts | None = None
             ) -> Evaluation:
    """Evaluate the shipped model on a bag; ``lines``: file for the windows, if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        lines = lines or Path(folder) / 'windows.jsonl'
        return evaluate_bag(Task(bag, 'tiny', seconds=seconds), engine(), TIMES, lines, forecasts=forecasts)


def evaluated(drive: Drive, name: str) -> Evaluation:
    """Evaluate a drive, in a bag of that name; later calls return the evaluation by the name alone."""
    def make() -> Evaluation:
        with tempfile.TemporaryDirectory() as folder:
            return evaluate(write_bag(Path(folder) / name, drive, encoding='png'))
    if name not in _known:
        _known[name] = made_once(f'evaluation of {name}', make)
    return _known[name]

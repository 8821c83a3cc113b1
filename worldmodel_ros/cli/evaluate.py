"""``worldmodel evaluate``: evaluate models on a recording, with the deadline replayed, or in simulated rooms."""
from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments, evaluate_control, evaluate_quality

if TYPE_CHECKING:
    from worldmodel_ros.engine.forecast.loading import Forecasts

_EXAMPLES = """\
examples:
  worldmodel evaluate bag drive/                          report in out/evaluation/report.html
  worldmodel evaluate bag drive.mcap --config car.yaml    topic mapping from a file (config/evaluate/)
  worldmodel evaluate bag drive/ --model tiny --model out/run2/final
                                                          compare two models on one recording
  worldmodel evaluate bag monday/ tuesday/                compare one model on two recordings
  worldmodel evaluate bag drive/ --forecast tiny          also evaluate a scene forecast: is it in distribution?
  worldmodel evaluate bag drive/ --step-times robot.json  replay the deadline with times measured on the robot:
                                                          python -m worldmodel_ros.evaluate.drive.step_times --out robot.json

The report is one HTML page without scripts or network access; summary.json and the windows (JSON lines) are next to it.
The same frames give the same windows, bit for bit. ROS is not needed.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand, with one subcommand for each kind of evaluation."""
    parser = subparsers.add_parser(
        'evaluate', help='evaluate a model on a recording, or in rooms not used for training',
        description='Evaluates models on recordings and in simulated rooms.', epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(metavar='WHAT', required=True)
    add_bag(kinds.add_parser(
        'bag', help='a rosbag2 recording: a folder, or one .mcap or .db3 file',
        description='Runs a model along a recording and compares its predictions with the ground truth.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter))
    evaluate_quality.add_quality(kinds.add_parser(
        'quality', help='newly simulated rooms that were not used for training',
        description='Evaluates a model in simulated rooms that were not used for training; prints one JSON object.',
        epilog=evaluate_quality.EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter))
    evaluate_control.add_control(kinds.add_parser(
        'control', help='tasks with moving objects: planners with different forecasts, and models',
        description='Runs tasks in simulated rooms, closed loop, and compares controllers; prints one JSON object.',
        epilog=evaluate_control.EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter))


def add_bag(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the run function of ``evaluate bag``."""
    parser.add_argument('bag', nargs='+', type=Path, metavar='BAG', help='rosbag2 folder or file; two are compared')
    parser.add_argument('--config', type=Path, help='YAML file with the topic mapping (default: guessed)')
    parser.add_argument('--model', action='append', metavar='M',
                        help='shipped model or folder of a trained one (default: tiny); give two to compare them')
    parser.add_argument('--backend', default='auto', choices=('auto', 'torch', 'onnx', 'onnx-int8'),
                        help='back end of the networks (default: auto)')
    parser.add_argument('--forecast', metavar='F', help='scene forecast to evaluate as well: a shipped one (tiny) or a folder')
    parser.add_argument('--out', type=Path, default=Path('out/evaluation'),
                        help='folder for the results (default: out/evaluation)')
    parser.add_argument('--json', action='store_true', help='print the summary as JSON instead of text')
    parser.add_argument('--step-times', type=Path, metavar='FILE',
                        help='step times for replaying the deadline (default: measured here, 10 s)')
    parser.add_argument('--limit', type=arguments.positive, metavar='SECONDS', help='evaluate only the start of each recording')
    parser.add_argument('--skip', type=arguments.positive, metavar='SECONDS', default=0.0,
                        help='skip the start of each recording, to evaluate for example what `worldmodel finetune` held out')
    parser.set_defaults(run=_run)


def main() -> int:
    """``ros2 run worldmodel_ros evaluate_bag``."""
    parser = argparse.ArgumentParser(
        prog='evaluate_bag', epilog=_EXAMPLES.replace('worldmodel evaluate bag', 'evaluate_bag'),
        description='Runs a model along a recording and compares its predictions with the ground truth.',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bag(parser)
    chosen = parser.parse_args()
    return chosen.run(chosen)


def _run(chosen: argparse.Namespace) -> int:
    models = chosen.model or ['tiny']
    if len(chosen.bag) * len(models) > 2:
        print(f'worldmodel evaluate bag: a report cannot compare {len(chosen.bag)} bags with {len(models)} models: '
              'give two bags, or one bag and two models', file=sys.stderr)
        return 2
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.evaluate.drive.step_times import StepTimesError
    from worldmodel_ros.model.checkpoint_description import ModelError
    try:
        return _evaluate(chosen, models)
    except (BagError, ModelError, StepTimesError) as error:
        print(f'worldmodel evaluate bag: {error}', file=sys.stderr)
        return 1


def _evaluate(chosen: argparse.Namespace, models: list[str]) -> int:
    import json
    from datetime import datetime, timezone

    from worldmodel_ros.engine import load
    from worldmodel_ros.evaluate.drive.bag_evaluation import Task, evaluate_bag
    from worldmodel_ros.evaluate.drive.progress import Progress
    from worldmodel_ros.evaluate.drive.results import in_words, write_results
    from worldmodel_ros.evaluate.drive.step_times import MeasuredTimes, measure
    from worldmodel_ros.machine import machine, versions
    chosen.out.mkdir(parents=True, exist_ok=True)
    given = MeasuredTimes.load(chosen.step_times) if chosen.step_times else None
    # The files of a comparison are labelled like its evaluations, A and B.
    forecasts = _forecast(chosen) if chosen.forecast else None
    marks = iter(('',) if len(chosen.bag) * len(models) == 1 else ('_a', '_b'))
    evaluations = []
    for model in models:
        # One session to measure with and one per bag: with a tiled model, each session keeps its window of pages.
        engine, measured = load(model, chosen.backend, sessions=1 + len(chosen.bag)), given
        for bag in chosen.bag:
            mark = next(marks)
            if measured is None:
                with Progress('step times') as progress:
                    measured = measure(engine, model, progress=progress)
                measured.save(chosen.out / f'step_times{mark}.json')
            with Progress(bag.name) as progress:
                task = Task(bag, model, chosen.config, chosen.limit, chosen.skip)
                evaluations.append(evaluate_bag(task, engine, measured, chosen.out / f'windows{mark}.jsonl', progress,
                                                forecasts))
    summary = write_results(chosen.out, evaluations, {
        'command': shlex.join(['worldmodel', *sys.argv[1:]]), 'machine': machine(), 'versions': versions(),
        'time': datetime.now(timezone.utc).isoformat(timespec='seconds')})
    print(json.dumps(summary, indent=1) if chosen.json else in_words(evaluations, summary))
    print(chosen.out / 'report.html', file=sys.stderr if chosen.json else sys.stdout)
    return 0


def _forecast(chosen: argparse.Namespace) -> Forecasts:
    from worldmodel_ros.engine.forecast.loading import load_forecast
    return load_forecast(chosen.forecast, chosen.backend)

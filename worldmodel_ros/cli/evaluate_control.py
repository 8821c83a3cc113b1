"""``worldmodel evaluate control``: compare controllers on tasks with moving objects."""
from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from worldmodel_ros.cli import arguments, simulated

EXAMPLES = """\
examples:
  worldmodel evaluate control --seeds 5000000:5000060 --tasks intercept street
  worldmodel evaluate control --seeds 5000000:5000060 --tasks intercept street recall rooms runtime --json control.json
  worldmodel evaluate control --seeds 5000000:5000060 --tasks street --controllers oracle reactive b1 --variants stops delay
  worldmodel evaluate control --seeds 5000000:5000020 --tasks street --forecast out/scene --ros
  worldmodel evaluate control --seeds 5000000:5000020 --goals pose image colour --controllers oracle one_step --forecast tiny
  worldmodel evaluate control --seeds 5000000:5000020 --tasks rooms --controllers b1 --variants camera_wider camera_higher

Prints one JSON object. The same seeds give the same numbers on one machine, with any number of workers.
"""
_TASKS = ('intercept', 'street', 'recall', 'rooms', 'runtime')


_DEFAULT = ('oracle', 'tracker', 'frozen', 'reactive', 'b1', 'b2', 'none', 'one_step', 'two_step')


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the run function of ``evaluate control``."""
    parser.add_argument('--seeds', required=True, metavar='A:B',
                        help='seeds of the rooms, from A up to but not including B; none that training may use')
    parser.add_argument('--tasks', nargs='+', action='extend', metavar='T',
                        help='intercept, street, recall, rooms, places, images, any_images (also of walls only), follow, '
                             'second_ball, avoid_red, pass_behind; '
                             f'runtime: the last four (default: {" ".join(_TASKS)}; with --goals: only those)')
    parser.add_argument('--goals', nargs='+', action='extend', default=[], choices=('pose', 'image', 'colour'), metavar='G',
                        help='pose, image, colour: the tasks places, images and rooms, which consist of a goal only')
    parser.add_argument('--controllers', nargs='+', action='extend', metavar='C',
                        help='oracle, oracle_full_view, oracle_short_memory, tracker, frozen, reactive, b1; with the forecast: '
                             'b2, b2_seed_1, b2_seed_2, still, none, one_step, two_step, motion_unseen, another_future '
                             f'(default: {" ".join(_DEFAULT)})')
    parser.add_argument('--forecast', default='tiny', metavar='F',
                        help='learned scene forecast: name of a shipped one, or folder written by '
                             'python -m worldmodel_ros.train.scene.run (default: tiny)')
    parser.add_argument('--ros', action='store_true',
                        help='run the rooms of the plain tasks over real topics in real time, with the nodes and the forecast '
                             'of --forecast; not with --controllers, --variants, --rungs and --workers')
    parser.add_argument('--log', type=Path, default=Path('out/control/log'), metavar='FOLDER',
                        help='folder for the node logs, with --ros (default: out/control/log)')
    parser.add_argument('--rungs', nargs='+', action='extend', choices=('two_step', 'one_step', 'head'),
                        help='tiers whose measured time passes before a planned command takes effect: the first one in the '
                             'tasks, each other one as a variant; b1 has its own (default: two_step)')
    parser.add_argument('--variants', nargs='+', action='extend', default=[], metavar='V',
                        help='in addition to the plain tasks. shifted: faster and more movers; stops: shuttles stop at random; '
                             'delay: 200 ms more; camera_wide, camera_wider: 640x480, distorted, 110 degrees across or down; '
                             'camera_pitched: camera_wider, 5 degrees further down; these three also with _uncorrected; '
                             'camera_higher: by 0.1 m; camera_128: the training camera, scaled images of small_tiles; '
                             'camera_height_+0.05 and other heights [m], camera_pitch_-5 and other pitches [degrees]: see '
                             'docs/own_robot.md')
    parser.add_argument('--model', default='tiny', metavar='M',
                        help='model of b1: a shipped one, or folder of a trained one (default: tiny)')
    parser.add_argument('--backend', default='auto', choices=('auto', 'torch', 'onnx', 'onnx-int8'),
                        help='back end of the networks (default: auto)')
    parser.add_argument('--workers', type=int, metavar='N', help='number of processes (default: one per core)')
    parser.add_argument('--episodes', type=arguments.result_file, metavar='FILE',
                        help='file of JSON lines, one per episode; episodes in it are not run again')
    parser.add_argument('--seconds', type=float, default=math.inf, metavar='N',
                        help='start no new episode after N seconds; the result has the rooms that all controllers have run in')
    simulated.add_json(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.model.checkpoint_description import ModelError
    try:
        return _over_ros(chosen) if chosen.ros else _evaluate(chosen)
    except (ModelError, ValueError, RuntimeError) as error:
        print(f'worldmodel evaluate control: {error}', file=sys.stderr)
        return 1


def _evaluate(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.evaluate.control.run import Question, evaluate
    from worldmodel_ros.evaluate.quality.seeds import parse_seeds
    question = Question(parse_seeds(chosen.seeds), _tasks(chosen), tuple(chosen.controllers or _DEFAULT),
                        tuple(chosen.rungs or ('two_step',)), tuple(chosen.variants), chosen.model, chosen.backend,
                        chosen.forecast)
    kept = None if chosen.episodes is None else Path(chosen.episodes)
    simulated.report('control', chosen,
                     lambda workers, progress: evaluate(question, workers, progress, kept, chosen.seconds))
    return 0


def _tasks(chosen: argparse.Namespace) -> tuple[str, ...]:
    from worldmodel_ros.evaluate.control.tasks import GOALS, expand
    goals = [GOALS[goal] for goal in chosen.goals]
    return expand([*(chosen.tasks or (() if goals else _TASKS)), *goals])


def _over_ros(chosen: argparse.Namespace) -> int:
    if chosen.episodes or chosen.seconds < math.inf:
        raise ValueError('--seconds and --episodes only work without --ros: leave them out, or give fewer seeds')
    if given := [f'--{name}' for name in ('variants', 'controllers', 'rungs', 'workers')
                 if getattr(chosen, name) not in (None, [])]:
        raise ValueError(f'{", ".join(given)} only works without --ros, where the nodes drive in the plain tasks: leave it out')
    from worldmodel_ros.cli.evaluate_control_ros import drive
    from worldmodel_ros.evaluate.quality.seeds import parse_seeds
    tasks, seeds = _tasks(chosen), parse_seeds(chosen.seeds)
    folder = Path(chosen.forecast)
    bringup = {'model': chosen.model, 'backend': chosen.backend,
               'forecast': str(folder.resolve()) if folder.is_dir() else chosen.forecast}
    simulated.report('control', chosen, lambda workers, progress: drive(tasks, seeds, bringup, chosen.log, progress))
    return 0

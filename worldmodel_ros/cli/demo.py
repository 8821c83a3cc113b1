"""``worldmodel demo``: drive the simulated robot, record and evaluate the run, and write a report."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments

if TYPE_CHECKING:
    from worldmodel_ros.demo.recording import Recording

_EXAMPLES = """\
examples:
  worldmodel demo                             cross streets for 30 s; report.html and summary.json in out/demo/
  worldmodel demo --task intercept            touch a rolling ball; docs/tasks.md has all tasks
  worldmodel demo --seconds 60 --seed 1000007   other rooms, longer
  worldmodel demo --goal red,blue             go to objects in turn, by the world model's own policy
  worldmodel demo --load                      with another program loading every core
  worldmodel demo --kill-at 10                kill the model's process after 10 s: the robot stops, then drives on
  ROS_DOMAIN_ID=7 worldmodel demo             on a domain of your choice, to watch in RViz or Foxglove

Starts and stops three processes: sim_robot, world_model_node and command_gate. This process only observes.
The exit code is 0 only if the run worked: the robot moved, commands arrived, none was late, and most were chosen by their
predicted outcome. It is 3 if the robot was safe but the models were too slow on this machine (most commands chosen
without a forecast; with --goal, few predictions in time), and 1 if the run did not work.
"""
FORECAST = 'tiny'  # on which the commands of a task are decided


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'demo', help='drive the simulated robot with the world model, and write a report',
        description='Drives the simulated robot over ROS 2, using the predictions of a world model.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=arguments.positive, default=30.0,
                        help='driving time [s] (default: 30)')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--task', choices=arguments.TASKS,
                      help='what to do, in one room after another (default: street)')
    what.add_argument('--goal', type=arguments.goals, metavar='COLOUR,...',
                      help='instead of a task: objects to drive to in turn, in one room where nothing moves')
    parser.add_argument('--seed', type=int, help='seed of the first room; those below 1000000 are training rooms '
                        '(default: as in config/sim_robot.yaml)')
    parser.add_argument('--model', help='name of a shipped model, or folder of a trained one')
    parser.add_argument('--load', action='store_true', help='load every core with another program')
    parser.add_argument('--kill-at', type=arguments.positive, action='append', default=[], metavar='S',
                        help='kill the model\'s process S seconds into the run; may be repeated')
    parser.add_argument('--horizon', type=arguments.positive, default=0.8, metavar='S',
                        help='horizon of the what-if questions [s] (default: 0.8)')
    arguments.add_bringup(parser)
    parser.add_argument('--namespace', type=arguments.namespace, default='',
                        help='ROS namespace of the robot')
    parser.add_argument('--out', type=Path, default=Path('out/demo'),
                        help='folder for the results (default: out/demo)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    if max(chosen.kill_at, default=0.0) >= chosen.seconds:
        print(f'worldmodel demo: --kill-at {max(chosen.kill_at):g} is not within --seconds {chosen.seconds:g}', file=sys.stderr)
        return 2
    settings = dict(chosen.set)
    for name in ('task', 'goal'):  # the demo sets them itself
        if name in settings:
            print(f'worldmodel demo: {name} has an option of its own: give --{name} {settings[name]} instead of --set '
                  f'{name}:={settings[name]}', file=sys.stderr)
            return 2
    from worldmodel_ros.demo.drive import Plan
    from worldmodel_ros.demo.run import Options, run_demo
    task = '' if chosen.goal else chosen.task or arguments.TASKS[0]
    plan = Plan(chosen.seconds, chosen.goal or [], task, horizon=chosen.horizon, kill_at=chosen.kill_at)
    given = {'seed': chosen.seed, 'model': chosen.model}
    bringup = {'forecast': FORECAST if task else '', **settings,
               **{name: value for name, value in given.items() if value is not None}}
    return run_demo(Options(plan, chosen.out, bringup, chosen.parameters, chosen.namespace, chosen.load,
                            arguments.domain_id()), _observing)


def _observing(recording: Recording, namespace: str, remappings: Mapping[str, str]) -> AbstractContextManager:
    from worldmodel_ros.nodes.demo.observer import observing  # lazily: rclpy reads its environment when it is loaded
    return observing(recording, namespace, remappings)

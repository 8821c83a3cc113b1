"""``worldmodel demo``: drive the simulated robot, record and evaluate the run, and write a report."""
from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments

if TYPE_CHECKING:
    from worldmodel_ros.demo.recording import Recording

_EXAMPLES = """\
examples:
  worldmodel demo                             30 s of crossing streets; report.html and summary.json in out/demo/
  worldmodel demo --task intercept            touch a rolling ball; docs/tasks.md has all tasks
  worldmodel demo --seconds 60 --seed 1000007   other rooms, longer
  worldmodel demo --goal red,blue             go to objects in turn, by the world model's own policy
  worldmodel demo --load                      while another program burns every core
  worldmodel demo --kill-at 10                kill the model's process after 10 s: stop, then drive on
  ROS_DOMAIN_ID=7 worldmodel demo             on a domain of your choice, to look on with RViz or Foxglove

Three processes are started and stopped: sim_robot, world_model_node and command_gate. This one looks on.
The exit code is 0 only if the run worked: the robot moved, commands came, none of them was late, and most were decided
by what they would lead to. It is 3 where the robot was safe but the models too slow on this machine (most commands
decided without a forecast; with --goal, few predictions in time), and 1 where the run did not work.
"""
FORECAST = 'tiny'  # on which the commands of a task are decided


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'demo', help='drive the simulated robot with the world model, and draw what happened',
        description='Drives the simulated robot over ROS 2, by what a model of the world imagines.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=arguments.positive, default=30.0,
                        help='time of driving [s] (default: 30)')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--task', choices=arguments.TASKS,
                      help='what to do, in one room after another (default: street)')
    what.add_argument('--goal', type=arguments.goals, metavar='COLOUR,...',
                      help='instead of a task: objects to drive to in turn, in one room where nothing moves')
    parser.add_argument('--seed', type=int, help='of the first room; those below 1000000 are training rooms '
                        '(default: that of config/sim_robot.yaml)')
    parser.add_argument('--model', help='name of a shipped model, or folder of a trained one')
    parser.add_argument('--load', action='store_true', help='burn every core with another program meanwhile')
    parser.add_argument('--kill-at', type=arguments.positive, action='append', default=[], metavar='S',
                        help='kill the model\'s process S seconds into the drive; may be given several times')
    parser.add_argument('--horizon', type=arguments.positive, default=0.8, metavar='S',
                        help='how far the what-if questions look ahead [s] (default: 0.8)')
    arguments.add_bringup(parser)
    parser.add_argument('--namespace', type=arguments.namespace, default='',
                        help='ROS namespace of the robot')
    parser.add_argument('--out', type=Path, default=Path('out/demo'),
                        help='folder for the results (default: out/demo)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.demo.drive import Plan
    from worldmodel_ros.demo.run import Options, run_demo
    task = '' if chosen.goal else chosen.task or arguments.TASKS[0]
    plan = Plan(chosen.seconds, chosen.goal or [], task, horizon=chosen.horizon, kill_at=chosen.kill_at)
    bringup = {'forecast': FORECAST if task else '', **dict(chosen.set), 'seed': chosen.seed, 'model': chosen.model}
    return run_demo(Options(plan, chosen.out, bringup, chosen.parameters, chosen.namespace, chosen.load,
                            arguments.domain_id()), _observing)


def _observing(recording: Recording, namespace: str) -> AbstractContextManager:
    from worldmodel_ros.nodes.demo.observer import observing  # lazily: rclpy reads its environment when it is loaded
    return observing(recording, namespace)

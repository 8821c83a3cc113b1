"""``worldmodel what-if``: ask the running model for predictions of action sequences, and plot the answer."""
from __future__ import annotations

import argparse
from pathlib import Path

from worldmodel_ros.cli import arguments

_MANEUVERS = ('forward', 'left', 'right', 'stop', 'backward', 'policy')
_NAMES = ('forward', 'left', 'right', 'stop')

_EXAMPLES = """\
examples:
  worldmodel up &                             the system must be running, on the same ROS_DOMAIN_ID
  worldmodel what-if                          forward, left, right or stop? Image in out/what_if/what_if.png
  worldmodel what-if --names left policy      turn left, or follow the model's policy?
  worldmodel what-if --horizon 1.6 --goal red     look further ahead; progress towards the red object
  worldmodel what-if --image /front/image     a robot with another camera topic

The control loop is not disturbed. With the simulator, its true futures are drawn below the model's.
With a ROS 2 distribution, the same question is
  ros2 service call /world_model_node/what_if worldmodel_ros/srv/WhatIf "{names: [left, right]}"
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'what-if', help='ask the running model for the outcomes of actions, and draw them',
        description='Asks the model for the outcome of each of several action sequences, starting now.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--names', nargs='+', action='extend', choices=_MANEUVERS, metavar='NAME',
                        help=f'one or more of {", ".join(_MANEUVERS)} (default: {" ".join(_NAMES)})')
    parser.add_argument('--horizon', type=arguments.positive, default=0.8,
                        help='how far to look ahead [s] (default: 0.8)')
    parser.add_argument('--goal', choices=arguments.GOALS, default='',
                        help='goal of the progress (default: the current one, which the simulator does not know)')
    parser.add_argument('--namespace', type=arguments.namespace, default='',
                        help='ROS namespace of the robot')
    arguments.add_topics(parser, 'image', 'compressed_image')
    parser.add_argument('--timeout', type=arguments.positive, default=10.0,
                        help='time to wait for the answer [s] (default: 10); branches not predicted by then are left out')
    parser.add_argument('--out', type=Path, default=Path('out/what_if'),
                        help='folder for the image (default: out/what_if)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import os
    import sys

    from worldmodel_ros.bringup.description import load
    from worldmodel_ros.bringup.environment import node_environment
    domain = arguments.domain_id() or 0
    os.environ.update(node_environment(load().environment, domain, str(chosen.out / 'ros'),
                                       this_machine_only=False))
    from worldmodel_ros.nodes.common.what_if_client import COMPRESSED_IMAGE, IMAGE, ask_once
    try:
        images = (chosen.image or IMAGE, chosen.compressed_image or COMPRESSED_IMAGE)
        answer, observed = ask_once(
            tuple(chosen.names or _NAMES), chosen.goal, chosen.horizon, chosen.namespace, chosen.timeout, images)
    except RuntimeError as error:
        print(f'worldmodel what-if: {error}', file=sys.stderr)
        return 1
    from worldmodel_ros.demo.what_if_picture import anywhere, draw_what_if, progress
    chosen.out.mkdir(parents=True, exist_ok=True)
    draw_what_if(chosen.out / 'what_if.png', answer, observed)
    truth = {b.name: b for b in answer.truth}
    for branch in answer.branches:
        line = f'{branch.name:<10} {progress(branch):<17} contact risk {anywhere(branch.risk):4.0%}'
        if branch.name in truth:
            true = truth[branch.name]
            line += f'   really: {progress(true)}, {"contact" if true.risk.any() else "no contact"}'
        print(line)
        if branch.terms:  # scored like the candidates of a decision
            print(f'{"":<10} score {sum(branch.terms):+.2f}: '
                  + '; '.join(f'{value:+.2f} {term}' for value, term in zip(branch.terms, answer.terms, strict=True)))
    if answer.left_out:
        print(f'worldmodel what-if: {answer.left_out}', file=sys.stderr)
    print(f'{len(answer.branches)} branches in {answer.elapsed * 1e3:.0f} ms; image in {chosen.out / "what_if.png"}')
    return 0

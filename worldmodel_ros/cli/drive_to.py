"""``worldmodel drive-to``: send a goal by colour, place or image, and print feedback and result; Ctrl-C cancels it."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel drive-to red                     a goal object, as seen by the camera
  worldmodel drive-to --pose 2.0 -0.5         x and y in the odometry frame [m]
  worldmodel drive-to --pose 1.0 0.0 --frame base_link --timeout 20
  worldmodel drive-to --pose 2.0 -0.5 --yaw 1.57
  worldmodel drive-to --image there.png       what the camera should see

Needs a world_model_node with a forecast (worldmodel up --set forecast:=tiny) in this ROS domain. The exit code is 0 if the
goal was reached, 1 if it was not, and 3 if it was refused.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'drive-to', help='drive to a goal, and report when it is reached',
        description='Sends a goal to the action drive_to, shows its feedback, and cancels it on Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('goal', nargs='?', choices=arguments.GOALS, help='goal object')
    parser.add_argument('--pose', type=float, nargs=2, metavar=('X', 'Y'), help='position [m]')
    parser.add_argument('--yaw', type=float, help='heading at --pose [rad] (default: any)')
    parser.add_argument('--image', type=Path, metavar='FILE', help='what the camera should see: an image taken with it')
    parser.add_argument('--frame', default='odom', help='frame of --pose: the odometry frame, or base_link (default: odom)')
    parser.add_argument('--timeout', type=float, default=0.0, metavar='S', help='give up after S seconds (default: never)')
    parser.add_argument('--namespace', type=arguments.namespace, default='', help='ROS namespace of the robot')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    if sum(given is not None for given in (chosen.goal, chosen.pose, chosen.image)) != 1:
        print('worldmodel drive-to: give a goal object, --pose or --image', file=sys.stderr)
        return 2
    if chosen.yaw is not None and chosen.pose is None:
        print('worldmodel drive-to: --yaw needs --pose', file=sys.stderr)
        return 2
    image = None
    if chosen.image:
        import numpy as np
        from PIL import Image
        try:
            image = np.asarray(Image.open(chosen.image).convert('RGB'))
        except OSError as error:
            print(f'worldmodel drive-to: {chosen.image} is not an image: {error}', file=sys.stderr)
            return 2
    from worldmodel_ros.nodes.common.drive_to_client import Wanted, drive_to
    place = chosen.pose and (*chosen.pose, *(() if chosen.yaw is None else (chosen.yaw,)))
    return drive_to(Wanted(chosen.goal or '', place, chosen.frame, image, chosen.timeout), chosen.namespace)

"""``worldmodel calibrate``: fit the parameters of a robot to a recording, or by driving it with a deadman switch."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worldmodel_ros import interrupts
from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel calibrate drive1                           from a recording (`worldmodel record`): print the estimates
  worldmodel calibrate drive1 --out mine.yaml --parameters node.yaml
  worldmodel calibrate --drive --deadman /joy --button 4    drive steps for 25 s, while the button is held
  worldmodel calibrate --drive --deadman /deadman           the same with std_msgs/Bool, true ten times a second

The base needs its own command timeout, and the robot 1 m of free space around it. To estimate camera pitch and wheel slip as
well, record the run (`worldmodel record`) and calibrate from the recording. The exit code is 1 if nothing could be estimated.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'calibrate', help='fit latency, gains, slip and camera pitch of your robot',
        description='Fits how the base follows its commands, from a bag or by driving; rejects what cannot be estimated.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, nargs='?', help='rosbag2 recording with commands and odometry or images')
    parser.add_argument('--config', type=Path, metavar='FILE', help='topics of the bag, as for `worldmodel evaluate bag`')
    parser.add_argument('--odometry', default='', metavar='TOPIC', help='wheel odometry (default: odom)')
    parser.add_argument('--drive', action='store_true', help='drive the robot through steps instead of reading a bag')
    parser.add_argument('--deadman', metavar='TOPIC', help='deadman switch: sensor_msgs/Joy or std_msgs/Bool')
    parser.add_argument('--button', type=int, metavar='N', help='button of sensor_msgs/Joy; without it, std_msgs/Bool')
    parser.add_argument('--speed', type=arguments.positive, default=0.2, metavar='V', help='maximum, m/s (default: 0.2)')
    parser.add_argument('--turn', type=arguments.positive, default=0.6, metavar='W', help='maximum, rad/s (default: 0.6)')
    parser.add_argument('--namespace', type=arguments.namespace, default='', help='ROS namespace of the robot')
    parser.add_argument('--twist', action='store_true', help='the base takes Twist rather than TwistStamped')
    arguments.add_topics(parser, 'cmd_vel')
    parser.add_argument('--out', type=Path, metavar='FILE', help='YAML file for estimates, with intervals, and rejections')
    parser.add_argument('--parameters', type=Path, metavar='FILE', help='YAML file for the node parameters')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    if bool(chosen.bag) == chosen.drive:
        print('worldmodel calibrate: give a bag, or --drive', file=sys.stderr)
        return 2
    if chosen.drive and not chosen.deadman:
        print('worldmodel calibrate: --drive needs --deadman, the topic of a switch that a person holds', file=sys.stderr)
        return 2
    import yaml

    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.calibrate.recording import calibrate, read
    try:
        signals = _drive(chosen) if chosen.drive else read(chosen.bag, chosen.config, chosen.odometry)
    except (BagError, RuntimeError) as error:
        print(f'worldmodel calibrate: {error}', file=sys.stderr)
        return 1
    for note in signals.notes:
        print(f'note: {note}', file=sys.stderr)
    found = calibrate(signals)
    text = yaml.safe_dump(found.to_dict(), sort_keys=False, width=120)
    print(text, end='')
    if chosen.out:
        chosen.out.write_text(text)
    if chosen.parameters:
        node = f'/**/{chosen.namespace}/world_model_node' if chosen.namespace else '/**/world_model_node'
        chosen.parameters.write_text('# By `worldmodel calibrate`.\n' + yaml.safe_dump(
            {node: {'ros__parameters': found.parameters}}, sort_keys=False))
    return 0 if found.responses or found.estimates else 1


def _drive(chosen: argparse.Namespace):
    from worldmodel_ros.nodes.calibrator.node import Run, drive
    run = Run(chosen.deadman, chosen.button, chosen.cmd_vel or 'cmd_vel', chosen.odometry or 'odom', not chosen.twist,
              chosen.speed, chosen.turn, chosen.namespace)
    interrupts.as_ctrl_c()  # so that the robot is told to stand
    return drive(run, lambda text: print(text, file=sys.stderr, flush=True))

"""``worldmodel record``: record the inputs and outputs of the running world model."""
from __future__ import annotations

import argparse
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel up & worldmodel record           camera, commands, plans, predictions, diagnostics, until Ctrl-C
  worldmodel record --out drive1              to the folder drive1, which must not exist yet
  worldmodel record --namespace robot1        one of several robots
  worldmodel record --image /front/image_raw --cmd-vel /base/cmd_vel      a robot with other topic names
  worldmodel record --parameters mine.yaml    other topics, file size and memory (see config/recorder.yaml)

The result is a rosbag2 of MCAP files: `worldmodel evaluate bag`, `ros2 bag` and Foxglove can open it.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'record', help='record the camera, the commands and the predictions to a bag',
        description='Records a running system to a rosbag2 (MCAP) until Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, metavar='DIR',
                        help='folder to create (default: rosbag2_<date and time>)')
    parser.add_argument('--namespace', type=arguments.namespace, default='', help='ROS namespace of the robot')
    arguments.add_topics(parser, 'image', 'compressed_image', 'camera_info', 'cmd_vel', 'odom')
    parser.add_argument('--sim-time', action='store_true', help='take the time from /clock')
    parser.add_argument('--parameters', type=Path, nargs='+', action='extend', default=[], metavar='FILE',
                        help='parameter files that override config/recorder.yaml')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import os
    import sys
    import tempfile
    import time

    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.bringup.environment import network, node_environment
    from worldmodel_ros.paths import NotInstalledError, find_executable
    folder = chosen.out or Path(time.strftime('rosbag2_%Y_%m_%d-%H_%M_%S'))
    try:
        description = load()
        values = {'record': str(folder.expanduser().absolute()), 'use_sim_time': chosen.sim_time,
                  **{name: getattr(chosen, name) for name in arguments.TOPICS}}
        nodes = description.resolve('robot', values, chosen.parameters)
        node, = (node for node in nodes if node.executable == 'recorder')
        executable = find_executable(node.package, node.executable)
    except (DescriptionError, NotInstalledError) as error:
        print(f'worldmodel record: {error}', file=sys.stderr)
        return 1
    logs = tempfile.mkdtemp(prefix='worldmodel_record_')  # not a folder of a fixed name, which might be another user's
    environment = node_environment(description.environment, arguments.domain_id() or 0, logs, this_machine_only=False)
    print(f'Recording ({network(environment)}; logs in {logs})', flush=True)
    environment.update(node.own_environment(environment, description.environment))
    # Replace this process, so that every signal reaches the one that must complete the bag.
    os.execve(sys.executable, [sys.executable, str(executable), *node.ros_arguments(chosen.namespace)], environment)

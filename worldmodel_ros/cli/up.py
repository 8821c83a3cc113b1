"""`worldmodel up`: run the nodes without a distribution's `ros2 launch`."""
from __future__ import annotations

import argparse
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel up                               the simulated robot and its world model, until Ctrl-C
  worldmodel up --target robot                world model and gate alone, for a robot that is there already
  worldmodel up --namespace left right        two robots that do not hear each other
  worldmodel up --namespace left right --set server:=true     and that share one engine
  worldmodel up --set seed:=7 cmd_vel:=drive  values of config/bringup.yaml's arguments
  worldmodel up --parameters mine.yaml        a parameter file that wins over those in config/

Where a ROS 2 distribution is installed, `ros2 launch worldmodel_ros` starts the same nodes.
The nodes run on ROS_DOMAIN_ID if it is set, else on domain 0.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'up', help='run the nodes until Ctrl-C',
        description='Starts the nodes, restarts those that die, stops them on Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--target', choices=('sim', 'robot'), default='sim',
                        help='simulated or real robot (default: sim)')
    parser.add_argument('--namespace', type=arguments.namespace, nargs='+', default=[''], metavar='NAME',
                        help='one robot for each namespace')
    arguments.add_bringup(parser)
    parser.add_argument('--logs', type=Path, default=Path('out/log'),
                        help='folder for the nodes\' logs (default: out/log)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import signal
    import sys

    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.bringup.paths import NotInstalledError
    from worldmodel_ros.bringup.supervisor import Supervisor

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        description = load()
        nodes = description.resolve(chosen.target, dict(chosen.set), chosen.parameters)
        domain = arguments.domain_id() or 0
        with Supervisor(description.environment, chosen.logs, domain) as supervisor:
            for name in chosen.namespace:
                supervisor.add(nodes, name)
            names = ', '.join(supervisor.processes)
            print(f'Starting {names} (ROS_DOMAIN_ID={domain}); logs in {chosen.logs}', flush=True)
            supervisor.start()
            supervisor.wait_ready(timeout=120.0)
            print('All nodes run. Ctrl-C stops them.', flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print('\nstopped')
        return 0
    except (DescriptionError, NotInstalledError, RuntimeError, ValueError) as error:
        print(f'worldmodel up: {error}', file=sys.stderr)
        return 1
    return 0

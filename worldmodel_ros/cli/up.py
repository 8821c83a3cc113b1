"""`worldmodel up`: run the nodes without a distribution's `ros2 launch`."""
from __future__ import annotations

import argparse

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel up                               the simulated robot and its world model, until Ctrl-C
  worldmodel up --target robot                world model and gate alone, for a robot that is there already
  worldmodel up --namespace left right        two robots that do not hear each other
  worldmodel up --namespace left right --set server:=true     and that share one engine
  worldmodel up --set seed:=7 cmd_vel:=drive  values of config/bringup.yaml's arguments
  worldmodel up --show-args                   which arguments there are, and what they are for
  worldmodel up --parameters mine.yaml        a parameter file that wins over those in config/

Where a ROS 2 distribution is installed, `ros2 launch worldmodel_ros` starts the same nodes.
The nodes run on ROS_DOMAIN_ID if it is set, else on domain 0. Simulated robots hear no other machine, unless
ROS_AUTOMATIC_DISCOVERY_RANGE is set; a real one is in the network that your environment says.
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
    parser.add_argument('--show-args', action='store_true', help='show the arguments that --set takes, and start nothing')
    arguments.add_start(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import signal
    import sys
    from functools import partial

    from worldmodel_ros.bringup import fleet
    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.bringup.environment import network
    from worldmodel_ros.bringup.supervisor import Supervisor
    from worldmodel_ros.paths import NotInstalledError

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        description = load()
        if chosen.show_args:
            for argument in description.arguments_for(chosen.target):
                print(f'{argument.name}\n    {description.help(argument)}')
            return 0
        robots = [(name, description.resolve(chosen.target, values, chosen.parameters))
                  for name, values in fleet.robots(chosen.target, chosen.namespace, dict(chosen.set))]
        with Supervisor(description.environment, chosen.logs, arguments.domain_id() or 0,
                        this_machine_only=chosen.target == 'sim',
                        activation_timeout=chosen.activation_timeout) as supervisor:
            for name, nodes in robots:
                supervisor.add(nodes, name)
            print(f'Starting {", ".join(supervisor.processes)} ({network(supervisor.environment)}); '
                  f'logs in {chosen.logs}', flush=True)
            supervisor.start()
            supervisor.wait_ready(chosen.activation_timeout, partial(print, flush=True))
            failures = '; '.join(f'{name} {reason}' for name, reason in supervisor.failures().items())
            print(f'{"All nodes run" if not failures else f"Not all nodes run: {failures}"}. Ctrl-C stops them.',
                  flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print('\nstopped')
        return 0
    except (DescriptionError, NotInstalledError, RuntimeError, ValueError) as error:
        print(f'worldmodel up: {error}', file=sys.stderr)
        return 1
    return 0

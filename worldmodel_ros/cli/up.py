"""``worldmodel up``: run the nodes without ``ros2 launch``."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments
from worldmodel_ros.cli.supervision import supervise

if TYPE_CHECKING:
    from worldmodel_ros.bringup.description import Description, NodeDescription
    from worldmodel_ros.bringup.supervisor import Supervisor

_EXAMPLES = """\
examples:
  worldmodel up                               the simulated robot and its world model, until Ctrl-C
  worldmodel up --target robot                world model and gate only, for an existing robot
  worldmodel up --namespace left right        two robots, isolated from each other
  worldmodel up --namespace left right --set server:=true     and with one shared engine
  worldmodel up --set seed:=7 cmd_vel:=drive  values of config/bringup.yaml's arguments
  worldmodel up --show-args                   list the arguments, with explanations
  worldmodel up --parameters mine.yaml        a parameter file that overrides those in config/

If a ROS 2 distribution is installed, `ros2 launch worldmodel_ros` starts the same nodes.
The nodes run on ROS_DOMAIN_ID if it is set, else on domain 0. Simulated robots communicate on this machine only, unless
ROS_AUTOMATIC_DISCOVERY_RANGE is set; for a real robot, your environment sets the network.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'up', help='run the nodes until Ctrl-C',
        description='Starts the nodes, restarts those that die, stops them on Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--target', choices=('sim', 'robot'), default='sim',
                        help='simulated or real robot (default: sim)')
    parser.add_argument('--namespace', type=arguments.namespace, nargs='+', action='extend', metavar='NAME',
                        help='namespaces, one for each robot')
    arguments.add_bringup(parser)
    parser.add_argument('--show-args', action='store_true', help='list the arguments of --set, and start nothing')
    arguments.add_start(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import signal

    from worldmodel_ros.bringup import fleet
    from worldmodel_ros.bringup.description import DescriptionError
    from worldmodel_ros.bringup.environment import network

    if chosen.show_args:
        return _show_arguments(chosen.target)

    def starting(supervisor: Supervisor) -> str:
        return (f'Starting {", ".join(supervisor.processes)} ({network(supervisor.environment)}); '
                f'logs in {chosen.logs}')

    def wait(supervisor: Supervisor) -> int:
        failures = '; '.join(f'{name} {reason}' for name, reason in supervisor.failures().items())
        print(f'{"All nodes run" if not failures else f"Not all nodes run: {failures}"}. Ctrl-C stops them.', flush=True)
        signal.pause()
        return 0

    def robots(description: Description) -> list[tuple[str, tuple[NodeDescription, ...]]]:
        without_effect = {name for name, _ in chosen.set} & {argument.name for argument in description.arguments}
        without_effect -= {argument.name for argument in description.arguments_for(chosen.target)}
        if without_effect:
            raise DescriptionError(f"argument '{min(without_effect)}' has no effect with --target {chosen.target}: leave it "
                                   f'out; --target {chosen.target} --show-args lists those that have one')
        return [(name, description.resolve(chosen.target, values, chosen.parameters))
                for name, values in fleet.robots(chosen.target, chosen.namespace or [''], dict(chosen.set))]

    return supervise('up', chosen, robots, starting, wait, this_machine_only=chosen.target == 'sim')


def _show_arguments(target: str) -> int:
    import sys

    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.paths import NotInstalledError
    try:
        description = load()
    except (DescriptionError, NotInstalledError) as error:
        print(f'worldmodel up: {error}', file=sys.stderr)
        return 1
    for argument in description.arguments_for(target):
        print(f'{argument.name}\n    {description.help(argument)}')
    return 0

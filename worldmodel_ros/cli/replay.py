"""``worldmodel replay``: play a recording into a world model node that it starts, without ``ros2 launch``."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.cli import arguments
from worldmodel_ros.cli.supervision import supervise

if TYPE_CHECKING:
    from worldmodel_ros.bringup.description import Description, NodeDescription
    from worldmodel_ros.bringup.process import NodeProcess
    from worldmodel_ros.bringup.supervisor import Supervisor

_EXAMPLES = """\
examples:
  worldmodel replay drive                       play the bag; watch in RViz or Foxglove
  worldmodel replay drive --goal red --record out/red   record what it would have done, and its predictions
  worldmodel replay drive --paused              then, message by message:
      ros2 service call /replay/bag_player/play_next std_srvs/srv/Trigger
  worldmodel replay drive --config map.yaml     if the topics cannot be guessed (examples in config/evaluate/)

The model's node runs on simulated time, from the bag; no gate runs, and no robot is driven. All topics
except /clock and /diagnostics are in the namespace /replay, and stay on this machine unless
ROS_AUTOMATIC_DISCOVERY_RANGE is set, so that no robot acts on them.
For numbers and a report, use `worldmodel evaluate bag`, which needs neither ROS nor real time.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'replay', help='play a recording into a world model node',
        description='Starts a world model node, and plays a rosbag2 to it over ROS topics, to the end or until Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, metavar='BAG', help='rosbag2 folder, or one .mcap or .db3 file')
    parser.add_argument('--config', type=Path, metavar='FILE',
                        help='YAML file with the topics of camera, actions and goal (default: guessed)')
    parser.add_argument('--model', help='name of a shipped model, or folder of a trained one')
    parser.add_argument('--goal', default='', help='goal to plan for, if the bag has none (default: none)')
    parser.add_argument('--rate', type=arguments.positive, default=1.0,
                        help='seconds of the bag per second (default: 1)')
    parser.add_argument('--paused', action='store_true', help='start paused')
    parser.add_argument('--loop', action='store_true', help='start over at the end')
    parser.add_argument('--record', type=Path, metavar='DIR', help='record everything to a new bag')
    parser.add_argument('--namespace', type=arguments.namespace, default='replay',
                        help='ROS namespace of all topics (default: replay)')
    arguments.add_bringup(parser)
    arguments.add_start(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import sys

    from worldmodel_ros.bringup.environment import network
    from worldmodel_ros.bringup.replay import PARAMETERS, prepare

    given = {'bag': chosen.bag, 'config': chosen.config, 'model': chosen.model, 'goal': chosen.goal,
             'rate': chosen.rate, 'start_paused': chosen.paused, 'loop': chosen.loop, 'record': chosen.record}
    topics: dict[str, str] = {}
    recorders: list[NodeProcess] = []

    def robots(description: Description) -> list[tuple[str, list[NodeDescription]]]:
        replay = prepare({**given, **dict(chosen.set)})
        topics.update(replay.topics)
        return [(chosen.namespace, description.resolve('replay', replay.arguments, chosen.parameters, PARAMETERS))]

    def starting(supervisor: Supervisor) -> str:
        recorders.extend(process for name, process in supervisor.processes.items() if name.endswith('/recorder'))
        gets = ', '.join(f'{source} as {name}' for source, name in topics.items())
        return f'Starting ({network(supervisor.environment)}; logs in {chosen.logs}); the model gets {gets}'

    def wait(supervisor: Supervisor) -> int:
        print('Playing. Ctrl-C stops it.', flush=True)
        code = supervisor.wait_for_end()
        if code:
            print(f'worldmodel replay: the player ended with exit code {code}, see {chosen.logs}', file=sys.stderr)
        return code

    code = supervise('replay', chosen, robots, starting, wait)
    for failed in (process.exit_codes[-1] for process in recorders if any(process.exit_codes[-1:])):
        print(f'worldmodel replay: the recorder ended with exit code {failed}, see {chosen.logs}: what it has recorded is not '
              'complete', file=sys.stderr)
        code = code or 1
    if not code and chosen.record:
        print(f'Recorded in {chosen.record}: open its .mcap in Foxglove, or run `worldmodel evaluate bag` on it')
    return code

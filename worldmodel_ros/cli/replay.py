"""`worldmodel replay`: play a recorded drive into the running world model, without `ros2 launch`."""
from __future__ import annotations

import argparse
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel replay drive                       play the bag; look on with RViz or Foxglove
  worldmodel replay drive --goal red --record out/red   what would it have done? To a bag, with what it expected
  worldmodel replay drive --paused              then, message by message:
      ros2 service call /replay/bag_player/play_next std_srvs/srv/Trigger
  worldmodel replay drive --config map.yaml     where the topics cannot be guessed (config/evaluate/ has examples)

The model's node runs with simulated time, which the bag gives; no gate runs, and nothing is driven. All topics
but /clock and /diagnostics are in the namespace /replay, and stay on this machine unless
ROS_AUTOMATIC_DISCOVERY_RANGE is set, so that no robot takes them for its own.
For numbers and a report, `worldmodel evaluate bag` needs no ROS and no time.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'replay', help='play a recorded drive into the running world model',
        description='Plays a rosbag2 over real topics into the world model, to its end or until Ctrl-C.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, metavar='BAG', help='rosbag2 folder, or one .mcap or .db3 file')
    parser.add_argument('--config', type=Path, metavar='FILE',
                        help='which topics are the camera, the actions and the goal (default: guess)')
    parser.add_argument('--model', help='name of a shipped model, or folder of a trained one')
    parser.add_argument('--goal', default='', help='what to plan for, where the bag has no goals (default: none)')
    parser.add_argument('--rate', type=arguments.positive, default=1.0,
                        help='seconds of the bag in one second (default: 1)')
    parser.add_argument('--paused', action='store_true', help='begin paused')
    parser.add_argument('--loop', action='store_true', help='begin anew at the end')
    parser.add_argument('--record', type=Path, metavar='DIR', help='record it all to a new bag')
    parser.add_argument('--namespace', type=arguments.namespace, default='replay',
                        help='ROS namespace of all topics (default: replay)')
    arguments.add_bringup(parser)
    arguments.add_start(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import signal
    import sys
    from functools import partial

    from worldmodel_ros.bringup.description import DescriptionError, load
    from worldmodel_ros.bringup.environment import network
    from worldmodel_ros.bringup.replay import prepare
    from worldmodel_ros.bringup.supervisor import Supervisor
    from worldmodel_ros.paths import NotInstalledError

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = {'bag': chosen.bag, 'config': chosen.config, 'model': chosen.model, 'goal': chosen.goal,
             'rate': chosen.rate, 'start_paused': chosen.paused, 'loop': chosen.loop, 'record': chosen.record}
    try:
        description = load()
        replay = prepare({**given, **dict(chosen.set)})
        nodes = description.resolve('replay', replay.arguments, chosen.parameters)
        with Supervisor(description.environment, chosen.logs, arguments.domain_id() or 0,
                        activation_timeout=chosen.activation_timeout) as supervisor:
            supervisor.add(nodes, chosen.namespace)
            topics = ', '.join(f'{source} as {name}' for source, name in replay.topics.items())
            print(f'Starting ({network(supervisor.environment)}; logs in {chosen.logs}); the model gets {topics}',
                  flush=True)
            supervisor.start()
            supervisor.wait_ready(chosen.activation_timeout, partial(print, flush=True))
            print('Playing. Ctrl-C ends it.', flush=True)
            code = supervisor.wait_for_end()
    except KeyboardInterrupt:
        print('\nstopped')
        code = 0
    except (DescriptionError, NotInstalledError, RuntimeError, ValueError) as error:
        print(f'worldmodel replay: {error}', file=sys.stderr)
        return 1
    if code:
        print(f'worldmodel replay: the player ended with exit code {code}, see {chosen.logs}', file=sys.stderr)
    elif chosen.record:
        print(f'Recorded in {chosen.record}: open its .mcap in Foxglove, or ask `worldmodel evaluate bag`')
    return code

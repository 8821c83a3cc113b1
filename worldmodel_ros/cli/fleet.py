"""``worldmodel fleet``: run several servers as one; sessions move between servers and survive restarts."""
from __future__ import annotations

import argparse
import sys

from worldmodel_ros.cli import arguments
from worldmodel_ros.exit_codes import BAD_CONFIGURATION

_EXAMPLES = """\
examples:
  worldmodel fleet up                              two servers on this machine, their front, and a status page on port 8090
  worldmodel fleet up --servers 4 --store /data/sessions -- --model FOLDER --backend torch-fp8
  worldmodel fleet up --pool ray                   the same, placed and restarted by Ray (extra [ray])
  worldmodel fleet up --host wss://b:8000 --host-token token --host-ca ca.pem --host-certificate fleet.pem
                                                   robots that no server here has time for go to host b
  worldmodel fleet status                          servers, claims and slack, as JSON
  worldmodel fleet move SESSION                    to another server, while its robot keeps driving

Robots use it like `worldmodel serve`: the parameter server:=auto, or the path given as --socket. Options after -- go to each
server. Exit codes: 0 after SIGINT or SIGTERM, 2 if the configuration is refused, 1 for any other error.
"""
_DESCRIPTION = 'Runs several servers as one: places robots where there is time for them, and moves their sessions.'


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser('fleet', help='run several servers as one', description=_DESCRIPTION, epilog=_EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(metavar='ACTION', required=True)
    start = actions.add_parser('up', help='start servers and their front, until Ctrl-C')
    start.add_argument('--servers', type=int, default=2, metavar='N', help='number of servers (default: 2)')
    start.add_argument('--most', type=int, default=0, metavar='N', help='maximum number of servers: one is started '
                       'if the others have no slack for another robot, emptied and stopped if they have (default: --servers)')
    start.add_argument('--pool', choices=('local', 'ray'), default='local', help='what starts servers, and restarts those '
                       'that have ended (default: local, processes on this machine)')
    start.add_argument('--ray-address', default='', metavar='ADDRESS', help='address of a Ray cluster (default: RAY_ADDRESS; '
                       'if that is not set, one is started here)')
    start.add_argument('--store', default='', metavar='WHERE', help='folder or URL where all servers store sessions (default: '
                       'worldmodel_store in $ROS_HOME or ~/.ros)')
    start.add_argument('--sessions', type=int, default=8, metavar='N', help='robots per server (default: 8)')
    start.add_argument('--full', type=float, default=0.85, metavar='SHARE', help='share of a server\'s time beyond which no '
                       'robot is placed there, but drives with its own model (default: 0.85)')
    start.add_argument('--host', action='append', default=[], metavar='URL', help='wss://host:port of another host\'s gateway, '
                       'whose server gets robots that no server here has time for; may be repeated (default: none)')
    start.add_argument('--host-address', default='', metavar='URL', help='wss://host:port of this fleet\'s gateway, through '
                       'which robots come back from other hosts when servers here have time again (default: they stay there)')
    arguments.add_host_files(start)
    start.add_argument('--realtime-priority', type=int, default=10, metavar='P', help='SCHED_FIFO priority of the front, where '
                       'permitted: 1 to 99, below that of the servers, or 0 for none (default: 10)')
    start.add_argument('--page', type=int, default=8090, metavar='PORT', help='port of the status page, on this machine '
                       'only; 0: any free one, -1: no page (default: 8090)')
    start.add_argument('arguments', nargs='*', metavar='-- OPTION', help='options of worldmodel serve, for each server')
    start.set_defaults(run=_up)
    status = actions.add_parser('status', help='print servers, claims and slack as JSON')
    status.set_defaults(run=_status)
    move = actions.add_parser('move', help='move a session to another server')
    move.add_argument('session', metavar='SESSION', help='name of the session in fleet status')
    move.add_argument('--to', default='auto', metavar='WHERE', help='socket of the server, or wss:// of a host (default: auto, '
                      'one that has time)')
    move.set_defaults(run=_move)
    for each in (start, status, move):
        each.add_argument('--socket', default='auto', metavar='PATH', help='socket of the front (default: auto, per user)')


def _up(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.serving.fleet.pools import PoolError
    from worldmodel_ros.serving.fleet.process import Options, up
    from worldmodel_ros.serving.transport.address import AddressError, socket_path
    try:
        return up(socket_path(chosen.socket), Options(chosen.servers, chosen.pool, chosen.ray_address, chosen.store,
                                                      chosen.sessions, chosen.full, chosen.page, tuple(chosen.arguments),
                                                      chosen.most, tuple(chosen.host), chosen.host_token, chosen.host_ca,
                                                      chosen.host_certificate, chosen.host_address,
                                                      chosen.realtime_priority))
    except (PoolError, ValueError) as error:
        return _refused('up', error)
    except (AddressError, OSError) as error:
        return _refused('up', error, 1)


def _status(chosen: argparse.Namespace) -> int:
    import json

    from worldmodel_ros.serving.client.link import Unavailable, ask_status
    from worldmodel_ros.serving.transport.address import AddressError, socket_path
    try:
        print(json.dumps(ask_status(socket_path(chosen.socket)), indent=1))
        return 0
    except (AddressError, Unavailable) as error:
        return _refused('status', error, 1)


def _move(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.serving.fleet.move import MoveError, ask_move
    from worldmodel_ros.serving.transport.address import AddressError, socket_path
    try:
        ask_move(socket_path(chosen.socket), chosen.session, chosen.to)
        return 0
    except (AddressError, MoveError) as error:
        return _refused('move', error, 1)


def _refused(action: str, error: Exception, code: int = BAD_CONFIGURATION) -> int:
    print(f'worldmodel fleet {action}: {error}', file=sys.stderr)
    return code

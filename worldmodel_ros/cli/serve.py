"""``worldmodel serve``: run one engine for all robots on this machine."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worldmodel_ros.cli import arguments
from worldmodel_ros.engine.backends import BACKENDS, PARALLEL_KINDS
from worldmodel_ros.engine.session_folder import MAX_FILES, MAX_MB
from worldmodel_ros.exit_codes import BAD_CONFIGURATION

_EXAMPLES = """\
examples:
  worldmodel serve                                 one engine for the robots on this machine, until Ctrl-C
  worldmodel serve --model FOLDER --smaller tiny   your own model, and a smaller one for when there is no time for it
  worldmodel serve --model FOLDER --gpus 4 --backend torch-fp8    a model split across GPUs
  worldmodel serve --model FOLDER --socket PATH    an open world model (world.json), for worldmodel gateway --world PATH
  worldmodel serve --status                        status of the running server, as JSON
  worldmodel up --namespace left right --set server:=true     server and two robots together

A robot's node uses it with the parameter server:=auto, or the path given as --socket. Without a server, each
node drives with its own model. This process runs no ROS. Exit codes: 0 after SIGINT or SIGTERM; 2 if the model or an
option is refused, so that a restart would not help; 4 if the process has lost the GPU and needs a restart; 1 for any
other error, such as a socket in use.
"""


_DESCRIPTION = 'Runs the model for the world model nodes on this machine, each with its own session.'


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    _add_arguments(subparsers.add_parser(
        'serve', help='run one engine for several robots on this machine', description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter))


def main() -> int:
    """Run the subcommand as a separate program, as the bring-up does."""
    parser = argparse.ArgumentParser('engine_server', description=_DESCRIPTION)
    _add_arguments(parser)
    return _run(parser.parse_args())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--model', default='tiny', help='name of a shipped model, or folder of a trained one '
                        '(default: tiny)')
    parser.add_argument('--smaller', default='', metavar='MODEL', help='second, faster model, for when there is no time '
                        'for the first one (default: none)')
    parser.add_argument('--backend', default='auto', choices=BACKENDS,
                        help='back end of the networks (default: auto)')
    parser.add_argument('--gpus', type=int, default=1, metavar='N',
                        help='number of GPUs to split the first model across, if its preset has tiles or it is an open '
                        'world model (default: 1)')
    parser.add_argument('--parallel', default=PARALLEL_KINDS[0], choices=PARALLEL_KINDS,
                        help=f'how it is split (default: {PARALLEL_KINDS[0]})')
    parser.add_argument('--sessions', type=int, metavar='N', help='maximum number of robots (default: 8), or of worlds of an '
                        'open world model, each with its own memory (default: 1)')
    parser.add_argument('--socket', default='auto', metavar='PATH',
                        help='socket to listen on (default: auto, per user)')
    parser.add_argument('--threads', type=int, default=1, metavar='N',
                        help='threads per network call on a CPU (default: 1)')
    parser.add_argument('--realtime-priority', type=int, default=20, metavar='P',
                        help='SCHED_FIFO priority, where permitted: 1 to 99, or 0 for none (default: 20)')
    parser.add_argument('--ticks', type=float, metavar='N', help='ticks per second for one robot, more are refused; '
                        '0: unlimited (default: twice the rate of the model)')
    parser.add_argument('--questions', type=float, default=4.0, metavar='N', help='what-if questions per second for one '
                        'robot, more are refused; 0: unlimited (default: 4)')
    parser.add_argument('--share', type=float, default=0.0, metavar='PART', help='part of the compute time, up to 1, '
                        'reserved for each robot; it gets more while others use less (default: 0, equal parts)')
    parser.add_argument('--shortest-due', type=float, default=0.002, metavar='S', help='refuse a tick whose answer is due '
                        'sooner than this after its arrival [s] (default: 0.002)')
    parser.add_argument('--idle', type=float, default=60.0, metavar='S', help='a robot that sends nothing for this long '
                        'loses its session until it sends again [s]; 0: never (default: 60)')
    parser.add_argument('--chunk-deadline', type=float, default=0.0, metavar='S', help='for an open world model: time allowed '
                        'for the first chunk of a request; the following ones are due when they would be played; a chunk that '
                        'would be late gets half of the steps, or is refused [s]; 0: chunks may be late (default: 0)')
    parser.add_argument('--session-directory', default='', metavar='FOLDER', help='folder for saved sessions of robots '
                        '(default: worldmodel_sessions in $ROS_HOME or ~/.ros)')
    parser.add_argument('--session-files-max', type=int, default=MAX_FILES, metavar='N',
                        help=f'maximum number of saved sessions (default: {MAX_FILES})')
    parser.add_argument('--session-disk-mb', type=float, default=MAX_MB, metavar='MB',
                        help=f'maximum size of all saved sessions [MB] (default: {MAX_MB})')
    parser.add_argument('--store', default='', metavar='WHERE', help='folder, URL of an object store, or wss:// of another '
                        'host\'s gateway, where sessions are stored while they tick: robots that reconnect resume them, and '
                        'they can move between servers (default: none)')
    parser.add_argument('--store-memory-mb', type=float, default=256.0, metavar='MB', help='part of the store that is also '
                        'kept in the server\'s memory [MB] (default: 256)')
    parser.add_argument('--resident', type=int, default=0, metavar='N', help='number of sessions that have pages at a time; '
                        'the others are in the store until they are expected to tick (default: 0, all)')
    parser.add_argument('--anchors', type=int, default=0, metavar='N', help='number of observed moments that a session keeps, '
                        'from which what is far ahead is imagined again; more memory on the device, and four to five times '
                        'the work, for the same room after minutes (default: 0)')
    parser.add_argument('--host-address', default='', metavar='URL', help='wss://host:port of the gateway of this server, '
                        'through which sessions of other hosts come here (default: none)')
    arguments.add_host_files(parser)
    parser.add_argument('--status', action='store_true', help='print the status of the running server, and exit')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import json

    from worldmodel_ros.model.checkpoint_description import ModelError
    from worldmodel_ros.serving.client.link import Unavailable, ask_status
    from worldmodel_ros.serving.server.process import SESSIONS, Options, serve
    from worldmodel_ros.serving.transport.address import AddressError, socket_path
    try:
        path = socket_path(chosen.socket or 'auto')
    except AddressError as error:
        return _refused(error)
    try:
        if chosen.status:
            print(json.dumps(ask_status(path), indent=1))
            return 0
        from worldmodel_ros.engine.loading import is_world
        if is_world(chosen.model):
            return _serve_world(path, chosen)
        sessions = SESSIONS if chosen.sessions is None else chosen.sessions
        return serve(path, Options(chosen.model, chosen.smaller, chosen.backend, sessions, chosen.threads,
                                   chosen.gpus, chosen.parallel, chosen.realtime_priority, chosen.ticks,
                                   chosen.questions, chosen.share, chosen.shortest_due, chosen.idle,
                                   chosen.session_directory, chosen.session_files_max, chosen.session_disk_mb,
                                   chosen.store, chosen.store_memory_mb, chosen.host_address, chosen.host_token,
                                   chosen.host_ca, chosen.host_certificate, chosen.resident, chosen.anchors))
    except (ModelError, ValueError) as error:
        return _refused(error)
    except (AddressError, Unavailable) as error:
        return _refused(error, 1)


def _serve_world(path: Path, chosen: argparse.Namespace) -> int:
    unfit = [name for name in ('smaller', 'store', 'anchors') if getattr(chosen, name)]
    if unfit:
        raise ValueError(f'{chosen.model} is an open world model, which takes no --{unfit[0]}')
    worlds = 1 if chosen.sessions is None else chosen.sessions
    if not 0 < worlds <= 1024:
        raise ValueError(f'sessions is {worlds}: it must be 1 to 1024')
    if not 0.0 <= chosen.chunk_deadline <= 600.0:
        raise ValueError(f'chunk-deadline is {chosen.chunk_deadline} s: it must be 0 to 600')
    from worldmodel_ros.serving.worlds.process import serve_world
    return serve_world(path, chosen.model, chosen.backend, chosen.threads, worlds, chosen.gpus, chosen.parallel,
                       chosen.chunk_deadline)


def _refused(error: Exception, code: int = BAD_CONFIGURATION) -> int:
    print(f'worldmodel serve: {error}', file=sys.stderr)
    return code

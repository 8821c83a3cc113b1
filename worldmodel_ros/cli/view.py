"""``worldmodel view``: show a bag or a running system in Rerun."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel view drive1                      write drive1.rrd, and tell how to open it
  worldmodel view drive1 --out look.rrd --every 0.5       at most two messages per second of each topic
  worldmodel view drive1 --open               and open it in Rerun's viewer
  worldmodel view --live                      the system running in this ROS domain, in Rerun's viewer, until Ctrl-C
  worldmodel view --live --out look.rrd       the same, to a file
  worldmodel view --live --connect rerun+http://desk:9876/proxy       in a viewer on another machine

Shows camera, predicted frames, candidates with scores, plan, tiers and what the gate limits on one timeline. Needs the
extra [view]: pip install 'worldmodel-ros[view]'.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'view', help='show a bag or a running system in Rerun',
        description='Shows a running world model, or the bag of one, as a Rerun recording.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, nargs='?', help='folder of a rosbag2, or one of its files')
    parser.add_argument('--live', action='store_true', help='show the system running in this ROS domain')
    parser.add_argument('--out', type=Path, metavar='FILE', help='.rrd file to write (default: name of the bag with .rrd)')
    parser.add_argument('--every', type=arguments.positive, metavar='S',
                        help='show at most one message of each topic every S seconds (default: all)')
    parser.add_argument('--open', action='store_true', help='open the file written from a bag in the viewer')
    parser.add_argument('--connect', metavar='URL', help='with --live: viewer to connect to (default: start one)')
    parser.add_argument('--namespace', type=arguments.namespace, default='', help='with --live: ROS namespace of the robot')
    parser.add_argument('--seconds', type=arguments.positive, metavar='S', help='with --live: end after S seconds')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    if (chosen.bag is None) != chosen.live:
        return _refuse('give a bag, or --live', 2)
    for_live = [f'--{name}' for name in ('connect', 'namespace', 'seconds') if getattr(chosen, name)]
    if for_live and not chosen.live:
        return _refuse(f'{for_live[0]} needs --live', 2)
    if chosen.live and chosen.out and chosen.connect:
        return _refuse('give --out or --connect', 2)
    try:
        import rerun  # noqa: F401 - the extra
    except ImportError as error:
        return _refuse(f"{error}: install the extra, pip install 'worldmodel-ros[view]'")
    return _live(chosen) if chosen.live else _of_bag(chosen)


def _of_bag(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.bags.source import open_bag
    from worldmodel_ros.evaluate.drive.progress import Progress
    from worldmodel_ros.evaluate.view import write_recording
    target = chosen.out or Path(f'{chosen.bag.resolve().stem}.rrd')
    try:
        with open_bag(chosen.bag) as bag, Progress('recording') as progress:
            shown = write_recording(bag, target, chosen.every or 0.0, progress)
    except (BagError, OSError) as error:
        return _refuse(str(error))
    if not shown:
        return _refuse(f'{chosen.bag} has no topic that can be shown: record with worldmodel record')
    _tell(shown, target)
    if chosen.open:
        import subprocess
        subprocess.Popen([sys.executable, '-m', 'rerun', str(target)], start_new_session=True)
    return 0


def _live(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.nodes.viewer.node import view

    def sink(stream) -> None:
        if chosen.out:
            stream.save(chosen.out)
        elif chosen.connect:
            stream.connect_grpc(chosen.connect)
        else:
            stream.spawn()
    try:
        shown = view(sink, chosen.namespace, chosen.every or 0.0, chosen.seconds)
    except (OSError, RuntimeError, ValueError) as error:
        return _refuse(str(error))
    if not shown:
        return _refuse('no topic that can be shown was received: start worldmodel up in this ROS domain, or give --namespace')
    _tell(shown, chosen.out)
    return 0


def _tell(shown: Mapping[str, int], target: Path | None) -> None:
    print('\n'.join(f'{count:7d}  {name}' for name, count in shown.items()))
    if target:
        print(f'{target}: open it with rerun {target}')


def _refuse(text: str, code: int = 1) -> int:
    print(f'worldmodel view: {text}', file=sys.stderr)
    return code

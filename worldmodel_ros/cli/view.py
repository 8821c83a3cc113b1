"""``worldmodel view``: a bag as a Rerun recording."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

_EXAMPLES = """\
examples:
  worldmodel view drive1                      writes drive1.rrd, and says how to open it
  worldmodel view drive1 --out look.rrd
  worldmodel view drive1 --open               and opens Rerun's viewer on it

Camera, predicted frames, candidates with their scores, plan, tiers and what the gate limits, on one timeline. Needs the extra
[view]: pip install 'worldmodel-ros[view]'.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'view', help='look at a bag in Rerun',
        description='Writes what a bag holds of a running world model to a Rerun recording.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, help='folder of a rosbag2, or one of its files')
    parser.add_argument('--out', type=Path, metavar='FILE', help='.rrd file to write (default: name of the bag, here)')
    parser.add_argument('--open', action='store_true', help='open the viewer on it')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.bags.source import open_bag
    try:
        from worldmodel_ros.evaluate.view import write_recording
    except ImportError as error:
        print(f"worldmodel view: {error}: install the extra, pip install 'worldmodel-ros[view]'", file=sys.stderr)
        return 1
    target = chosen.out or Path(f'{chosen.bag.resolve().stem}.rrd')
    try:
        with open_bag(chosen.bag) as bag:
            shown = write_recording(bag, target)
    except (BagError, OSError) as error:
        print(f'worldmodel view: {error}', file=sys.stderr)
        return 1
    if not shown:
        print(f'worldmodel view: {chosen.bag} has no topic that is shown: record with worldmodel record', file=sys.stderr)
        return 1
    print('\n'.join(f'{count:7d}  {name}' for name, count in shown.items()))
    print(f'{target}: open it with rerun {target}')
    if chosen.open:
        import subprocess
        subprocess.Popen([sys.executable, '-m', 'rerun', str(target)], start_new_session=True)
    return 0

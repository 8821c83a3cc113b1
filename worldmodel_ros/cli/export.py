"""``worldmodel export``: convert recordings to training data, without ROS."""
from __future__ import annotations

import argparse
from pathlib import Path

_EXAMPLES = """\
examples:
  worldmodel export drive --out data/drive               one bag, as a LeRobot dataset (v3.0)
  worldmodel export monday tuesday --out data/week       several bags, one dataset
  worldmodel export lap --config config/evaluate/donkeycar.yaml --out data/lap
  worldmodel train --config config/train/recorded.yaml --data data/week --out out/mine
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'export', help='convert recordings to training data (LeRobot format)',
        description='Writes the frames and executed actions of rosbag2 recordings, in the form that the model takes, to a '
                    'LeRobot dataset that `worldmodel train` and LeRobot read.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bags', type=Path, nargs='+', metavar='BAG', help='rosbag2 folder, or one .mcap or .db3 file')
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='folder to create')
    parser.add_argument('--config', type=Path, metavar='FILE',
                        help='YAML file with the topics of camera, actions and goal, for all bags (default: guessed)')
    parser.add_argument('--model', default='tiny', help='model to export for: its image size, rate and actions')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    import sys
    from contextlib import ExitStack

    from worldmodel_ros.bags.drive import read_drive
    from worldmodel_ros.bags.export import export
    from worldmodel_ros.bags.guess import find_mapping
    from worldmodel_ros.bags.mapping import read_config
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.bags.source import open_bag
    from worldmodel_ros.engine.loading import model_folder
    from worldmodel_ros.model.checkpoint_description import ModelError, read_description
    notes: list[str] = []
    try:
        preset = read_description(model_folder(chosen.model)).preset
        is_at_rest = chosen.config and read_config(chosen.config, preset.action_names).get('action_topic', '') is None
        with ExitStack() as stack:
            bags = [stack.enter_context(open_bag(path)) for path in chosen.bags]
            drives = [read_drive(bag, find_mapping(bag, preset, chosen.config), preset) for bag in bags]
            for drive in drives:
                if not (is_at_rest or drive.has_actions):
                    raise BagError(
                        f'{drive.bag.path} has no actions: all actions of the dataset would be 0. Record the commands that '
                        'the robot executes together with the camera, or name their topic in the --config file; '
                        'action_topic: none there says that the robot is at rest')
            try:
                done = export(drives, chosen.out, preset)
            finally:  # they also say why there is nothing to write
                notes += [f'note: {note}' for drive in drives for note in drive.notes]
    except (BagError, ModelError, OSError, ValueError) as error:
        print('\n'.join([f'worldmodel export: {error}', *notes]), file=sys.stderr)
        return 1
    for note in notes:
        print(note, file=sys.stderr)
    print(f'{done.frames} frames in {done.episodes} episodes in {done.folder}'
          + (f'; {done.dropped} frames without an action were left out' if done.dropped else ''))
    return 0

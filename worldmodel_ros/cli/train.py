"""`worldmodel train`: train a world model on simulated episodes."""
from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand; its arguments are those of the training itself."""
    parser = subparsers.add_parser('train', help='train a world model on simulated episodes',
                                   description='Trains autoencoder, teacher and student, stage after stage.')
    try:
        from worldmodel_ros.train.run.cli import add_arguments
    except ImportError as error:
        missing = error  # the name `error` ends with this block
        parser.set_defaults(run=lambda _: _missing(missing))
        return
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    try:
        from worldmodel_ros.train.run.cli import main
        return main(chosen)
    except ModuleNotFoundError as error:
        return _missing(error)


def _missing(error: ImportError) -> int:
    print(f'worldmodel train: {error}. Training needs the whole project: install it with "pip install .", '
          'and see "worldmodel doctor".', file=sys.stderr)
    return 1

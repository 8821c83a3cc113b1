"""The command line ``worldmodel``: one module per subcommand, each with ``add_parser(subparsers)``.

Building the parser must stay cheap, so that ``--help`` is fast and works on any machine: heavy modules (torch, MuJoCo, rclpy,
matplotlib) are imported when a subcommand runs.
"""
from __future__ import annotations

import argparse
import sys
from importlib import import_module, metadata

SUBCOMMANDS = ('demo', 'up', 'serve', 'fleet', 'gateway', 'replay', 'record', 'what_if', 'drive_to', 'sim', 'train', 'finetune',
               'evaluate', 'export', 'calibrate', 'view', 'doctor')

_EPILOG = """\
start here:
  worldmodel demo                 the simulated robot crosses a street; report.html in out/demo/
  worldmodel doctor               what is missing on this machine, and how to get it

Each subcommand has examples in its --help.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; its result has the chosen subcommand in ``run``."""
    top = argparse.ArgumentParser(
        prog='worldmodel', description='Closed-loop robot control with a video world model, on ROS 2, within a latency budget.',
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument('--version', action='version', version=f'%(prog)s {_version()}')
    subparsers = top.add_subparsers(metavar='SUBCOMMAND', required=True)
    for name in SUBCOMMANDS:
        import_module(f'worldmodel_ros.cli.{name}').add_parser(subparsers)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except OSError as error:
        if error.filename is None:
            raise
        print(f'worldmodel: {error.filename} cannot be used: {error.strerror}', file=sys.stderr)  # such as a folder of --out
        return 1


def _version() -> str:
    try:
        return metadata.version('worldmodel-ros')
    except metadata.PackageNotFoundError:
        return 'of a source tree'

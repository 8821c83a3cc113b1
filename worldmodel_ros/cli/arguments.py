"""Command-line arguments shared by several subcommands."""
from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT

TASKS = ('street', 'intercept', 'recall', 'rooms', 'follow', 'second_ball', 'avoid_red', 'pass_behind')
GOALS = ('red', 'green', 'blue', 'yellow')
LAST_DOMAIN = 232  # whose ports are below 65536
_NAMESPACE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*')


def positive(text: str) -> float:
    """Parse a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float('inf'):
        raise argparse.ArgumentTypeError(f'{text!r} is not a number above 0')
    return value


def seed(text: str) -> int:
    """Parse the seed of random numbers."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f'{text!r} is no seed: it must be 0 or above')
    return value


def result_file(text: str) -> str:
    """Parse the path of a file that is written when long work is done, and make its folder; ``-`` stays as it is."""
    if text == '-':
        return text
    path = Path(text)
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open('a').close()
        if not there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written: {error.strerror}') from error
    return text


def goals(text: str) -> list[str]:
    """Parse colour names, separated by commas."""
    names = [name.strip() for name in text.split(',') if name.strip()]
    unknown = [name for name in names if name not in GOALS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f'{text!r}: give one or more of {", ".join(GOALS)}, separated by commas')
    return names


def namespace(text: str) -> str:
    """Return a ROS namespace without leading and trailing slashes; empty: none."""
    name = text.strip('/')
    if name and not _NAMESPACE.fullmatch(name):
        raise argparse.ArgumentTypeError(f'{text!r} is no ROS namespace: use letters, digits and underscores, and / between '
                                         'its parts, none of which begins with a digit')
    return name


def assignment(text: str) -> tuple[str, str]:
    """Parse NAME:=VALUE, as ``ros2 launch`` does."""
    name, assigned, value = text.partition(':=')
    if not (name and assigned):
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form NAME:=VALUE')
    return name, value


def add_bringup(parser: argparse.ArgumentParser) -> None:
    """Add the options that configure the nodes: ``--set`` and ``--parameters``."""
    parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='NAME:=VALUE', type=assignment,
                        help='bring-up arguments, such as model and image (`worldmodel up --show-args` lists them all)')
    parser.add_argument('--parameters', type=Path, nargs='+', action='extend', default=[], metavar='FILE',
                        help='parameter files that override those in config/')


def add_host_files(parser: argparse._ActionsContainer) -> None:
    """Add the files for connecting to gateways of other hosts: ``--host-token``, ``--host-ca``, ``--host-certificate``."""
    parser.add_argument('--host-token', default='', metavar='FILE', help='file with the token for the gateways of other hosts '
                        '(default: none)')
    parser.add_argument('--host-ca', default='', metavar='FILE', help='CA certificates to verify those gateways with '
                        '(default: the system\'s)')
    parser.add_argument('--host-certificate', default='', metavar='FILE', help='PEM file with the certificate and key of this '
                        'host (default: none)')


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add the options for starting nodes: ``--logs`` and ``--activation-timeout``."""
    parser.add_argument('--logs', type=Path, default=Path('out/log'),
                        help='folder for the nodes\' logs (default: out/log)')
    parser.add_argument('--activation-timeout', type=positive, default=ACTIVATION_TIMEOUT, metavar='S',
                        help='time for the world model to become active [s]; the first start of a model on a machine '
                        f'can take minutes (default: {ACTIVATION_TIMEOUT:g})')


TOPICS = {'image': 'the raw camera image', 'compressed_image': 'the JPEG camera image',
          'camera_info': 'the CameraInfo (default: camera_info next to the images)',
          'cmd_vel': 'the executed velocity commands', 'odom': 'the wheel odometry'}


def add_topics(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options for names of TOPICS, which are also arguments of the bring-up; None if not given."""
    for name in names:
        parser.add_argument(f'--{name.replace("_", "-")}', metavar='TOPIC',
                            help=f'topic of {TOPICS[name]}, if the robot uses another name; relative to the '
                            'namespace or absolute')


def domain_id() -> int | None:
    """Return the ROS domain in ROS_DOMAIN_ID, or None; exit the program if it is none."""
    text = os.environ.get('ROS_DOMAIN_ID', '')
    if not text:
        return None
    if not text.isdecimal() or int(text) > LAST_DOMAIN:
        raise SystemExit(f'ROS_DOMAIN_ID is {text!r}: set it to a number from 0 to {LAST_DOMAIN}, or unset it')
    return int(text)

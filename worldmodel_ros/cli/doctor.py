"""``worldmodel doctor``: check this machine, and say how to get what is missing."""
from __future__ import annotations

import argparse

_EXAMPLES = """\
examples:
  worldmodel doctor            all checks, some seconds
  worldmodel doctor --quick    only those that start nothing
  worldmodel doctor --camera /front/image_raw    also the camera of a robot that runs, against that of the model's training

The exit code is 1 if something is missing without which the demo cannot run.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'doctor', help='check this machine, and say how to get what is missing',
        description='Checks Python, packages, ROS 2, the simulator\'s OpenGL, weights and system settings.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='leave out what starts ROS or the simulator')
    parser.add_argument('--camera', metavar='TOPIC',
                        help='look at a running camera, too: its camera_info, and where tf says that it stands')
    parser.add_argument('--model', default='tiny', help='whose trained camera it is compared with (default: tiny)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.bringup.description import DescriptionError
    from worldmodel_ros.cli.checks import ALL, QUICK, Level, camera, environment
    from worldmodel_ros.paths import NotInstalledError
    try:
        surroundings = environment()
    except (DescriptionError, NotInstalledError) as error:
        print(f'FAIL  {error}')
        return 1
    worst = Level.OK
    cameras = [lambda _: camera(chosen.camera, chosen.model)] if chosen.camera else []
    for check in (*(QUICK if chosen.quick else ALL), *cameras):
        finding = check(surroundings)
        worst = max(worst, finding.level)
        print(f'{finding.level.name:<5} {finding.text}')
        if finding.remedy:
            print(f'        -> {finding.remedy}')
    print({Level.OK: '\nThis machine has all that is needed.',
           Level.WARN: '\nThe demo runs here; the warnings cost quality or time.',
           Level.FAIL: '\nThe demo cannot run here yet: see FAIL.'}[worst])
    return 1 if worst is Level.FAIL else 0

"""``worldmodel doctor``: check this machine, and tell how to get what is missing."""
from __future__ import annotations

import argparse
import tempfile

_EXAMPLES = """\
examples:
  worldmodel doctor            all checks, a few seconds
  worldmodel doctor --quick    only checks that start nothing
  worldmodel doctor --camera /front/image_raw    also compare a running robot's camera with that of the training

The exit code is 1 if something that the demo needs is missing.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'doctor', help='check this machine, and tell how to get what is missing',
        description='Checks Python, packages, ROS 2, the simulator\'s OpenGL, weights and system settings.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--quick', action='store_true', help='skip checks that start ROS or the simulator')
    parser.add_argument('--camera', metavar='TOPIC',
                        help='also check a running camera: its camera_info, and its pose according to tf')
    parser.add_argument('--model', default='tiny', help='model whose training camera it is compared with (default: tiny)')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    # Not a folder of a fixed name, which might be another user's.
    with tempfile.TemporaryDirectory(prefix='worldmodel_doctor_') as logs:
        return _check(chosen, logs)


def _check(chosen: argparse.Namespace, logs: str) -> int:
    from worldmodel_ros.bringup.description import DescriptionError
    from worldmodel_ros.cli.checks import ALL, QUICK, Level, camera, environment
    from worldmodel_ros.paths import NotInstalledError
    try:
        surroundings = environment(logs)
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
    print({Level.OK: '\nThis machine has everything that is needed.',
           Level.WARN: '\nThe demo runs here; the warnings may affect quality or speed.',
           Level.FAIL: '\nThe demo cannot run here yet: see FAIL.'}[worst])
    return 1 if worst is Level.FAIL else 0

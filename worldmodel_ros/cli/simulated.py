"""Shared by the evaluations in simulated rooms: running them and writing their JSON result."""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from worldmodel_ros.cli import arguments

Evaluation = Callable[[int, Callable[[float], None]], dict]  # arguments: number of processes, progress callback


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for the result's destination."""
    parser.add_argument('--json', nargs='?', default='-', const='-', type=arguments.result_file, metavar='FILE',
                        help='file for the result; without one, or with -: standard output (default)')


def report(command: str, chosen: argparse.Namespace, evaluate: Evaluation) -> dict:
    """Run an evaluation; write and return its result, with duration, machine, versions and command."""
    from worldmodel_ros.evaluate.drive.progress import Progress
    from worldmodel_ros.machine import machine, versions
    began = time.monotonic()
    # Output of exporters and other libraries must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr), Progress(command, sys.stderr) as progress:
        result = evaluate(max(1, chosen.workers or len(os.sched_getaffinity(0))), progress)
    result |= {'wall_s': round(time.monotonic() - began, 1), 'machine': machine(), 'versions': versions(),
               'command': shlex.join(['worldmodel', *sys.argv[1:]])}
    text = json.dumps(result, indent=1, allow_nan=False)
    if chosen.json == '-':
        print(text)
    else:
        Path(chosen.json).write_text(text + '\n')
    return result

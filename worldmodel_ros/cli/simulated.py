"""What the evaluations in simulated rooms share: how they are run, and the one JSON object that they give."""
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

Evaluation = Callable[[int, Callable[[float], None]], dict]  # of the number of processes and what takes the progress


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where the result goes."""
    parser.add_argument('--json', nargs='?', default='-', const='-', metavar='FILE',
                        help='file for the result; none, or -: standard output (default)')


def report(command: str, chosen: argparse.Namespace, evaluate: Evaluation) -> dict:
    """Run an evaluation, and write its result with the time it took, machine, versions and command; return that."""
    from worldmodel_ros.evaluate.drive.progress import Progress
    from worldmodel_ros.machine import machine, versions
    if chosen.json != '-':
        Path(chosen.json).parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # What exporters and the like have to say must not get into the JSON.
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

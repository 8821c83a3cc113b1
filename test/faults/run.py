"""
Plays the fault matrix on real processes, prints a table, and writes what was observed.

    python test/faults/run.py                  # all, to benchmarks/results/faults_<machine>.json
    python test/faults/run.py -k gate          # cases by a part of their name
    python test/faults/run.py --table          # the table of docs/faults.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

if TYPE_CHECKING:
    from faults.matrix import Case, Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cases that are asked for; return 1 if one is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-k', metavar='PART', help='only cases with this in their name or their system; several with commas')
    parser.add_argument('--json', type=Path, help='file for the results; of all cases, one in benchmarks/results')
    parser.add_argument('--list', action='store_true', help='print the names of the cases')
    parser.add_argument('--table', action='store_true', help='print the table of docs/faults.md')
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix='faults_') as folder:
        own_ros(folder)  # before anything is imported that looks at it
        return _main(options, Path(folder))


def _main(options: argparse.Namespace, folder: Path) -> int:
    from faults import network
    from faults.catalogue import CASES
    from faults.table import of_cases
    cases = [row for row in CASES if not options.k or any(p in row.name or p in row.system for p in options.k.split(','))]
    if options.list or options.table:
        print('\n'.join(row.name for row in cases) if options.list else of_cases(cases))
        return 0
    from scenarios.speed import measured
    from worldmodel_ros.machine import machine, versions
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # systems, mounts and control groups are cleared away
    began = time.monotonic()
    about = {'command': 'make faults' + (f' ARGS="-k {options.k}"' if options.k else ''), 'machine': machine(),
             'versions': versions(), **{f'{name[:-2]}_ms': round(s * 1e3, 3) for name, s in measured()._asdict().items()}}
    results = _play(cases, folder)
    failed = [result for result in results if result.failures]
    counts = summary(results)
    if not os.environ.get(network.INSIDE):  # else another process has the rest of them
        print('\n' + ', '.join(f'{count} {what.replace("_", " ")}' for what, count in counts.items()) +
              f', in {time.monotonic() - began:.0f} s')
        for result in failed:
            print(f'{result.name}: {"; ".join(result.failures)}')
    file = options.json or (None if options.k else results_file('faults'))
    if file:
        content = about | {'seconds': round(time.monotonic() - began), **summary(results),
                           'cases': [result.as_dict() for result in results]}
        file.write_text(json.dumps(content, indent=1) + '\n')
    return 1 if failed else 0


def summary(results: list[Result]) -> dict[str, int]:
    """Return how many rows there are, what became of them, and what of all was late or lost."""
    failed, skipped = (sum(bool(getattr(result, what)) for result in results) for what in ('failures', 'skipped'))
    return {'rows': len(results), 'as_expected': len(results) - failed - skipped, 'not_as_expected': failed,
            'skipped': skipped, 'played_again': sum(bool(result.played_again) for result in results),
            'late': sum(result.late or 0 for result in results), 'lost': sum(result.lost or 0 for result in results)}


def _play(cases: list[Case], folder: Path) -> list[Result]:
    """Play cases, and print each as it is over."""
    from faults import network
    from faults.stage import Stage
    from faults.systems import TWO_NETWORKS
    from faults.table import of_results
    results: list[Result] = []
    stage = Stage(folder)
    try:
        for system, rows in groupby(cases, key=lambda row: row.system):
            if system == TWO_NETWORKS and not os.environ.get(network.INSIDE) and not network.cannot_divide():
                stage.end()
                results += _elsewhere(list(rows), folder)
                continue
            for row in rows:
                results.append(stage.play(row))
                print(of_results(results[-1:], head=len(results) == 1), flush=True)
    finally:
        stage.end()
    return results


def results_file(kind: str) -> Path:
    """Return where results of this machine belong, by its processor and its cores."""
    from worldmodel_ros.machine import machine
    about = machine()
    words = [word for word in re.findall(r'[a-z0-9]+', about['cpu'].lower())
             if word not in ('amd', 'intel', 'r', 'tm', 'cpu', 'processor')]
    return TESTS.parent / 'benchmarks' / 'results' / f'{kind}_{"_".join(words[:2])}_{about["cores"]}_cores.json'


def _elsewhere(rows: list[Case], folder: Path) -> list[Result]:
    """Play cases in a process of the robot's network, which prints them; return their results."""
    from faults import network
    from faults.matrix import Result
    file = folder / 'elsewhere.json'
    code = network.play_inside(['-k', ','.join(row.name for row in rows), '--json', str(file)], folder)
    if not file.is_file():
        return [Result(row.name, expected=row.outcome, failures=[f'the process that plays it ended with {code}'])
                for row in rows]
    return [Result(**row) for row in json.loads(file.read_text())['cases']]


def own_ros(folder: str) -> None:
    """Give this process and those that it starts a ROS domain of their own, on this machine only."""
    from worldmodel_ros.bringup.environment import free_domain_id
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)
    os.environ.setdefault('ROS_HOME', folder)
    os.environ.setdefault('ROS_DOMAIN_ID', str(free_domain_id()))
    os.environ.setdefault('FASTRTPS_DEFAULT_PROFILES_FILE',
                          str(TESTS.parent / 'config' / 'fastdds_large_images.xml'))


if __name__ == '__main__':
    raise SystemExit(main())

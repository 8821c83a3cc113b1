"""Fuzzes whatever takes bytes, messages or calls from outside: does anything crash, hang or exhaust memory?

    python benchmarks/fuzz.py --out benchmarks/results/fuzz.json
    python benchmarks/fuzz.py --target codec --target mcap --seconds 60

The targets are in test/fuzzing. Each runs in a process of its own, by atheris (pip install -e '.[fuzz]') if
installed, which is guided by coverage, else by mutations alone. Inputs that crash a target are kept in out/fuzz/TARGET;
``--reproduce FILE`` runs such a file again. The exit code is 1 if there is any.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from result_file import ROOT, command, write_result

sys.path[:0] = [str(ROOT / 'test'), str(ROOT)]

import fuzzing  # noqa: E402
from fuzzing import harness  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--target', action='append', choices=fuzzing.TARGETS, help='only these (default: all)')
    parser.add_argument('--inputs', type=int, help='of each target (default: its own number)')
    parser.add_argument('--seconds', type=float, default=1800.0, help='of each target at most (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1, help='of the first process (default: %(default)s)')
    parser.add_argument('--out', type=Path, help='JSON file for the numbers; targets that are not run keep theirs')
    parser.add_argument('--folder', type=Path, default=ROOT / 'out' / 'fuzz', help='for what crashes (default: out/fuzz)')
    parser.add_argument('--unguided', action='store_true', help='without atheris, though it is installed')
    parser.add_argument('--reproduce', type=Path, metavar='FILE', help='run one input of the one --target, untouched')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    parser.add_argument('--guided', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        harness.child(lambda: fuzzing.load(options.child), options.inputs, options.seconds, options.seed,
                      options.folder, options.guided)
    names = options.target or list(fuzzing.TARGETS)
    if options.reproduce:
        print('accepted' if fuzzing.load(names[0]).run(options.reproduce.read_bytes()) else 'refused')
        return 0
    crashes = 0
    for name in names:
        row = run(name, options)
        crashes += row['crashes']
        if options.out:
            write(options.out, row)
    return int(crashes > 0)


def write(path: Path, row: dict) -> None:
    """Put a row into a file of results; rows of other targets and other engines stay."""
    from worldmodel_ros.machine import machine, versions
    rows = json.loads(path.read_text())['rows'] if path.exists() else []
    rows = {(each['target'], each['engine']): each for each in [*rows, row]}
    write_result({
        'command': 'python benchmarks/fuzz.py --out ' + path.name, 'machine': machine(),
        'versions': versions(('worldmodel-ros', 'atheris', 'hypothesis', 'numpy', 'torch')),
        'rows': [rows[key] for name in fuzzing.TARGETS for key in rows if key[0] == name]}, path)


def run(name: str, options: argparse.Namespace) -> dict:
    """Run a target; print and return its row."""
    guided = name in fuzzing.BYTES and harness.has_atheris() and not options.unguided
    row = {'command': command(),
           'engine': 'hypothesis' if name in fuzzing.STATES else 'atheris' if guided else 'mutations',
           **harness.fuzz(name, Path(__file__), options.inputs, options.seconds, options.seed, options.folder.resolve(),
                          guided)}
    print(json.dumps(row), flush=True)
    return row


if __name__ == '__main__':
    raise SystemExit(main())

"""Judges decisions in rooms whose seeds are drawn at random at the start, by priority, within a limit of seconds.

    MUJOCO_GL=egl python benchmarks/control_judged.py --seconds 540 --workers 14 --episodes e.jsonl --json control_judged.json

1,000 rooms of ``intercept``, 500 of the street and of static rooms, 100 of ``recall``, then the run-time tasks, the ablations
and the variants, and the rest of ``recall``, or some of these (``--parts``); weights and code as they are. The result is
written as episodes come, and covers the rooms in which all controllers of a part have driven.

The first seed is printed. With it as ``--first``, and the same ``--episodes``, a later run continues; with ``--seconds 0`` it
only writes the result. With the same ``--json``, the result lists the machines of all runs: its own, and ``earlier_runs``.
"""
from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from result_file import product_ms, provenance, write_result

from worldmodel_ros.evaluate.control.controllers import MEANINGS
from worldmodel_ros.evaluate.control.episode import Episode, rung_seconds
from worldmodel_ros.evaluate.control.run import PLAIN, Job, Question, complete, driven, report
from worldmodel_ros.evaluate.control.summary import DEFINITIONS, mcnemar
from worldmodel_ros.evaluate.control.tasks import RUN_TIME_TASKS, TASKS

# Reserved: a test checks that no other result uses them. They began at 40,000,000, until another evaluation drew some of
# them (ten_minutes_small_tiles_matched.json).
SEEDS = range(46_950_000, 50_000_000)
PACKAGES = ('mujoco', 'numpy', 'onnxruntime', 'torch')
WRITING = 15.0  # s between two writes of the result
BOUNDS = ('oracle', 'reactive')
RUNGS = ('none', 'one_step', 'two_step')
# Keys that describe the run that wrote a result; those of the runs before are in ``earlier_runs``.
OF_A_RUN = ('command', 'machine', 'versions', 'product_of_384x384_float32_ms', 'load_before', 'rendered_by', 'workers',
            'episodes_of_earlier_runs', 'wall_s', 'episodes')


@dataclass(frozen=True)
class Part:
    """``rooms`` rooms of ``task``, from the ``begin``-th of the run on, by ``controllers``."""

    name: str
    rooms: int
    task: str
    controllers: tuple[str, ...]
    variant: str = PLAIN
    begin: int = 0

    def jobs(self, first: int) -> Iterator[Job]:
        """Yield episodes, those of a room together. ``first``: seed of the run's first room."""
        for number in range(self.begin, self.begin + self.rooms):
            for controller in self.controllers:
                yield Job(self.variant, self.task, controller, first + number)


def runtime(task: str) -> tuple[str, ...]:
    """Return the controllers of a run-time task: the second round of candidates is for things to be touched."""
    return *BOUNDS, 'one_step', *(['two_step'] if task == 'second_ball' else [])


# By priority: first the bounds and rungs, in as many rooms as the differences need. `two_step` differs from `one_step` only
# where something is to be touched; a hundred streets are to confirm that.
PARTS = (
    Part('intercept', 1000, 'intercept', (*BOUNDS, *RUNGS)),
    Part('street', 500, 'street', (*BOUNDS, 'none', 'one_step')),
    Part('rooms', 500, 'rooms', (*BOUNDS, 'none', 'one_step')),
    Part('recall', 100, 'recall', (*BOUNDS, 'one_step')),
    *(Part('runtime', 250, task, runtime(task)) for task in RUN_TIME_TASKS),
    *(Part('another_future', 300, task, (*BOUNDS, 'none', 'one_step', 'another_future')) for task in ('intercept', 'street')),
    *(Part('delay', 500, 'street', (*BOUNDS, 'one_step'), variant) for variant in (PLAIN, 'delay')),
    *(Part('shifted', 300, task, (*BOUNDS, 'one_step'), 'shifted') for task in ('street', 'intercept')),
    *(Part('runtime', 250, task, runtime(task), begin=250) for task in RUN_TIME_TASKS),
    Part('two_steps_on_the_street', 100, 'street', ('one_step', 'two_step')),
    *(Part('motion_unseen', 200, task, (*BOUNDS, 'none', 'one_step', 'motion_unseen')) for task in ('intercept', 'street')),
    *(Part('policies', 200, task, (*BOUNDS, 'one_step', 'tracker', 'b2', 'b2_seed_1', 'b2_seed_2'))
      for task in ('intercept', 'street')),
    *(Part('stops', 300, 'street', (*BOUNDS, 'one_step'), variant) for variant in (PLAIN, 'stops')),
    *(Part('shipped_model', 500, task, (*BOUNDS, 'b1', 'one_step')) for task in ('street', 'rooms')),
    Part('recall', 400, 'recall', (*BOUNDS, 'one_step'), begin=100))


def main() -> int:
    chosen = parsed()
    first = chosen.first if chosen.first is not None else SEEDS.start + secrets.randbelow(len(SEEDS) - most_rooms(PARTS))
    print(f'first seed {first}', file=sys.stderr, flush=True)
    question = Question(range(first, first + most_rooms(PARTS)), tuple(TASKS), (*BOUNDS, *RUNGS), backend=chosen.backend,
                        forecast=chosen.forecast)
    jobs = list(dict.fromkeys(job for part in PARTS if part.name in chosen.parts for job in part.jobs(first)))
    about = {**provenance(PACKAGES), 'first_seed': first, 'product_of_384x384_float32_ms': round(product_ms(), 3),
             'load_before': round(os.getloadavg()[0], 1), 'rendered_by': os.environ.get('MUJOCO_GL', 'osmesa'),
             'workers': chosen.workers, 'forecast': chosen.forecast, 'backend': chosen.backend,
             'episodes_of_earlier_runs': lines(chosen.episodes), 'earlier_runs': earlier_runs(chosen.json, first)}
    begun, written, done = time.monotonic(), 0.0, {}

    def write() -> None:
        result = {**about, 'wall_s': round(time.monotonic() - begun, 1), 'episodes': len(done), 'of_episodes': len(jobs),
                  **judged(first, done, chosen.forecast)}
        write_result(result, chosen.json)
    try:
        for job, episode in driven(question, jobs, chosen.workers, chosen.episodes, chosen.seconds):
            done[job] = episode
            if time.monotonic() > written + WRITING:
                write()
                written = time.monotonic()
                print(f'{written - begun:.0f} s: {len(done)} of {len(jobs)} episodes', file=sys.stderr, flush=True)
    finally:
        write()
    print(json.dumps(summary(judged(first, done, chosen.forecast)), indent=1))
    return 0


def most_rooms(parts: Sequence[Part]) -> int:
    return max(part.begin + part.rooms for part in parts)


def lines(file: Path | None) -> int:
    return len(file.read_text().splitlines()) if file and file.exists() else 0


def earlier_runs(result: Path | None, first: int) -> list[dict]:
    """Return the runs behind the episodes of the result to be replaced; none if its rooms are others."""
    before = json.loads(result.read_text()) if result and result.exists() else {}
    if before.get('first_seed') != first:
        return []
    return [*before.get('earlier_runs', []), {key: before[key] for key in OF_A_RUN if key in before}]


def judged(first: int, done: Mapping[Job, Episode], forecast: str) -> dict:
    """Return the numbers of each part by name, over the rooms in which all controllers of the part have driven."""
    found: dict[str, dict] = {}
    for name in dict.fromkeys(part.name for part in PARTS):
        parts = [part for part in PARTS if part.name == name]
        episodes = {job: episode for part in parts for job, episode in complete(list(part.jobs(first)), done).items()}
        if not episodes:
            continue
        variants = tuple({part.variant for part in parts} - {PLAIN})
        row = report(Question(range(first, first + most_rooms(parts)), tuple(part.task for part in parts),
                              tuple({name: None for part in parts for name in part.controllers}), variants=variants,
                              forecast=forecast), episodes)
        found[name] = {key: row[key] for key in ('tasks', 'variants', 'p_values') if row[key]}
        if changes := {variant: changed(episodes, variant) for variant in variants}:
            found[name]['changed'] = changes
    return {'rungs': rung_seconds(), 'definitions': DEFINITIONS, 'controllers': MEANINGS, 'parts': found}


def changed(episodes: Mapping[Job, Episode], variant: str) -> dict[str, dict[str, dict]]:
    """Return, by task and controller, the rooms ``won`` and ``lost`` by a variant compared with the plain task, of the ``n``
    that were driven both ways, and McNemar's p."""
    pairs: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
    for job, episode in episodes.items():
        if job.variant == variant and (plain := episodes.get(replace(job, variant=PLAIN))):
            pairs.setdefault((job.task, job.controller), []).append((plain.success, episode.success))
    found: dict[str, dict[str, dict]] = {}
    for (task, controller), both in pairs.items():
        won, lost = both.count((False, True)), both.count((True, False))
        found.setdefault(task, {})[controller] = {'won': won, 'lost': lost, 'n': len(both), 'p': mcnemar(won, lost)}
    return found


def summary(result: dict) -> dict:
    """Return success, or goals a minute, by part, task (of a variant: ``task, variant``) and controller."""
    def short(row: dict) -> str:
        return f'{row["success"] if row["success"] is not None else row["goals_per_minute"]} of {row["n"]}'
    def named(part: dict) -> Iterator[tuple[str, dict]]:
        yield from part.get('tasks', {}).items()
        for variant, tasks in part.get('variants', {}).items():
            yield from ((f'{task}, {variant}', rows) for task, rows in tasks.items())
    return {name: {task: {controller: short(row) for controller, row in rows.items()} for task, rows in named(part)}
            for name, part in result['parts'].items()}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=540.0, help='after which no further episode is begun')
    parser.add_argument('--workers', type=int, default=len(os.sched_getaffinity(0)), help='processes')
    parser.add_argument('--forecast', default='tiny')
    parser.add_argument('--backend', default='onnx-int8', help='what runs the networks; default: as on the robot')
    names = list(dict.fromkeys(part.name for part in PARTS))
    parser.add_argument('--parts', nargs='+', choices=names, default=names, help='what to judge (default: all)')
    parser.add_argument('--first', type=int, help='seed of the first room, of a run that goes on; default: drawn at random')
    parser.add_argument('--episodes', type=Path, help='JSON lines, one for each episode; those in it are not driven again')
    parser.add_argument('--json', type=Path)
    chosen = parser.parse_args()
    if lines(chosen.episodes) and chosen.first is None:
        parser.error(f'{chosen.episodes} has episodes: give --first, the seed that their run has told')
    return chosen


if __name__ == '__main__':
    raise SystemExit(main())

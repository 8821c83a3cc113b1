"""Trains a model over tiles and judges it, in commands of limited time, on one GPU or two; JSON as results come.

    python benchmarks/train_tiles.py --folder out/tiles --stages train --seconds 585
    python benchmarks/train_tiles.py --folder out/tiles --stages judge ablations --seconds 585
    python benchmarks/train_tiles.py --folder out/smoke --smoke

* train: ``config/train/small_tiles.yaml``; on a second GPU at the same time, or afterwards if time is left, its baseline
  (``small_minutes.yaml``, a window of 1.6 s), for the same seconds. By default that is what ``--seconds`` leaves.
  With ``--together`` all GPUs train it instead, each on other clips, without the baseline.
* judge: ``tile_model.py`` and its parts, each a program of its own, by priority; with two GPUs, two at a time.
* ablations: short runs that differ in what cache layers see (``small_tiles_ablations.yaml``), each judged after its training.

A run that is unfinished when time is up has saved its state, and the same command resumes it; judge takes its
newest weights until then. A finished run is not repeated, judging is. In ``results``, ``train_tiles.json`` has each
program's command, seconds and exit status, what was left out and why, and the main numbers; logs are in ``logs``. To go on
elsewhere, copy ``results`` and ``small_tiles/portable``, of 24 MiB: from it the same command continues without the rest, for
as many seconds more, even if the run was finished; and it is judged there in place of ``final``, which is the same model.

``--smoke`` goes through all of it with minimal work, also on a CPU: it tests the code and measures nothing.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from programs import ENVIRONMENT, Program, script
from result_file import ROOT, provenance, write_result
from worldmodel_ros.train.run import portable

CONFIGS = ROOT / 'config' / 'train'
STAGES = ('train', 'judge', 'ablations')
TILES, COMPARED = 'small_tiles', 'small_minutes'  # configurations, and folders of their runs
OVERHEAD = 110.0  # s of a run outside its schedule: start, compilation, the first episodes, writing
SAVING = 25.0  # s before the end at which a run is told to save
SHORTEST = 30.0  # s of the shortest useful schedule
ABLATION = 54.0  # s of the schedule of each
FIRST_ROOM, ROOMS_A_SECOND = 100_000, 20.0  # the first seed of the configurations, and an upper bound on rooms drawn per second
# Replace the configurations' values, with --smoke: the models and minimal work.
SMOKE = ('compile=false', 'workers=1', 'data.episodes=2', 'data.live=2', 'data.begin=2', 'data.frames=48', 'teacher.steps=2',
         'teacher.objective.batch=1', 'teacher.objective.clip_frames=36', 'teacher.objective.chunks=2')
SMOKE_OF = {TILES: ('preset=smoke_tiles', 'teacher.objective.pieces=2', 'teacher.objective.recall_share=0'),
            COMPARED: ('preset=tiny',)}
SMOKE_SIZES = ('--rooms', '1', '--frames', '40', '--first', '20', '--sights', '1', '--hidden', '1.5', '--long-rooms', '1',
               '--seconds', '4', '--driving-rooms', '1', '--starts', '1', '--driving-seconds', '1', '--repeats', '3',
               '--workers', '1')


@dataclass(frozen=True)
class Job:
    """A program that is begun if ``least`` s are left and all of ``needs`` exist, unless ``gives`` already exists.
    ``saves``: it saves when it is told to end. ``all_gpus``: it sees all of them."""

    name: str
    least: float
    arguments: tuple[str, ...]
    needs: tuple[Path, ...] = ()
    gives: Path | None = None
    saves: bool = False
    all_gpus: bool = False


class Schedule:
    """Runs jobs within ``seconds``, one per GPU at a time, and notes their outcomes in ``done``; calls ``save`` after each.
    ``drawing``: GPUs that can render images, each for the jobs that it runs."""

    def __init__(self, logs: Path, seconds: float, gpus: int, environment: Mapping[str, str], save: Callable[[], None],
                 drawing: Sequence[int] = ()):
        self._logs, self._end, self._environment, self._save = logs, time.monotonic() + seconds, environment, save
        self._drawing = drawing
        self._slots: list[int | None] = list(range(gpus)) or [None]
        self.done: list[dict[str, Any]] = []

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, jobs: Iterable[Job]) -> None:
        """Run jobs in their order, until all are over or time is up."""
        waiting, running = list(jobs), {}
        try:
            while waiting or running:
                for slot, (job, program) in list(running.items()):
                    if job.saves and self.left < SAVING:
                        program.tell()
                    if program.over or self.left < 1.0:
                        self.done.append(program.end(0.0))
                        del running[slot]
                        self._save()
                for slot in self._slots:
                    if slot not in running and (job := self._next(waiting, [job for job, _ in running.values()])):
                        running[slot] = job, self._begin(job, slot)
                time.sleep(0.1)
        finally:
            for _, program in running.values():
                program.kill()

    def _begin(self, job: Job, slot: int | None) -> Program:
        gpu = None if job.all_gpus else slot
        drawing = {'MUJOCO_EGL_DEVICE_ID': str(gpu)} if gpu in self._drawing else {}
        program = Program(job.name, math.inf, *job.arguments, environment={**self._environment, **drawing},
                          gpus=() if gpu is None else (gpu,))
        program.begin(self._logs)
        return program

    def _next(self, waiting: list[Job], running: Sequence[Job]) -> Job | None:
        """Take the next job that can be begun from ``waiting``, and drop those before it that cannot any more; a job whose
        needs a running or earlier job will provide stays."""
        expected = {job.gives for job in running}
        for job in list(waiting):
            if expected.intersection(job.needs):
                expected.add(job.gives)
                continue
            waiting.remove(job)
            missing = [str(path) for path in job.needs if not path.exists()]
            if job.gives is not None and job.gives.exists():
                self._note(job, 'taken', f'{job.gives} is there')
            elif missing:
                self._note(job, 'left_out', f'{", ".join(missing)} is not there')
            elif self.left < max(1.0, job.least):
                self._note(job, 'left_out', f'it takes {job.least:.0f} s at least, and {max(0.0, self.left):.0f} s are left')
            else:
                return job
        return None

    def _note(self, job: Job, what: str, why: str) -> None:
        self.done.append({'program': job.name, what: why})
        print(f'{job.name}: {what.replace("_", " ")}: {why}', file=sys.stderr, flush=True)
        self._save()


class Plan:
    """The programs of the stages, for one folder."""

    def __init__(self, folder: Path, smoke: bool, training_s: float | None, gpus: int, workers: int | None = None,
                 together: bool = False):
        self.folder, self._smoke, self._training_s, self._gpus = folder, smoke, training_s, gpus
        self._together = together and gpus > 1
        self._workers = workers or max(2, (os.cpu_count() or 2) // (1 if self._together else max(1, gpus)))
        self.results = folder / 'results'

    def weights(self, run: str) -> Path:
        """Return the folder of a run's finished model, else of the newest weights taken from it, else of portable ones; if none
        exists, the first."""
        found = [self.folder / run / name for name in ('final', 'newest', portable.FOLDER)]
        return next((each for each in found if (each / 'model.json').is_file()), found[0])

    def begun(self, run: str) -> bool:
        """Return whether a run has saved weights, in progress or of a finished stage."""
        return self._progress(run) or (self.weights(run) / 'model.json').is_file()

    def _progress(self, run: str) -> bool:
        folder = self.folder / run / 'teacher'
        return any(folder.glob('progress/step-*')) or (folder / 'model.json').is_file()

    def training_s(self, run: str, left: float) -> float:
        """Return the seconds of a run's schedule: those that it was begun with, else those that are asked for or left, in
        addition to those that its portable weights have been trained for."""
        file = self.folder / run / 'config.yaml'
        if file.is_file():
            return 60.0 * yaml.safe_load(file.read_text())['teacher']['max_minutes']
        carried = portable.begun(self.folder / run / portable.FOLDER, 'teacher')
        return (carried[1] if carried else 0.0) + (left - OVERHEAD if self._training_s is None else self._training_s)

    def _kept(self, run: str) -> list[str]:
        """Return overrides of the autoencoder and the first room. A run that was begun keeps its own. Portable weights include
        the same autoencoder, so no other model is needed, and continue in other rooms than they were trained in."""
        config, folder = self.folder / run / 'config.yaml', self.folder / run / portable.FOLDER
        autoencoder = first = None
        if config.is_file():
            found = yaml.safe_load(config.read_text())
            autoencoder, first = found.get('autoencoder'), found.get('data', {}).get('first_seed')
        elif (folder / 'model.json').is_file():
            autoencoder = folder
            if carried := portable.begun(folder, 'teacher'):
                first = FIRST_ROOM + math.ceil(ROOMS_A_SECOND * carried[1])
        kept = {'autoencoder': autoencoder, 'data.first_seed': first}
        return [f'{key}={value}' for key, value in kept.items() if value is not None]

    def train(self, left: float) -> list[Job]:
        seconds = self.training_s(TILES, left)
        if self._together:
            return [self._training(TILES, TILES, seconds, together=True)]
        begun = (self.folder / COMPARED / 'config.yaml').is_file()
        return [self._training(TILES, TILES, seconds),
                self._training(COMPARED, COMPARED, self.training_s(COMPARED, left) if begun else seconds)]

    def newest(self) -> list[Job]:
        """Return jobs that take the newest weights from unfinished runs."""
        return [Job(f'newest_{run}', 5.0, ('-m', 'worldmodel_ros.train.run.newest', str(self.folder / run),
                                           str(self.folder / run / 'newest')))
                for run in (TILES, COMPARED)
                if self._progress(run) and not (self.folder / run / 'final' / 'model.json').is_file()]

    def judge(self) -> list[list[Job]]:
        """Return groups of jobs, one after the other, that may run concurrently within a group: timed ones run alone."""
        tiles, compared = self.weights(TILES), self.weights(COMPARED)
        full = self.folder / TILES / 'teacher'
        parts = (('memory', 60.0, tiles, ()), ('prediction', 45.0, compared, ()), ('ten_minutes', 90.0, tiles, ()),
                 ('precision', 70.0, tiles, ()), ('memory', 60.0, compared, ()), ('decisions', 80.0, tiles, ()),
                 ('weights', 45.0, tiles, ('--full', str(full))))
        first = self._judging('chunk_time,prediction,agreement', 90.0, tiles)
        apart = [self._judging(part, least, model, *more, needs=(self._episodes, *([full / 'model.json'] if more else [])))
                 for part, least, model, more in parts]
        both = [self._judging('sharded', 60.0, tiles, all_gpus=True)] if self._gpus > 1 else []
        return [[first], apart, both]

    def ablations(self) -> list[Job]:
        """Return training jobs, each followed by the one that judges it."""
        content = yaml.safe_load((CONFIGS / 'small_tiles_ablations.yaml').read_text())
        changes = {entry['name']: entry.get('set') or {} for entry in content['variants']}
        jobs = []
        for name, values in changes.items():
            run = f'ablations/{name}'
            jobs += [self._training(TILES, run, ABLATION, values),
                     self._judging('prediction,memory', 45.0, self.folder / run / 'final', '--rooms', '16', '--sights', '20',
                                   '--hidden', '3', '6', results=self.results / run, needs=(self._episodes,))]
        return jobs

    @property
    def _episodes(self) -> Path:
        return self.folder / 'seen.npz'

    def _training(self, config: str, run: str, seconds: float, changes: Mapping[str, Any] = {}, together: bool = False) -> Job:
        out = self.folder / run
        values = [f'teacher.max_minutes={seconds / 60.0:.4f}', 'checkpoint_minutes=1.5',
                  f'workers={self._workers}', *self._kept(run),
                  *(f'{key}={json.dumps(value)}' for key, value in changes.items()),
                  *((*SMOKE, *SMOKE_OF[config]) if self._smoke else ())]
        least = 0.0 if self._smoke else min(seconds, 60.0) if self.begun(run) else seconds + 0.6 * OVERHEAD
        return Job(f'train_{run.replace("/", "_")}', least, (
            '-m', 'worldmodel_ros.cli', 'train', '--config', str(CONFIGS / f'{config}.yaml'), '--out', str(out),
            *(part for value in values for part in ('--set', value)), *(('--gpus', str(self._gpus)) if together else ())),
            gives=out / 'final' / 'model.json', saves=True, all_gpus=together)

    def _judging(self, parts: str, least: float, model: Path, *more: str, results: Path | None = None,
                 needs: tuple[Path, ...] = (), all_gpus: bool = False) -> Job:
        name = f'{parts.split(",")[0]}_{model.relative_to(self.folder).parent}'.replace('/', '_')
        return Job(name, 0.0 if self._smoke else least, script(
            'tile_model.py', '--model', str(model), '--parts', parts, '--compared', '', '--folder',
            str(results or self.results), '--episodes', str(self._episodes), *more, *(SMOKE_SIZES if self._smoke else ())),
            needs=(model / 'model.json', *needs), all_gpus=all_gpus)


def numbers(plan: Plan) -> dict[str, Any]:
    """Return the main numbers of the folder's results: of the model over tiles, of its baseline, and of its
    ablations."""
    found: dict[str, Any] = {}
    models = {TILES: (plan.weights(TILES), plan.results), COMPARED: (plan.weights(COMPARED), plan.results)}
    for folder in sorted(path for path in (plan.results / 'ablations').glob('*') if path.is_dir()):
        models[folder.name] = plan.folder / 'ablations' / folder.name / 'final', folder
    for name, (weights, results) in models.items():
        if not (weights / 'model.json').is_file():
            continue
        preset = json.loads((weights / 'model.json').read_text())['preset']['name']
        files = {part: json.loads(file.read_text()) for part in
                 ('prediction', 'memory', 'chunk_time', 'precision', 'decisions', 'weights', 'ten_minutes', 'sharded')
                 if (file := results / f'{part}_{preset}.json').is_file()}
        found[name] = {'weights': str(weights.relative_to(plan.folder)), **_of_files(files, preset)}
    ours, theirs = (found.get(name, {}).get('prediction_db') for name in (TILES, COMPARED))
    if ours and theirs:  # of the same rooms and moments
        found['prediction_db_over_compared'] = {horizon: round(value - theirs['2 steps'][horizon], 3)
                                                for horizon, value in ours['2 steps'].items()}
    return found


def _of_files(files: Mapping[str, Any], preset: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if prediction := files.get('prediction'):
        found |= {'prediction_db': prediction['psnr_db'], 'agreement_with_training': prediction.get('agreement_with_training')}
    if memory := files.get('memory'):
        found['turned_away'] = {hidden: {name: row[name] for name in ('episodes', 'present', 'within_5_degrees')}
                                for hidden, row in memory['rows'][preset].items()}
    if times := files.get('chunk_time'):
        medians = {name: row.get('p50_ms') for name, row in times['rows'].items()}
        others = [value for name, value in medians.items() if value and not name.startswith('paged')]
        found['chunk_ms'] = medians
        ours = [value for name, value in medians.items() if value and name.startswith('paged bf16')]
        if others and ours:
            found['times_faster_than_cloned'] = round(min(others) / min(ours), 3)
    for part in ('precision', 'weights'):
        if part in files:
            found[part] = {row.get('pages') or row['weights']: {name: row[name] for name in (
                'change_db', 'interval_95', 'latent_error')} for row in files[part]['rows']}
    if decisions := files.get('decisions'):
        found['decisions'] = {row['pages']: {'rooms': row['rooms'], 'what_if': row['what_if_ranking'],
                                             'success': row['closed_loop']['two_step']['success']} for row in decisions['rows']}
    if long := files.get('ten_minutes'):
        found['ten_minutes'] = {name: long.get(name) for name in ('seconds', 'sharpness_ratio', 'colour_ratio',
                                                                  'action_response_ratio', 'share_of_objects_found',
                                                                  'share_of_objects_found_in_place', 'objects')}
    if sharded := files.get('sharded'):
        found['sharded'] = sharded['rows']
    return found


def surroundings(gpus: int) -> tuple[dict[str, str], list[int]]:
    """Return the programs' environment: this checkout's package, and rendering by EGL where that works; and the GPUs with
    EGL, if there are several to choose from."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    kind = os.environ.get('MUJOCO_GL') or ('egl' if _draws({}) else 'osmesa')
    choice = gpus > 1 and kind == 'egl' and 'MUJOCO_EGL_DEVICE_ID' not in os.environ
    drawing = [gpu for gpu in range(gpus) if choice and _draws({'MUJOCO_EGL_DEVICE_ID': str(gpu)})]
    return {**ENVIRONMENT, 'PYTHONPATH': path, 'MUJOCO_GL': kind}, drawing


def _draws(environment: Mapping[str, str]) -> bool:
    return not subprocess.run([sys.executable, '-c', 'import mujoco.egl'], capture_output=True,
                              env={**os.environ, 'MUJOCO_GL': 'egl', **environment}).returncode


def _told(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # so that started programs end, too


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, required=True, help='of runs, logs and results')
    parser.add_argument('--stages', nargs='+', choices=STAGES, default=list(STAGES))
    parser.add_argument('--seconds', type=float, default=585.0, help='after which all ends (default: 585)')
    parser.add_argument('--training-seconds', type=float, help='of the schedule of each of the two models (default: all of '
                        f'--seconds but {OVERHEAD:.0f}); a run that was begun keeps its own')
    parser.add_argument('--gpus', type=int, help='(default: all there are)')
    parser.add_argument('--workers', type=int,
                        help='processes of each run that simulate (default: one a core, shared among GPUs)')
    parser.add_argument('--together', action='store_true', help='all GPUs train small_tiles, and nothing is compared with it')
    parser.add_argument('--smoke', action='store_true', help='next to nothing to do: tries the code, measures nothing')
    options, start = parser.parse_args(arguments), time.monotonic()

    import torch
    there = torch.cuda.device_count()
    gpus = there if options.together else min(2, there)
    gpus = gpus if options.gpus is None else options.gpus
    plan = Plan(options.folder.resolve(), options.smoke, options.training_seconds, gpus, options.workers, options.together)
    if wrong := _refused(options, plan, gpus, there):
        parser.error(wrong)
    logs = plan.folder / 'logs'
    for folder in (logs, plan.results):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _told)
    environment, drawing = surroundings(gpus)
    result = {**provenance(('torch', 'triton', 'mujoco')), 'environment': {**environment, 'PYTHONPATH': '.'}, 'gpus_used': gpus}

    def save() -> None:
        write_result({**result, 'programs': schedule.done, 'numbers': numbers(plan)}, plan.results / 'train_tiles.json')
    schedule = Schedule(logs, options.seconds - (time.monotonic() - start), gpus, environment, save, drawing)
    if 'train' in options.stages:
        schedule.run(plan.train(schedule.left))
    if 'judge' in options.stages:
        schedule.run(plan.newest())
        for group in plan.judge():
            schedule.run(group)
    if 'ablations' in options.stages:
        schedule.run(plan.ablations())
    save()
    print(json.dumps(numbers(plan), indent=1))
    return 1 if any(each.get('exit_status', 0) != 0 for each in schedule.done) else 0


def _refused(options: argparse.Namespace, plan: Plan, gpus: int, there: int) -> str:
    """Return what is wrong with the arguments, with the remedy; '' if nothing is."""
    if plan.folder.exists() and not plan.folder.is_dir():
        return f'--folder {options.folder} is a file: name a folder'
    if not 0.0 < options.seconds < math.inf:
        return f'--seconds is {options.seconds:g}: give what the command may take, such as 585'
    if not 0 <= gpus <= there:
        return f'--gpus is {gpus}, and this machine has {there}'
    if gpus == 0 and not options.smoke:
        return 'no GPU is there to train on, and on a CPU it would take days: --smoke tries the code'
    if options.workers is not None and options.workers < 2:
        return f'--workers is {options.workers}: one is the training itself, give 2 or more'
    if options.training_seconds is not None and not options.training_seconds > 0.0:
        return f'--training-seconds is {options.training_seconds:g}: it must be above zero, or left out'
    if 'train' in options.stages and not options.smoke and not plan.begun(TILES):
        schedule = max(SHORTEST, plan.training_s(TILES, options.seconds))
        if schedule + OVERHEAD > options.seconds:
            return (f'--seconds is {options.seconds:g}, and {schedule:.0f} s of training take {schedule + OVERHEAD:.0f} with '
                    'start, compilation and writing: give as many')
    if 'train' not in options.stages and 'judge' in options.stages and not plan.begun(TILES):
        return f'{plan.folder / TILES} has no weights to judge: begin with --stages train'
    return ''


if __name__ == '__main__':
    raise SystemExit(main())

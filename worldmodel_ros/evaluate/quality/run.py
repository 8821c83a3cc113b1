"""Runs the evaluation: independent jobs, each of one room and one part, in any number of processes.

A job's result depends only on its seed, the model and the machine, never on how jobs are distributed.
"""
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial

import numpy as np

from worldmodel_ros.evaluate.processes import each
from . import summary
from .horizons import gain
from .seeds import QualityError
from .task import DEFINITIONS, PARTS, Task

STARTS = 5        # per episode
STRIPS = 3        # rooms that are shown, of the first and of the worst


@dataclass(frozen=True)
class Job:
    part: str
    seed: int


@dataclass(frozen=True)
class Result:
    """What a job found, and strips of images by name, uint8 (rows, columns, H, W, 3)."""

    records: list[dict]
    strips: dict[str, np.ndarray] = field(default_factory=dict)


def evaluate(task: Task, workers: int = 1, progress: Callable[[float], None] = lambda share: None
             ) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the numbers, and strips of images by name. Raises ModelError and QualityError.

    A job that fails otherwise loses only its own numbers: ``failed`` names it, with its error.
    """
    models = _open(task)  # also exports a model once, before the workers need it
    jobs = _jobs(task)
    results: dict[Job, Result | Exception] = {}
    for job, result in _run(task, jobs, workers):
        results[job] = result
        progress(len(results) / len(jobs))
    done = {job: results[job] for job in jobs if isinstance(results[job], Result)}
    records = {part: [r for job, result in done.items() if job.part == part for r in result.records]
               for part in PARTS}
    report = {'seeds': f'{task.seeds.start}:{task.seeds.stop}', 'episodes': len(task.seeds), 'model': task.model,
              'teacher': task.teacher or f'{task.model}, its flow in 32 steps',
              'backend': models.engine.backend.name, 'definitions': DEFINITIONS,
              'failed': [{**asdict(job), 'error': repr(result)} for job, result in results.items()
                         if isinstance(result, Exception)]}
    if 'horizons' in task.parts:
        report |= {'horizons': summary.horizons(records['horizons']),
                   'by_driver': summary.by_driver(records['horizons'])}
    if 'what_if' in task.parts:
        report |= summary.what_if(records['what_if'])
    if 'drift' in task.parts:
        report['drift'] = summary.drift(records['drift'])
    if 'closed_loop' in task.parts:
        report['closed_loop'] = summary.closed_loop(records['closed_loop'])
    return report, _chosen_strips(done)


def _chosen_strips(done: dict[Job, Result]) -> dict[str, np.ndarray]:
    """Every long rollout, the first rooms as they come, and the moments at which the model did worst of all."""
    rooms = [(min(gain(result.records, r['start']) for r in result.records), job, result)
             for job, result in done.items() if job.part == 'horizons']
    strips = {f'dream_{job.seed}': result.strips['dream'] for job, result in done.items() if job.part == 'drift'}
    strips |= {f'first_{job.seed}': result.strips['first'] for _, job, result in rooms[:STRIPS]}
    worst = sorted(rooms, key=lambda room: room[0])[:STRIPS]
    return strips | {f'worst_{job.seed}': result.strips['worst'] for _, job, result in worst}


def _jobs(task: Task) -> list[Job]:
    """The longest ones first, so that no worker ends long after the others."""
    seeds = dict.fromkeys(task.parts, task.seeds) | {'drift': task.seeds[:task.dreams]}
    order = [part for part in ('drift', 'horizons', 'closed_loop', 'what_if') if part in task.parts]
    return [Job(part, seed) for part in order for seed in seeds[part]]


def _run(task: Task, jobs: list[Job], workers: int) -> Iterator[tuple[Job, Result | Exception]]:
    for job, done in each(partial(_attempt, task), jobs, workers):
        try:
            yield job, done.result()
        except BrokenProcessPool as error:  # a process was killed, for its memory perhaps
            yield job, error


def _attempt(task: Task, job: Job) -> Result | Exception:
    try:
        return _work(task, job)
    except QualityError:
        raise
    except Exception as error:  # whatever it is, judge the other rooms, and name this one
        traceback.print_exc()
        return error


def _work(task: Task, job: Job) -> Result:
    from .closed_loop import drive, drivers
    from .drift import drift_record
    from .drives import record_drive
    from .horizons import context_of, drive_frames, horizon_records
    from .ranking import ranking_records
    models = _open(task)
    spec = models.engine.spec
    if job.part == 'drift':
        record, strip = drift_record(job.seed, models.student, task.drift_seconds)
        return Result([record], {'dream': strip})
    if job.part == 'closed_loop':
        return Result([{'driver': name, **asdict(drive(job.seed, make(), spec.image_size))}
                       for name, make in drivers(models.engine).items()])
    recorded = record_drive(job.seed, drive_frames(spec.step_period, STARTS, context_of(spec)), spec.image_size)
    if job.part == 'what_if':
        return Result(ranking_records(recorded, models.student))
    # On a GPU, robots run the same network that the other numbers are of.
    deployed = None if models.engine.backend.name in ('torch-cpu', 'torch-cuda') else models.engine
    return Result(*horizon_records(recorded, models.student, models.teacher, deployed))


@dataclass(frozen=True)
class _Models:
    engine: object
    student: object
    teacher: object


@lru_cache(maxsize=1)
def _open(task: Task) -> _Models:
    """The task's models, loaded once per process."""
    import torch

    from ...engine import load
    from ...engine.loading import model_folder
    from ...model import checkpoint
    from .imagination import Imagination
    from .tiled_imagination import TiledImagination

    def imagination(name: str) -> Imagination:
        model = checkpoint.load(folder := model_folder(name), device)
        return TiledImagination(model, folder, STARTS) if model.preset.tile else Imagination(model)

    torch.set_num_threads(1)  # processes share the cores, and sums must not depend on how
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    engine = load(task.model, task.backend)
    student = imagination(task.model)
    teacher = student
    if task.teacher:
        teacher = imagination(task.teacher)
        if teacher.spec.image_size != student.spec.image_size or teacher.spec.step_period != student.spec.step_period:
            raise QualityError(f'teacher {task.teacher} and model {task.model} take different images: give a teacher with the '
                               'same image_size and step_period')
    return _Models(engine, student, teacher)

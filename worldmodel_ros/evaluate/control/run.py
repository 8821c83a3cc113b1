"""Runs the evaluation: independent episodes, in any number of processes.

An episode depends only on its seed, task, variant, controller and delay, never on how episodes are distributed.
"""
from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.control.task import TaskError
from worldmodel_ros.evaluate.processes import each
from worldmodel_ros.sim.task_scenes import Variant
from worldmodel_ros.sim.world import World
from . import controllers
from .cameras import CAMERAS
from .episode import Episode, drive, rung_seconds
from .summary import DEFINITIONS, p_values, table
from .tasks import TASKS, Setup, to_world

if TYPE_CHECKING:
    import numpy as np

    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.forecast.loading import Forecasts
    from worldmodel_ros.model.cloned_policy import ClonedPolicy

PLAIN = 'plain'
RUNGS = ('head', 'one_step', 'two_step')  # by rounds of candidates
_ANOTHER = 50_000_000  # offset from a room's seed to that of the other room that ``another_future`` sees
MORE_DELAY = 0.2  # s, of the variant ``delay``
VARIANTS = {PLAIN: Variant(), 'shifted': Variant(shifted=True), 'stops': Variant(stops=True), 'delay': Variant(),
            **dict.fromkeys(CAMERAS, Variant())}
_SHIFTS = {'shifted': ('intercept', 'street', *(name for name, task in TASKS.items() if task.told)),
           'stops': ('street', 'pass_behind')}


@dataclass(frozen=True)
class Question:
    """What to drive. ``rungs``: whose measured times are the delays from an image to its command, in ``tasks`` that of the
    first; each other one is a variant of its name. ``variants``: of VARIANTS, each for the tasks that have it, besides the
    plain tasks. ``model``: of the controller ``b1``; ``forecast``: name or folder of the forecast of ``controllers.STEPS``
    and CLONED; ``backend``: of both, ``auto`` as on the robot.

    Raises ValueError for an unknown name and for no seeds.
    """

    seeds: range
    tasks: tuple[str, ...]
    controllers: tuple[str, ...]
    rungs: tuple[str, ...] = ('two_step',)
    variants: tuple[str, ...] = ()
    model: str = 'tiny'
    backend: str = 'auto'
    forecast: str = ''

    def __post_init__(self) -> None:
        if not len(self.seeds):
            raise ValueError(f'seeds {self.seeds.start}:{self.seeds.stop} are none: the end must be above the first')
        for kind, names, known in (('task', self.tasks, TASKS), ('controller', self.controllers, controllers.NAMES),
                                   ('variant', self.variants, VARIANTS), ('rung', self.rungs, rung_seconds())):
            unknown = [name for name in names if name not in known]
            if kind != 'variant' and not names:
                raise ValueError(f'no {kind} given: choose from {", ".join(known)}')
            if unknown:
                raise ValueError(f'unknown {kind} {unknown[0]!r}: choose from {", ".join(known)}')
        if learned := sorted(filter(controllers.on_forecast, self.controllers)):
            if not self.forecast:
                raise ValueError(f'{learned[0]!r} needs a forecast: give the folder of a trained one')

    @property
    def all_variants(self) -> tuple[str, ...]:
        """The variants, and the rungs but the first."""
        return *self.variants, *self.rungs[1:]

    def jobs(self) -> list[Job]:
        """Return all episodes, those of a seed together, so that what was driven before an interruption is paired."""
        return [Job(variant, task, controller, seed) for seed in self.seeds for variant in (PLAIN, *self.all_variants)
                for task in self.tasks if task in _SHIFTS.get(variant, TASKS)
                for controller in self.controllers if controllers.applies(controller, TASKS[task])
                and (variant not in CAMERAS or controllers.sees(controller))]

    def delay(self, job: Job) -> float:
        """Return the seconds from an image to its command."""
        rung = job.variant if job.variant in self.rungs else self.rungs[0]
        if job.controller == controllers.SHIPPED:
            rung = controllers.SHIPPED
        elif job.controller in controllers.CLONED:
            rung = RUNGS[0]
        elif job.controller in controllers.STEPS:
            rung = RUNGS[controllers.STEPS[job.controller]]
        return rung_seconds()[rung] + MORE_DELAY * (job.variant == 'delay')


@dataclass(frozen=True)
class Job:
    variant: str
    task: str
    controller: str
    seed: int


def evaluate(question: Question, workers: int = 1, progress: Callable[[float], None] = lambda share: None,
             kept: Path | None = None, seconds: float = math.inf) -> dict:
    """Return the report, without machine and command; ``kept`` and ``seconds`` as in ``driven``. Rooms cut off by the time are
    absent from it. Raises ValueError for a file of other rungs, models or back ends."""
    jobs, done = question.jobs(), {}
    for job, episode in driven(question, jobs, workers, kept, seconds):
        done[job] = episode
        progress(len(done) / len(jobs))
    return report(question, complete(jobs, done))


def driven(question: Question, jobs: Sequence[Job], workers: int = 1, kept: Path | None = None,
           seconds: float = math.inf) -> Iterator[tuple[Job, Episode]]:
    """Drive ``jobs``, in order as processes are free, and yield each with its episode when that ends.

    ``kept``: a file of JSON lines to which each episode is written as it ends; those already in it are not driven again.
    ``seconds``: after which no further episode is begun; those in progress are finished, however long they take, so that
    long ones are not missing more often. Raises ValueError for a file of other rungs, models or back ends, or
    with a damaged line."""
    end = time.monotonic() + seconds
    there = _read(kept, question)
    yield from ((job, there[job]) for job in jobs if job in there)
    todo = [job for job in jobs if job not in there]
    if workers > 1 and any(controllers.on_forecast(job.controller) for job in todo):
        _forecast(question.forecast, question.backend)  # exports its graphs once, before each process would
    for job, ended in each(partial(_drive_before, end, question), todo, workers):
        if (episode := ended.result()) is None:
            continue
        if kept:
            with kept.open('a') as stream:
                stream.write(json.dumps({**_key(question), **asdict(job), 'episode': asdict(episode)}) + '\n')
        yield job, episode


def complete(jobs: Sequence[Job], done: Mapping[Job, Episode]) -> dict[Job, Episode]:
    """Return the episodes of rooms, of a variant and a task, in which each controller of ``jobs`` has driven."""
    cut_off = {(job.variant, job.task, job.seed) for job in jobs if job not in done}
    return {job: done[job] for job in jobs if (job.variant, job.task, job.seed) not in cut_off}


def report(question: Question, episodes: dict[Job, Episode]) -> dict:
    """Return the numbers of driven episodes."""
    def of(variant: str) -> dict[tuple[str, str], list[Episode]]:
        found: dict[tuple[str, str], list[Episode]] = {}
        for job, episode in episodes.items():
            if job.variant == variant:
                found.setdefault((job.task, job.controller), []).append(episode)
        return found
    return {'seeds': f'{question.seeds.start}:{question.seeds.stop}',
            'rungs': {name: rung_seconds()[name] for name in question.rungs}, 'model': question.model,
            'definitions': DEFINITIONS,
            'controllers': {name: controllers.MEANINGS[name] for name in question.controllers},
            'tasks': table(of(PLAIN)), 'variants': {name: table(of(name)) for name in question.all_variants},
            'p_values': p_values(of(PLAIN))}


def _key(question: Question) -> dict[str, str]:
    forecast = {'forecast': question.forecast} if question.forecast else {}
    return {'rung': question.rungs[0], 'model': question.model, **forecast, 'backend': question.backend}


def _read(kept: Path | None, question: Question) -> dict[Job, Episode]:
    found: dict[Job, Episode] = {}
    if kept and kept.exists():
        for number, line in enumerate(kept.read_text().splitlines(), 1):
            try:
                row = {'backend': question.backend, **json.loads(line)}  # early files lack it
            except (ValueError, TypeError) as error:
                raise ValueError(f'{kept}, line {number}, is no episode ({error}): delete the line to drive its episode '
                                 'again') from error
            if {name: row.pop(name) for name in ('rung', 'model', 'forecast', 'backend') if name in row} != _key(question):
                raise ValueError(f'{kept} belongs to another rung, model or back end: give another file, or delete it')
            episode = Episode(**row.pop('episode'))
            found[Job(**row)] = episode
    return found


def _drive_before(end: float, question: Question, job: Job) -> Episode | None:
    """Drive an episode, if it begins before ``end``, by the monotonic clock, which the processes of a machine share."""
    return _drive(question, job) if time.monotonic() < end else None


def _drive(question: Question, job: Job) -> Episode:
    engine = _engine(question.model, question.backend) if job.controller == controllers.SHIPPED else None
    variant = VARIANTS.get(job.variant, Variant())
    setup = TASKS[job.task].setup(job.seed, variant)
    another = TASKS[job.task].setup(job.seed + _ANOTHER, variant).scene if job.controller == controllers.ANOTHER else None
    forecast = _forecast(question.forecast, question.backend) if controllers.on_forecast(job.controller) else None
    policy = _policy(question.forecast, controllers.CLONED[job.controller]) if job.controller in controllers.CLONED else None
    look = CAMERAS[job.variant].look if job.variant in CAMERAS else World.render
    image = _shown(setup, look, forecast.image_size) if forecast and setup.task.by_image else None
    try:
        controller = controllers.make(job.controller, engine, forecast, another, look, image, policy)
    except TaskError as error:  # the robot refuses the goal, and stays where it is
        return Episode(job.seed, False, 0, 0.0, 0, f'refused: {error}', alike=False if image is not None else None)
    return drive(setup, controller, question.delay(job), _world())


def _shown(setup: Setup, look: controllers.Look, size: tuple[int, int]) -> np.ndarray:
    """What the camera shows at the goal pose."""
    world = _world()
    world.load(setup.scene)
    world.move_robot(to_world(setup.scene, setup.goals[0]))
    return look(world, size)


@lru_cache(maxsize=1)
def _engine(model: str, backend: str) -> Engine:
    from worldmodel_ros.engine import load
    return load(model, backend)


@lru_cache(maxsize=1)
def _forecast(folder: str, backend: str) -> Forecasts:
    from worldmodel_ros.engine.forecast.loading import load_forecast
    return load_forecast(folder, backend)  # one thread: each process has one core


@lru_cache(maxsize=len(controllers.CLONED))
def _policy(folder: str, seed: int) -> ClonedPolicy:
    import torch

    from worldmodel_ros.engine.forecast.loading import forecast_folder
    from worldmodel_ros.model.cloned_policy import ClonedPolicy
    from .cloned import policy_file
    torch.set_num_threads(1)
    return ClonedPolicy.load(policy_file(forecast_folder(folder), seed))


@lru_cache(maxsize=1)
def _world() -> World:
    return World()

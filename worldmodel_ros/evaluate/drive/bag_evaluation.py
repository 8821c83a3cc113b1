"""Evaluates one model on one bag: reads, runs, measures, and writes a line for every window."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.bags.drive import Drive, Tick, read_drive
from worldmodel_ros.bags.fields import YawRate
from worldmodel_ros.bags.findings import Finding, by_severity
from worldmodel_ros.bags.goals import read_goals
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.mapping import Mapping
from worldmodel_ros.bags.problems import BagError
from worldmodel_ros.bags.source import Bag, open_bag
from worldmodel_ros.inputs.ticks import NS
from .columns import Columns
from .deadline import Arrival, Budget
from .deadline_replay import replay
from .evaluation import Evaluation, Subject
from .forecast import ForecastReplay
from .highlights import Highlights
from .step_times import MeasuredTimes
from .windows import scenes

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.forecast.loading import Forecasts


@dataclass(frozen=True)
class Task:
    """``model``: its name as given. ``config``: YAML with the mapping of topics. ``seconds``: where the evaluated part ends,
    None for the recording's end, and ``skip`` where it begins [s]."""

    bag: Path
    model: str
    config: Path | None = None
    seconds: float | None = None
    skip: float = 0.0


def evaluate_bag(task: Task, engine: Engine, measured: MeasuredTimes, lines: Path,
                 progress: Callable[[float], None] = lambda share: None, forecasts: Forecasts | None = None) -> Evaluation:
    """Run the model over the bag and write its windows to ``lines``, one JSON object per line, the same on every run.

    ``measured``: step times to replay the deadline with. ``forecasts``: a scene forecast to run as well. Memory grows with the
    bag by only some hundred bytes per window. Raises BagError if the bag cannot be read or its topics cannot be identified, and
    ModelError for a forecast that does not suit the model.
    """
    with open_bag(task.bag) as bag:
        mapping = find_mapping(bag, engine.spec, task.config)
        drive = read_drive(bag, mapping, engine.spec, seconds=task.seconds, skip=task.skip, wheels=forecasts is not None)
        columns, highlights, digest = Columns(engine.spec), Highlights(), hashlib.sha256()
        arrivals: list[Arrival] = []
        ticks = _ticks(drive, task.seconds, arrivals, progress)
        replayed = ForecastReplay(forecasts, engine.spec) if forecasts else None
        with lines.open('wb') as stream:
            for scene in scenes(engine, replayed.watch(ticks) if replayed else ticks, drive.has_actions):
                columns.add(scene.window)
                highlights.offer(scene)
                line = json.dumps(scene.window.to_dict(), allow_nan=False).encode() + b'\n'
                stream.write(line)
                digest.update(line)
        if drive.images and not drive.health.images and task.skip:
            until = '' if task.seconds is None else f' before --limit {task.seconds:g}'
            raise BagError(f'{task.bag}: none of its {drive.images} images comes after --skip {task.skip:g}{until}: skip less')
        findings = by_severity([*_of_the_files(bag), *drive.health.findings()])
        path = task.bag.resolve()
        part = (f'only what comes after {task.skip:g} s',) if task.skip else ()
        subject = Subject(path.name, str(path), task.model, engine.backend.name,
                          (*_in_words(mapping, engine.spec.action_names), *part))
        return Evaluation(
            subject, engine.spec, columns, highlights, replay(engine.spec, arrivals, measured, Budget.from_config()),
            drive.health.to_dict(), findings, drive.has_actions, digest.hexdigest(), replayed and replayed.numbers(),
            tuple(read_goals(bag)))


def _ticks(drive: Drive, seconds: float | None, arrivals: list[Arrival], progress: Callable[[float], None]
           ) -> Iterator[Tick]:
    """Yield the ticks of the recording, and note their arrivals; ``seconds`` of it are read."""
    began = None
    for tick in drive:
        began = tick.log_ns if began is None else began
        arrivals.append(Arrival(tick.stamp_ns, tick.log_ns, tick.episode))
        progress((tick.log_ns - began) / NS / seconds if seconds else drive.health.images / max(1, drive.images))
        yield tick


def _of_the_files(bag: Bag) -> list[Finding]:
    return [Finding(problem.kind, 'warning', problem.text, count=problem.count) for problem in bag.problems]


def _in_words(mapping: Mapping, names: tuple[str, ...]) -> tuple[str, ...]:
    """What the topics were taken for, one line each."""
    stamps = '' if mapping.image_stamps == 'header' else ', stamped with the time of receipt'
    lines = [f'{mapping.image_topic}: pictures{stamps}']
    if mapping.info_topic:
        lines.append(f'{mapping.info_topic}: the camera\'s calibration')
    if mapping.action_topic:
        lines.append(f'{mapping.action_topic}: ' + ', '.join(
            f'{name} = {_formula(field)}' for name, field in zip(names, mapping.actions)))
    if mapping.goal_topic:
        lines.append(f'{mapping.goal_topic}: goal')
    return (*lines, *mapping.notes)


def _formula(field) -> str:
    if isinstance(field, YawRate):
        return f'{_formula(field.speed)} * tan({_formula(field.steering)}) / {field.wheelbase:g} m'
    scale = '' if field.scale == 1.0 else f'{field.scale:g} * '
    offset = '' if field.offset == 0.0 else f' {"+" if field.offset > 0 else "-"} {abs(field.offset):g}'
    return f'{scale}{field.path}{offset}'

"""Exports recordings to one LeRobot dataset of many episodes, for training and fine-tuning."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldmodel_ros.datasets.layout import Layout
from worldmodel_ros.datasets.writer import DatasetWriter
from worldmodel_ros.inputs.ticks import GAP
from worldmodel_ros.model.presets import Preset
from .drive import Tick


@dataclass(frozen=True)
class Exported:
    """What was written, and the number of ``dropped`` ticks, which stood alone or have no recorded action."""

    folder: Path
    episodes: int
    frames: int
    dropped: int


def export(drives: Iterable[Iterable[Tick]], folder: Path, preset: Preset) -> Exported:
    """
    Write the ticks of recordings, at the preset's image size and step period, as a LeRobot dataset v3.0.

    A frame's ``action`` is what was executed from it to the next frame, the mean over the period as in the live node, float32
    in SI units; its ``observation.state`` is what was executed over the period before it. The task names the goal. An episode
    ends where the recording's does, and where a tick is missing, because the frames of a dataset are one period apart.

    Raises ValueError if the step period does not give a whole number of frames per second, or there are no frames, and
    FileExistsError if the folder is not empty.
    """
    fps = round(1.0 / preset.step_period)
    if abs(fps * preset.step_period - 1.0) > 1e-6:
        raise ValueError(f'{preset.name}: a step of {preset.step_period} s is no whole number of frames per second, '
                         'which LeRobot needs')
    writer = DatasetWriter(folder, Layout(fps, preset.image_size, preset.action_names))
    dropped = 0
    for ticks in drives:
        for episode in episodes(ticks, preset.step_period):
            dropped += _write_episode(writer, episode)
    writer.close()
    return Exported(folder, writer.episodes, writer.frames, dropped)


def episodes(ticks: Iterable[Tick], step_period: float) -> Iterator[Iterator[Tick]]:
    """Split ticks where a new episode begins or a tick is missing; each part must be consumed before the next."""
    waiting = iter(ticks)
    ahead: list[Tick] = [tick for tick in (next(waiting, None),) if tick is not None]

    def part() -> Iterator[Tick]:
        while ahead:
            tick = ahead.pop()
            following = next(waiting, None)
            if following is not None:
                ahead.append(following)
            yield tick
            if following is None or following.episode != tick.episode or (
                    following.stamp_ns - tick.stamp_ns) * 1e-9 > GAP * step_period:
                return

    while ahead:
        yield part()


def _write_episode(writer: DatasetWriter, ticks: Iterator[Tick]) -> int:
    """Write one episode and return the number of dropped ticks."""
    before, written = None, 0
    for tick in ticks:
        if before is not None:
            _add(writer, before, tick.executed)
            written += 1
        before = tick
    if before is None:
        return 0
    if written and before.recorded is not None:
        _add(writer, before, before.recorded)
        written += 1
        dropped = 0
    else:
        dropped = 1  # a single frame, or the last one without a recorded action
    writer.end_episode()
    return dropped


def _add(writer: DatasetWriter, tick: Tick, action: np.ndarray) -> None:
    writer.add(tick.image, tick.executed, action, f'drive to {tick.goal}' if tick.goal else 'drive')

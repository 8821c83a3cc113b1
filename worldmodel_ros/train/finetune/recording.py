"""Recordings as arrays: every image of a bag or a dataset, and chains of images that are one step apart."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.train.data import lerobot
from ...inputs.ticks import GAP, NS, FramePacer, FrameSettings, Pace
from ...model.presets import Preset

_SETTINGS = FrameSettings()  # of the live node


class RecordingError(ValueError):
    """A recording that cannot be fine-tuned on: says which, why, and what to do."""


@dataclass(frozen=True)
class Recording:
    """N images of a camera, at its full rate.

    frames uint8 (N, H, W, 3), at the model's size; stamps (N,) [s], rising within an episode; received (N,) in s since
    the first image's receipt, never falling; executed float32 (N, A), SI units, the mean action since the image
    before (of an episode's first: over one step before it); episode int (N,): no step leads from one to another.
    ``notes`` are for the reader of the result. ``calibrated``: the images were warped to the view of the camera that the
    model was trained with, by the CameraInfo in the recording. ``refused``: that CameraInfo was left out, because the camera
    does not cover this view.
    """

    path: Path
    frames: np.ndarray
    stamps: np.ndarray
    received: np.ndarray
    executed: np.ndarray
    episode: np.ndarray
    notes: tuple[str, ...] = ()
    calibrated: bool = False
    refused: bool = False

    @property
    def seconds(self) -> float:
        """Duration from the first image to the last."""
        return float(self.received[-1])


@dataclass(frozen=True)
class Chain:
    """T images one step of the model apart: frames uint8 (T, H, W, 3), actions float32 (T, A), the mean that was
    executed over the step before each image, and times (T,) of receipt, as of the recording."""

    frames: np.ndarray
    actions: np.ndarray
    times: np.ndarray

    def __len__(self) -> int:
        return len(self.frames)


def read(path: Path, preset: Preset, config: Path | None = None) -> Recording:
    """
    Return all images of a rosbag2 recording, or of a LeRobot dataset.

    A bag is read as by ``worldmodel evaluate bag`` with the same ``config`` file, except that images between ticks are
    kept, and that a CameraInfo which is refused is left out. Raises RecordingError, BagError or DatasetError.
    """
    return _read_dataset(path, preset) if lerobot.is_dataset(path) else _read_bag(path, preset, config)


def _read_bag(path: Path, preset: Preset, config: Path | None) -> Recording:
    with open_bag(path) as bag:
        mapping = find_mapping(bag, preset, config)
        drive = read_drive(bag, mapping, preset, FrameSettings(every_image=True))
        if not drive.has_actions:
            raise RecordingError(
                f'{path} has no actions: the model learns what follows from what the robot does. Record the commands '
                'that it executes together with the camera, or name their topic in the --config file')
        ticks = list(drive)
        refusal = drive.camera.refusal.partition(': ')[0]  # its advice is to do what this is for
        if refusal:
            mapping = replace(mapping, info_topic=None, notes=(
                *mapping.notes, f'{path}: {mapping.info_topic} is left out: the images are cropped and scaled, and the model '
                f'is adapted to this camera ({refusal})'))
            drive = read_drive(bag, mapping, preset, drive.settings)
            ticks = list(drive)
        if not ticks:
            raise RecordingError(f'{path} has no usable images:\n' + '\n'.join(
                finding.text for finding in drive.health.findings()))
        if not drive.health.actions:
            raise RecordingError(f'{path}: none of the actions in {mapping.action_topic} can be read:\n' + '\n'.join(
                finding.text for finding in drive.health.findings()))
        for finding in drive.health.findings():
            if finding.kind == 'other clock':  # the model would learn that nothing follows from actions
                raise RecordingError(f'{path}: {finding.text}')
        began = next(iter(bag.messages([mapping.image_topic]))).log_ns
        stamps, logs = (np.array([getattr(t, name) for t in ticks]) for name in ('stamp_ns', 'log_ns'))
        # If the clock was set back, held-out data must still come after training data.
        received = np.maximum.accumulate((logs - began) / NS)
        return Recording(path, np.stack([t.image for t in ticks]), (stamps - stamps[0]) / NS, received,
                         np.stack([t.executed for t in ticks]), np.array([t.episode for t in ticks]), drive.notes,
                         drive.camera.corrects, bool(refusal))


def _read_dataset(path: Path, preset: Preset) -> Recording:
    """Lay the episodes out in time, with a second between two."""
    episodes = lerobot.load([path], 'cpu', preset, clip_frames=1)
    longest = episodes.frames.shape[1]
    lengths = [longest] * len(episodes) if episodes.lengths is None else episodes.lengths.tolist()
    starts = np.cumsum([0.0, *(length * preset.step_period + 1.0 for length in lengths[:-1])])
    times = np.concatenate([start + preset.step_period * np.arange(n) for start, n in zip(starts, lengths)])
    return Recording(
        path, np.concatenate([episodes.frames[k, :n].numpy() for k, n in enumerate(lengths)]), times, times,
        np.concatenate([episodes.actions[k, :n].numpy() for k, n in enumerate(lengths)]),
        np.repeat(np.arange(len(lengths)), lengths))


def chains(recording: Recording, preset: Preset, start: float, end: float) -> list[Chain]:
    """Return the images received from ``start`` until ``end`` [s] as chains, each image at most once.

    A 20 Hz camera gives a 10 Hz model two chains that differ in phase, so that a clip may begin at any image.
    """
    chosen = np.flatnonzero((recording.received >= start) & (recording.received < end))
    parts = (index[part] for episode in np.unique(recording.episode[chosen])
             for index in [chosen[recording.episode[chosen] == episode]]
             for part in _parts(recording.stamps[index], preset.step_period))
    return [Chain(recording.frames[part], _actions(recording, part, preset.step_period), recording.received[part])
            for part in parts]


def _parts(stamps: np.ndarray, period: float) -> Iterator[np.ndarray]:
    """Yield indices into rising stamps [s]: disjoint parts of steps that a live node would take.

    At a rate that is no multiple of the model's, some images are in no part.
    """
    used = np.zeros(len(stamps), bool)
    nanoseconds = (np.round((stamps - stamps[0]) * NS).astype(np.int64) + 1).tolist()  # a stamp of zero means none
    for first in range(len(stamps)):
        part = [] if used[first] else list(_part(nanoseconds, used, first, period))
        used[part] = True
        if len(part) > 1:
            yield np.array(part)


def _part(stamps: list[int], used: np.ndarray, first: int, period: float) -> Iterator[int]:
    """Yield the images that a live node takes from ``first`` on, up to a gap or to one that is used."""
    pacer, last = FramePacer(period), stamps[first]
    for k in range(first, len(stamps)):
        pace = pacer.classify(stamps[k], _SETTINGS.tick_tolerance, _SETTINGS.time_jump)
        if pace in (Pace.TICK, Pace.NEW_EPISODE):
            if used[k] or stamps[k] - last > GAP * period * NS:
                return
            last = stamps[k]
            yield k
        pacer.take(stamps[k], pace)


def _actions(recording: Recording, part: np.ndarray, period: float) -> np.ndarray:
    """Mean actions (T, A) over the steps that end at the images ``part`` (T,), float32."""
    stamps = recording.stamps
    # The chain has no image before the first: use the recorded one nearest to a step back.
    earlier = np.flatnonzero(recording.episode[:part[0] + 1] == recording.episode[part[0]])
    first = earlier[np.abs(stamps[earlier] - (stamps[part[0]] - period)).argmin()]
    actions = [recording.executed[now] if before == now else np.average(
        recording.executed[before + 1:now + 1], 0, np.diff(stamps[before:now + 1]))
        for before, now in zip([first, *part[:-1]], part)]
    return np.stack(actions).astype(np.float32)

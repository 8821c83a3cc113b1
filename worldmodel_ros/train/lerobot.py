"""Reads LeRobot datasets, format v3.0 with pictures in the tables, as training episodes."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pyarrow.dataset
import torch

from ..inputs.images import fit
from ..model.presets import Preset
from .data import Episodes
from .world import CLIP_FRAMES

STATE, ACTION = 'observation.state', 'action'
# Longer episodes are cut, so that one long drive does not make all others as long with padding. The pieces overlap:
# every clip of a training step is whole in one of them.
PIECE_FRAMES = 240


class DatasetError(ValueError):
    """A dataset that cannot be trained on: says which, why, and what to do."""


@dataclass(frozen=True)
class Description:
    """What meta/info.json says that training needs to know."""

    folder: Path
    fps: int
    image: str                        # name of the feature that holds the pictures
    action_names: tuple[str, ...]
    state_names: tuple[str, ...]      # () if there is no state


def is_dataset(folder: Path) -> bool:
    """Whether the folder is a LeRobot dataset."""
    return (folder / 'meta' / 'info.json').is_file()


def describe(folder: Path) -> Description:
    """Read meta/info.json. Raises DatasetError where this module cannot read the dataset."""
    path = folder / 'meta' / 'info.json'
    try:
        info = json.loads(path.read_text())
        features, version, fps = info['features'], info['codebase_version'], info['fps']
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise DatasetError(f'{path} cannot be read ({error}): give the folder of a LeRobot dataset') from error
    if not version.startswith('v3.'):
        raise DatasetError(f'{folder} is of format {version}, and v3.0 is read: convert it with '
                           '`python -m lerobot.scripts.convert_dataset_v21_to_v30`')
    images = [name for name, feature in features.items() if feature['dtype'] == 'image']
    if len(images) != 1:
        videos = [name for name, feature in features.items() if feature['dtype'] == 'video']
        found = f'videos: {", ".join(videos)}' if videos else f'pictures: {", ".join(images) or "none"}'
        raise DatasetError(f'{folder} must have one feature of dtype "image", and has {found}: record it without '
                           'videos and with one camera, or make it with `worldmodel export`')
    if ACTION not in features:
        raise DatasetError(f'{folder} has no feature {ACTION!r}')
    return Description(folder, fps, images[0], _names(features, ACTION), _names(features, STATE))


def load(folders: Sequence[Path], device: str, preset: Preset) -> Episodes:
    """
    Return the episodes of one or several datasets, pictures scaled to the preset's size.

    The action of a row is taken as what was executed from it to the next row, as LeRobot records; before the first
    one it is the state, if that has the actions' names, else zero. What only a simulator knows (the expert, contacts,
    distances) is None. Episodes too short for a clip can be in it; `Episodes.clips` never draws from them.

    Raises DatasetError for a dataset that does not fit the preset.
    """
    pieces = []
    for folder in folders:
        description = describe(folder)
        _check(description, preset)
        for frames, actions in _episodes(description, preset):
            pieces += _pieces(frames, actions)
    if not pieces:
        raise DatasetError(f'{", ".join(map(str, folders))}: there is not one frame')
    longest = max(len(frames) for frames, _ in pieces)
    all_frames = np.zeros((len(pieces), longest, *preset.image_size, 3), np.uint8)
    all_actions = np.zeros((len(pieces), longest, preset.actions), np.float32)
    for k, (frames, actions) in enumerate(pieces):
        all_frames[k, :len(frames)], all_actions[k, :len(actions)] = frames, actions
    lengths = torch.tensor([len(frames) for frames, _ in pieces])
    return Episodes(torch.from_numpy(all_frames).to(device), torch.from_numpy(all_actions).to(device),
                    lengths=lengths.to(device))


def _names(features: dict, key: str) -> tuple[str, ...]:
    names = features.get(key, {}).get('names') or ()
    return tuple(names['motors'] if isinstance(names, dict) and 'motors' in names else names)


def _check(description: Description, preset: Preset) -> None:
    folder = description.folder
    if abs(description.fps * preset.step_period - 1.0) > 1e-3:
        raise DatasetError(f'{folder} has {description.fps} frames per second, and {preset.name} takes '
                           f'{1.0 / preset.step_period:g}: export the recording again for this preset')
    if description.action_names != preset.action_names:
        raise DatasetError(f'{folder} has the actions {", ".join(description.action_names)}, and {preset.name} takes '
                           f'{", ".join(preset.action_names)} (m/s, rad/s): name and scale them so')


def _episodes(description: Description, preset: Preset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield frames (T, H, W, 3) and executed actions (T, A) of each episode, reading as it goes."""
    same = description.state_names == description.action_names
    columns = ['episode_index', description.image, ACTION, *([STATE] if same else [])]
    table = pyarrow.dataset.dataset(sorted(map(str, (description.folder / 'data').glob('*/*.parquet'))))
    current, frames, actions, first = None, [], [], None

    def complete() -> tuple[np.ndarray, np.ndarray]:
        return np.stack(frames), np.stack([first, *actions[:-1]])

    for batch in table.to_batches(columns=columns, batch_size=256):
        for row in batch.to_pylist():
            if row['episode_index'] != current:
                if frames:
                    yield complete()
                current, frames, actions = row['episode_index'], [], []
                first = np.float32(row[STATE]) if same else np.zeros(preset.actions, np.float32)
            frames.append(_picture(row[description.image]['bytes'], description.folder, preset.image_size))
            actions.append(np.float32(row[ACTION]))
    if frames:
        yield complete()


def _picture(data: bytes | None, folder: Path, size: tuple[int, int]) -> np.ndarray:
    bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if bgr is None:
        raise DatasetError(f'{folder}: a picture cannot be decoded; export it again')
    return fit(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB), size)


def _pieces(frames: np.ndarray, actions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    step = PIECE_FRAMES - CLIP_FRAMES + 1
    starts = range(0, max(1, len(frames) - CLIP_FRAMES + 1), step)
    return [(frames[s:s + PIECE_FRAMES], actions[s:s + PIECE_FRAMES]) for s in starts]

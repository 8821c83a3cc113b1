"""Reads LeRobot datasets, format v3.0 with images in the tables, as training episodes; many files at a time."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from worldmodel_ros.datasets.layout import ACTION, STATE
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from .episodes import DatasetError, Episodes
from .simulate import CONTACT, DISTANCE, EXPERT, POSE, SEARCH, VISIBLE

# Longer episodes are cut, so that one long episode does not pad all others to its length. The pieces overlap: every clip of a
# training step is whole in one of them. Pieces of long clips are longer: most of each would be in the next one, too.
PIECE_FRAMES = 240
MOST_THREADS = 16  # reading a small image holds the GIL for about a tenth of the time
# Feature of the dataset by name of the array in Episodes.
LABELS = {'expert': EXPERT, 'search': SEARCH, 'collided': CONTACT, 'goal_distance': DISTANCE, 'visible': VISIBLE,
          'poses': POSE}


@dataclass(frozen=True)
class Description:
    """What training needs from meta/info.json."""

    folder: Path
    fps: float
    image: str                        # name of the feature that holds the images
    action_names: tuple[str, ...]
    state_names: tuple[str, ...]      # () if there is no state
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names by feature, of those that begin with ``label.``

    @property
    def starts_from_state(self) -> bool:
        """Whether the state tells what was executed before the first frame."""
        return self.state_names == self.action_names


@dataclass(frozen=True)
class Piece:
    """Consecutive frames of one episode: rows of one file; ``first`` if it begins the episode."""

    description: Description
    file: Path
    row: int
    frames: int
    first: bool


def is_dataset(folder: Path) -> bool:
    """Whether the folder is a LeRobot dataset."""
    return (folder / 'meta' / 'info.json').is_file()


def describe(folder: Path) -> Description:
    """Read meta/info.json. Raises DatasetError where this module cannot read the dataset."""
    path = folder / 'meta' / 'info.json'
    try:
        info = json.loads(path.read_text())
        features, version, fps = info['features'], str(info['codebase_version']), info['fps'] + 0.0
        kinds = {name: feature['dtype'] for name, feature in features.items()}
        labels = {name: _names(features, name) for name in kinds if name.startswith('label.')}
        actions, state = _names(features, ACTION), _names(features, STATE)
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DatasetError(f'{path} cannot be read ({type(error).__name__}: {error}): give the folder of a LeRobot '
                           'dataset') from error
    if not version.startswith('v3.'):
        raise DatasetError(f'{folder} is of format {version}, and v3.0 is read: convert it with '
                           '`python -m lerobot.scripts.convert_dataset_v21_to_v30`')
    images = [name for name, kind in kinds.items() if kind == 'image']
    if len(images) != 1:
        videos = [name for name, kind in kinds.items() if kind == 'video']
        found = f'videos: {", ".join(videos)}' if videos else f'pictures: {", ".join(images) or "none"}'
        raise DatasetError(f'{folder} must have one feature of dtype "image", and has {found}: record it without '
                           'videos and with one camera, or make it with `worldmodel export`')
    if ACTION not in features:
        raise DatasetError(f'{folder} has no feature {ACTION!r}')
    return Description(folder, fps, images[0], actions, state, labels)


def load(folders: Sequence[Path], device: str, preset: Preset, clip_frames: int = 24,
         share: tuple[int, int] = (0, 1)) -> Episodes:
    """
    Return the episodes of one or several datasets, images scaled to the preset's size.

    The action of a row is the one executed from it to the next row, as LeRobot records; before the first row it is the
    state, if that has the actions' names, else zero. What only a simulator knows (the expert, contacts, distances, poses)
    is None unless every dataset has it. Episodes too short for a clip may be included; ``Episodes.clips`` never draws
    from them. ``clip_frames`` is the longest clip that will be drawn; with ``share`` = (k, n), only every n-th episode is
    read, from the k-th on.

    Raises DatasetError for a dataset that does not fit the preset.
    """
    descriptions = [describe(folder) for folder in folders]
    for description in descriptions:
        _check(description, preset)
    pieces = _pieces(descriptions, clip_frames, share)
    labelled = all(_labelled(description, preset) for description in descriptions)
    if not labelled and any(_labelled(description, preset) for description in descriptions):
        print('[data] some of the datasets have no labels: those of the others are not used, and the heads for '
              'commands and contacts stay as they are', file=sys.stderr)
    longest = max(piece.frames for piece in pieces)
    goals, actions = len(preset.goals), preset.actions
    shapes = {'frames': (np.uint8, (*preset.image_size, 3)), 'actions': (np.float32, (actions,))}
    if labelled:
        shapes |= {'expert': (np.float32, (goals, actions)), 'collided': (bool, ()),
                   'goal_distance': (np.float32, (goals,)), 'visible': (bool, (goals,)), 'poses': (np.float32, (3,))}
        if all(SEARCH in description.labels for description in descriptions):  # older datasets lack it
            shapes['search'] = (np.float32, (actions,))
    arrays = {name: np.zeros((len(pieces), longest, *shape), dtype) for name, (dtype, shape) in shapes.items()}
    by_file: dict[Path, list[int]] = {}
    for index, piece in enumerate(pieces):
        by_file.setdefault(piece.file, []).append(index)

    def fill(indices: list[int]) -> None:
        _fill([(pieces[index], {name: array[index] for name, array in arrays.items()}) for index in indices])

    _in_threads(fill, list(by_file.values()))
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    lengths = torch.tensor([piece.frames for piece in pieces])
    return Episodes(**tensors, lengths=None if (lengths == longest).all() else lengths.to(device))


def _names(features: dict, key: str) -> tuple[str, ...]:
    names = features.get(key, {}).get('names') or ()
    return tuple(names['motors'] if isinstance(names, dict) and 'motors' in names else names)


def _check(description: Description, preset: Preset) -> None:
    folder = description.folder
    if abs(description.fps * preset.step_period - 1.0) > 1e-3:
        raise DatasetError(f'{folder} has {description.fps:g} frames per second, and {preset.name} takes '
                           f'{1.0 / preset.step_period:g}: export the recording again for this preset')
    if description.action_names != preset.action_names:
        raise DatasetError(f'{folder} has the actions {", ".join(description.action_names)}, and {preset.name} takes '
                           f'{", ".join(preset.action_names)} (m/s, rad/s): name and scale them so')


def _labelled(description: Description, preset: Preset) -> bool:
    """Whether it has the labels that the heads learn from, for the preset's goals."""
    return set(LABELS.values()) - {SEARCH} <= set(description.labels) and description.labels[DISTANCE] == preset.goals


def _pieces(descriptions: Sequence[Description], clip_frames: int, share: tuple[int, int]) -> list[Piece]:
    """Cut the share's episodes into pieces; each lies in one file, as LeRobot writes them."""
    found: list[Piece] = []
    episode, longest = 0, max(PIECE_FRAMES, 2 * clip_frames)
    for description in descriptions:
        for file in sorted((description.folder / 'data').glob('*/*.parquet')):
            numbers = _table(file, ['episode_index'])['episode_index'].to_numpy()
            bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for begin, end in zip(bounds, bounds[1:]):
                if end > begin and episode % share[1] == share[0]:
                    for start in range(0, max(1, end - begin - clip_frames + 1), longest - clip_frames + 1):
                        frames = min(longest, end - begin - start)
                        found.append(Piece(description, file, begin + start, frames, start == 0))
                episode += end > begin
    if not found:
        where = ', '.join(str(description.folder) for description in descriptions)
        raise DatasetError(f'{where}: there is not one frame' if not episode else
                           f'{where}: {episode} episodes are too few for {share[1]} processes to have one each')
    return found


def _fill(work: list[tuple[Piece, dict[str, np.ndarray]]]) -> None:
    """Read one file and copy what its pieces need into their arrays. Raises DatasetError."""
    description, file = work[0][0].description, work[0][0].file
    labels = {name: LABELS[name] for name in work[0][1] if name in LABELS}
    columns = [description.image, ACTION, *([STATE] if description.starts_from_state else []), *labels.values()]
    table = _table(file, columns)
    try:
        _copy(work, table, labels)
    except DatasetError:
        raise
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise DatasetError(f'{file} does not hold what meta/info.json says ({type(error).__name__}: {error}): export it '
                           'again') from error


def _copy(work: list[tuple[Piece, dict[str, np.ndarray]]], table: pa.Table, labels: dict[str, str]) -> None:
    description = work[0][0].description
    for piece, arrays in work:
        rows = table.slice(piece.row, piece.frames)
        size = arrays['frames'].shape[1:3]
        for t, data in enumerate(_pictures(rows[description.image])):
            arrays['frames'][t] = _picture(data, description.folder, size)
        executed = _vectors(rows[ACTION]).reshape(piece.frames, arrays['actions'].shape[1])
        arrays['actions'][1:piece.frames] = executed[:-1]
        if not piece.first:
            arrays['actions'][0] = _vectors(table.slice(piece.row - 1, 1)[ACTION])[0]
        elif description.starts_from_state:
            arrays['actions'][0] = _vectors(rows[STATE].slice(0, 1))[0]
        if not np.isfinite(arrays['actions']).all():
            raise ValueError('actions are not finite')
        for name, feature in labels.items():
            arrays[name][:piece.frames] = _vectors(rows[feature]).reshape(piece.frames, *arrays[name].shape[1:])


def _table(file: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(file, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f'{file} cannot be read ({str(error).splitlines()[0][:200]}): copy or export the dataset '
                           'again') from error


def _pictures(column: pa.ChunkedArray) -> list[bytes | None]:
    return [data for chunk in column.chunks for data in chunk.field('bytes').to_pylist()]


def _vectors(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers, or of equally long lists of numbers, as (N, size)."""
    values = column.combine_chunks()
    if pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def _picture(data: bytes | None, folder: Path, size: tuple[int, int]) -> np.ndarray:
    bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if bgr is None:
        raise DatasetError(f'{folder}: an image cannot be decoded; export it again')
    return fit(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB), size)


def _in_threads(work: Callable, items: list) -> None:
    """Run in threads, which helps until the GIL is the bottleneck: decoding releases it. Raise the first error."""
    with ThreadPoolExecutor(min(len(items), MOST_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(work, items):
            pass

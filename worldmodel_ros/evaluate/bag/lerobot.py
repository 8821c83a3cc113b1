"""
Writes a LeRobot dataset, format v3.0: tables of frames in Parquet, pictures as PNG in them, and their statistics.

The layout and the names are those of huggingface/lerobot (src/lerobot/datasets, `CODEBASE_VERSION = 'v3.0'`), so
that its `LeRobotDataset(..., root=folder)` opens what is written here.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .lerobot_statistics import Statistics

CAMERA, STATE, ACTION = 'observation.images.front', 'observation.state', 'action'
_FILE_MB, _VIDEO_MB, _FILES_PER_CHUNK = 100, 200, 1000  # LeRobot's own defaults
_ROWS = 256  # frames that wait in memory to be written
_FILE = 'chunk-{chunk_index:03d}/file-{file_index:03d}.parquet'
_COUNTERS = {'timestamp': 'float32', 'frame_index': 'int64', 'episode_index': 'int64', 'index': 'int64',
             'task_index': 'int64'}


class DatasetWriter:
    """
    A dataset that is being written, episode after episode: `add` frames, then `end_episode`, at last `close`.

    Only `close` writes meta/info.json, without which nothing takes the folder for a dataset.
    """

    def __init__(self, folder: Path, fps: int, image_size: tuple[int, int], action_names: Sequence[str]) -> None:
        """
        :param folder: made; raises FileExistsError if there is anything in it.
        :param fps: frames per second.
        :param image_size: height and width in pixels.
        :param action_names: names of the numbers in an action, which are those of the state too.
        """
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f'{folder} is not empty: an export never overwrites, name a new folder')
        (folder / 'meta').mkdir(parents=True, exist_ok=True)
        self._folder, self._fps, self._names = folder, fps, list(action_names)
        vector = {'dtype': 'float32', 'shape': [len(self._names)], 'names': self._names}
        self._features = {
            CAMERA: {'dtype': 'image', 'shape': [*image_size, 3], 'names': ['height', 'width', 'channels']},
            STATE: vector, ACTION: vector,
            **{name: {'dtype': kind, 'shape': [1], 'names': None} for name, kind in _COUNTERS.items()}}
        self._schema = _schema(self._features)
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._frames = 0
        self._file_number, self._table = -1, None
        self._begin_episode()
        self._all = Statistics(CAMERA)

    @property
    def frames(self) -> int:
        """Frames in all episodes that have ended."""
        return self._frames

    @property
    def episodes(self) -> int:
        """Episodes that have ended."""
        return len(self._episodes)

    def add(self, image: np.ndarray, state: np.ndarray, action: np.ndarray, task: str) -> None:
        """
        Add the next frame of the episode: `image` uint8 (H, W, 3) RGB, `state` and `action` float32 (A,).

        `action` is what was executed from this frame to the next, `task` what it was for.
        """
        number, task_index = self._length, self._tasks.setdefault(task, len(self._tasks))
        values = {STATE: state, ACTION: action, 'timestamp': number / self._fps, 'frame_index': number,
                  'episode_index': len(self._episodes), 'index': self._frames + number, 'task_index': task_index}
        self._statistics.add(image, values)
        _, png = cv2.imencode('.png', cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        self._rows.append({CAMERA: {'bytes': png.tobytes(), 'path': f'frame-{number:06d}.png'}, **values})
        self._used_tasks.setdefault(task)
        self._length += 1
        if len(self._rows) >= _ROWS:
            self._flush()

    def end_episode(self) -> None:
        """Complete the episode; without a frame in it, nothing happens."""
        if not self._length:
            return
        self._flush()
        chunk, file = divmod(self._file_number, _FILES_PER_CHUNK)
        self._episodes.append({
            'episode_index': len(self._episodes), 'tasks': list(self._used_tasks), 'length': self._length,
            'data/chunk_index': chunk, 'data/file_index': file,
            'dataset_from_index': self._frames, 'dataset_to_index': self._frames + self._length,
            **{f'stats/{feature}/{name}': value for feature, values in self._statistics.values().items()
               for name, value in values.items()},
            'meta/episodes/chunk_index': 0, 'meta/episodes/file_index': 0})
        self._frames += self._length
        self._all.merge(self._statistics)
        self._begin_episode()

    def close(self) -> None:
        """Complete the dataset. Raises ValueError if there is no episode in it."""
        self.end_episode()
        if not self._episodes:
            raise ValueError(f'{self._folder}: there is not one frame to write')
        self._table.close()
        episodes = self._folder / 'meta' / 'episodes' / _FILE.format(chunk_index=0, file_index=0)
        episodes.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._episodes), episodes)
        pq.write_table(_tasks_table(self._tasks), self._folder / 'meta' / 'tasks.parquet')
        self._write_json('stats', self._all.values())
        self._write_json('info', {
            'codebase_version': 'v3.0', 'fps': self._fps, 'features': self._features,
            'total_episodes': len(self._episodes), 'total_frames': self._frames, 'total_tasks': len(self._tasks),
            'chunks_size': _FILES_PER_CHUNK, 'data_files_size_in_mb': _FILE_MB, 'video_files_size_in_mb': _VIDEO_MB,
            'data_path': f'data/{_FILE}', 'video_path': None, 'robot_type': None,
            'splits': {'train': f'0:{len(self._episodes)}'}})

    def _begin_episode(self) -> None:
        self._length = 0
        self._rows: list[dict[str, Any]] = []
        self._used_tasks: dict[str, None] = {}
        self._statistics = Statistics(CAMERA)

    def _flush(self) -> None:
        if not self._rows:
            return
        first_of_episode = self._length <= _ROWS
        if self._table is None or (first_of_episode and self._sink.tell() >= _FILE_MB * 2 ** 20):
            self._next_file()
        self._table.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows = []

    def _next_file(self) -> None:
        """An episode lies in one file, so that one is begun between episodes only."""
        if self._table is not None:
            self._table.close()
        self._file_number += 1
        chunk, file = divmod(self._file_number, _FILES_PER_CHUNK)
        path = self._folder / 'data' / _FILE.format(chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = path.open('wb')
        self._table = pq.ParquetWriter(self._sink, self._schema, compression='snappy')

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        (self._folder / 'meta' / f'{name}.json').write_text(json.dumps(content, indent=4) + '\n')


def _schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    """Return the columns of the tables of frames, with the note by which `datasets` knows what they hold."""
    fields, notes = [], {}
    for name, feature in features.items():
        if feature['dtype'] == 'image':
            kind, note = pa.struct([('bytes', pa.binary()), ('path', pa.string())]), {'_type': 'Image'}
        else:
            kind, note = pa.type_for_alias(feature['dtype']), {'dtype': feature['dtype'], '_type': 'Value'}
            if feature['shape'] != [1]:
                size = feature['shape'][0]
                kind, note = pa.list_(kind, size), {'feature': note, 'length': size, '_type': 'Sequence'}
        fields.append(pa.field(name, kind))
        notes[name] = note
    return pa.schema(fields, {'huggingface': json.dumps({'info': {'features': notes}})})


def _tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """Return the table of tasks as pandas writes it: LeRobot reads the names from the index of the frame."""
    def column(name: str, kind: str, numpy: str) -> dict[str, Any]:
        return {'name': name, 'field_name': name, 'pandas_type': kind, 'numpy_type': numpy, 'metadata': None}

    note = {'index_columns': ['task'], 'column_indexes': [], 'pandas_version': '2.0.0',
            'columns': [column('task_index', 'int64', 'int64'), column('task', 'unicode', 'object')]}
    table = pa.table({'task_index': pa.array(tasks.values(), pa.int64()), 'task': pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({'pandas': json.dumps(note)})

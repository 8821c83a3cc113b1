"""
Names, columns and tables of a LeRobot dataset, format v3.0, with images as PNG in its tables.

Layout and names are those of huggingface/lerobot (src/lerobot/datasets, ``CODEBASE_VERSION = 'v3.0'``), so that its
``LeRobotDataset(..., root=folder)`` opens datasets written here.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

CAMERA, STATE, ACTION = 'observation.images.front', 'observation.state', 'action'
VERSION = 'v3.0'
FILE_MB, VIDEO_MB, FILES_PER_CHUNK = 100, 200, 1000  # LeRobot's own defaults
FILE = 'chunk-{chunk_index:03d}/file-{file_index:03d}.parquet'
_COUNTERS = {'timestamp': 'float32', 'frame_index': 'int64', 'episode_index': 'int64', 'index': 'int64',
             'task_index': 'int64'}


@dataclass(frozen=True)
class Layout:
    """
    The features of a dataset's frames.

    ``labels`` are features in addition to image, state and action, as in meta/info.json: ``{'dtype', 'shape', 'names'}`` by
    name. State and action have the same named components. ``image_size`` is (height, width).
    """

    fps: int
    image_size: tuple[int, int]
    action_names: Sequence[str]
    labels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """All features, as in meta/info.json, in the order of the tables' columns."""
        vector = {'dtype': 'float32', 'shape': [len(self.action_names)], 'names': list(self.action_names)}
        return {
            CAMERA: {'dtype': 'image', 'shape': [*self.image_size, 3], 'names': ['height', 'width', 'channels']},
            STATE: vector, ACTION: vector, **{name: dict(label) for name, label in self.labels.items()},
            **{name: {'dtype': kind, 'shape': [1], 'names': None} for name, kind in _COUNTERS.items()}}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the frame tables, with the metadata that tells Hugging Face ``datasets`` their features."""
        fields, notes = [], {}
        for name, feature in self.features.items():
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


def tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """Return the table of tasks as pandas writes it: LeRobot reads the names from the index of the DataFrame."""
    def column(name: str, kind: str, numpy: str) -> dict[str, Any]:
        return {'name': name, 'field_name': name, 'pandas_type': kind, 'numpy_type': numpy, 'metadata': None}

    note = {'index_columns': ['task'], 'column_indexes': [], 'pandas_version': '2.0.0',
            'columns': [column('task_index', 'int64', 'int64'), column('task', 'unicode', 'object')]}
    table = pa.table({'task_index': pa.array(tasks.values(), pa.int64()), 'task': pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({'pandas': json.dumps(note)})


def place(file_number: int) -> dict[str, int]:
    """Return the location of the n-th table file: its chunk, and its number in the chunk."""
    chunk, file = divmod(file_number, FILES_PER_CHUNK)
    return {'chunk_index': chunk, 'file_index': file}

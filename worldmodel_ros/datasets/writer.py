"""Writes a LeRobot dataset: file by file, or the metadata of files that several processes have written."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .layout import CAMERA, FILE, FILE_MB, FILES_PER_CHUNK, VERSION, VIDEO_MB, Layout, place, tasks_table
from .shard import Shard, ShardWriter
from .statistics import Statistics


def new_folder(folder: Path) -> None:
    """Create the folder of a dataset. Raises FileExistsError if it is not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f'{folder} is not empty: an export never overwrites files, name a new folder')
    folder.mkdir(parents=True, exist_ok=True)


def describe(folder: Path, layout: Layout, shards: Sequence[Shard], tasks: Mapping[str, int],
             more: Mapping[str, Any] | None = None) -> None:
    """
    Write meta/ for the files of a dataset, in order; ``more`` is added to meta/info.json.

    meta/info.json is written last: without it the folder is not a dataset.
    """
    path = folder / 'meta' / 'episodes' / FILE.format(**place(0))
    path.parent.mkdir(parents=True)
    rows = [row for shard in shards for row in shard.episodes]
    pq.write_table(pa.Table.from_pylist(rows), path)
    pq.write_table(tasks_table(tasks), folder / 'meta' / 'tasks.parquet')
    statistics = Statistics(CAMERA)
    for shard in shards:
        statistics.merge(shard.statistics)
    _write_json(folder, 'stats', statistics.values())
    _write_json(folder, 'info', {
        'codebase_version': VERSION, 'fps': layout.fps, 'features': layout.features,
        'total_episodes': len(rows), 'total_frames': sum(shard.frames for shard in shards),
        'total_tasks': len(tasks), 'chunks_size': FILES_PER_CHUNK, 'data_files_size_in_mb': FILE_MB,
        'video_files_size_in_mb': VIDEO_MB, 'data_path': f'data/{FILE}', 'video_path': None, 'robot_type': None,
        'splits': {'train': f'0:{len(rows)}'}, **(more or {})})


class DatasetWriter:
    """
    Writes a dataset episode by episode: ``add`` frames, then ``end_episode``, finally ``close``.

    Only ``close`` makes the folder a dataset.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Create ``folder``. Raises FileExistsError if it is not empty."""
        new_folder(folder)
        self._folder, self._layout = folder, layout
        self._tasks: dict[str, int] = {}
        self._shards: list[Shard] = []
        self._current: ShardWriter | None = None
        self._inside = False  # an episode; episodes are not split, so a new file begins only between them

    @property
    def frames(self) -> int:
        """Number of frames in completed episodes."""
        return sum(s.frames for s in self._shards) + (self._current.frames if self._current else 0)

    @property
    def episodes(self) -> int:
        """Number of completed episodes."""
        return sum(len(s.episodes) for s in self._shards) + (self._current.episodes if self._current else 0)

    def add(self, image: np.ndarray, state: np.ndarray, action: np.ndarray, task: str,
            labels: Mapping[str, Any] | None = None) -> None:
        """Add the next frame of the episode; see ``ShardWriter.add``."""
        if not self._inside:
            self._begin_episode()
        self._current.add(image, state, action, task, labels or {})

    def end_episode(self) -> None:
        """Complete the episode; no-op if it has no frames."""
        if self._inside:
            self._current.end_episode()
            self._inside = False

    def close(self) -> None:
        """Complete the dataset. Raises ValueError if it has no episodes."""
        self.end_episode()
        if self._current is None:
            raise ValueError(f'{self._folder}: there is not one frame to write')
        self._end_file()
        describe(self._folder, self._layout, self._shards, self._tasks)

    def _begin_episode(self) -> None:
        if self._current is not None and self._current.bytes >= FILE_MB * 2 ** 20:
            self._end_file()
        if self._current is None:
            self._current = ShardWriter(
                self._folder, self._layout, self._tasks, len(self._shards),
                first_episode=sum(len(s.episodes) for s in self._shards),
                first_frame=sum(s.frames for s in self._shards))
        self._inside = True

    def _end_file(self) -> None:
        self._shards.append(self._current.close())
        self._current = None


def _write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    (folder / 'meta' / f'{name}.json').write_text(json.dumps(content, indent=4) + '\n')

"""Writes one table file of a LeRobot dataset, independently of the others, so that several processes can write in parallel."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .layout import ACTION, CAMERA, FILE, STATE, Layout, place
from .statistics import Statistics

ROWS = 256  # frames buffered in memory
# zlib's fastest level: a higher one takes twice the time to save 2 % of the bytes.
_PNG = (cv2.IMWRITE_PNG_COMPRESSION, 1)


@dataclass(frozen=True)
class Shard:
    """What the dataset's metadata needs from one finished file: rows of meta/episodes, and statistics."""

    episodes: list[dict[str, Any]]
    frames: int
    statistics: Statistics


class ShardWriter:
    """
    Writes file ``number``, whose first frame is frame ``first_frame`` of the dataset, in episode ``first_episode``.

    ``add`` frames, then ``end_episode``, finally ``close``. ``tasks`` maps the dataset's tasks to indices; new ones are added.
    """

    def __init__(self, folder: Path, layout: Layout, tasks: dict[str, int], number: int = 0, first_episode: int = 0,
                 first_frame: int = 0) -> None:
        self._layout, self._tasks, self._place = layout, tasks, place(number)
        self._first_episode, self._first_frame, self._frames = first_episode, first_frame, 0
        self._schema = layout.schema
        path = folder / 'data' / FILE.format(**self._place)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = path.open('wb')
        self._table = pq.ParquetWriter(self._sink, self._schema, compression='snappy')
        self._episodes: list[dict[str, Any]] = []
        self._all = Statistics(CAMERA)
        self._begin_episode()

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._sink.tell()

    @property
    def frames(self) -> int:
        """Number of frames in completed episodes."""
        return self._frames

    @property
    def episodes(self) -> int:
        """Number of completed episodes."""
        return len(self._episodes)

    def add(self, image: np.ndarray, state: np.ndarray, action: np.ndarray, task: str,
            labels: Mapping[str, Any]) -> None:
        """
        Add the next frame of the episode: ``image`` uint8 (H, W, 3) RGB, ``state`` and ``action`` float32 (A,).

        ``action`` is what was executed from this frame to the next, ``task`` its purpose; ``labels`` has a value for each
        label of the layout.
        """
        number, task_index = self._length, self._tasks.setdefault(task, len(self._tasks))
        values = {STATE: state, ACTION: action, **labels, 'timestamp': number / self._layout.fps,
                  'frame_index': number, 'episode_index': self._first_episode + len(self._episodes),
                  'index': self._first_frame + self._frames + number, 'task_index': task_index}
        self._statistics.add(image, values)
        _, png = cv2.imencode('.png', cv2.cvtColor(image, cv2.COLOR_RGB2BGR), _PNG)
        self._rows.append({CAMERA: {'bytes': png.tobytes(), 'path': f'frame-{number:06d}.png'}, **values})
        self._used_tasks.setdefault(task)
        self._length += 1
        if len(self._rows) >= ROWS:
            self._flush()

    def end_episode(self) -> None:
        """Complete the episode; no-op if it has no frames."""
        if not self._length:
            return
        self._flush()
        first = self._first_frame + self._frames
        self._episodes.append({
            'episode_index': self._first_episode + len(self._episodes), 'tasks': list(self._used_tasks),
            'length': self._length, **{f'data/{key}': value for key, value in self._place.items()},
            'dataset_from_index': first, 'dataset_to_index': first + self._length,
            **{f'stats/{feature}/{name}': value for feature, values in self._statistics.values().items()
               for name, value in values.items()},
            'meta/episodes/chunk_index': 0, 'meta/episodes/file_index': 0})
        self._frames += self._length
        self._all.merge(self._statistics)
        self._begin_episode()

    def close(self) -> Shard:
        """Complete the file."""
        self.end_episode()
        self._table.close()
        self._sink.close()
        return Shard(self._episodes, self._frames, self._all)

    def _begin_episode(self) -> None:
        self._length = 0
        self._rows: list[dict[str, Any]] = []
        self._used_tasks: dict[str, None] = {}
        self._statistics = Statistics(CAMERA)

    def _flush(self) -> None:
        if self._rows:
            self._table.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows = []

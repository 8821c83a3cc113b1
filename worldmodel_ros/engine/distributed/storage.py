"""The pages of several processes, each of which holds those of its own heads, as one storage."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worldmodel_ros.cache.pool import Storage
from worldmodel_ros.cache.torch_storage import TorchStorage
from worldmodel_ros.model.parallel.group import Group
from .orders import ChangePages, StorageNumber
from .supervisor import Supervisor

HEADS = 2  # axis of what ``dump`` gives


class HeadsOfPages(TorchStorage):
    """Own heads of all pages. What is dumped and loaded has all heads: every process takes part in these."""

    group: Group

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.on_host = False  # every process takes part

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
            heads = HEADS - 1  # of a page
            return *shape[:heads], shape[heads] * self.group.count, *shape[heads + 1:]
        return {name: (whole(shape), dtype) for name, (shape, dtype) in super().forms().items()}

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        own = {name: torch.from_numpy(array).to(self.device) for name, array in super().dump(ids).items()}
        return {name: self.group.gather(array, HEADS).contiguous().cpu().numpy() for name, array in own.items()}

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        rank, count = self.group.rank, self.group.count
        super().load(ids, {name: np.ascontiguousarray(np.split(array, count, HEADS)[rank])
                           for name, array in arrays.items()})


class LedPages(HeadsOfPages):
    """Rank 0's: the others do with their pages what is done with these, but for what passes of the network write,
    where they take part anyway."""

    number: int
    supervisor: Supervisor

    def clear(self, ids: np.ndarray) -> None:
        self._others('clear', ids)
        super().clear(ids)

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        self._others('copy', ids, StorageNumber(source.number), source_ids)
        super().copy(ids, source, source_ids)

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        self.copy(ids, source, source_ids)
        return lambda: None

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        self._others('dump', ids)
        with self.supervisor.awaited():
            arrays = super().dump(ids)
        self.supervisor.require()
        return arrays

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self._others('load', ids, arrays)
        super().load(ids, arrays)

    def _others(self, method: str, *arguments: Any) -> None:
        self.supervisor.tell(ChangePages(self.number, method, arguments))

"""One storage on rank 0 for the pages of several processes, each of which holds those of its own heads."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from worldmodel_ros.cache.pool import Storage
from worldmodel_ros.model.parallel.pages import HeadsOfPages
from .orders import ChangePages, StorageNumber
from .supervisor import Supervisor


class LedPages(HeadsOfPages):
    """Rank 0's pages: the other processes repeat every change to them on theirs, except what passes of the network write, in
    which they take part anyway."""

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

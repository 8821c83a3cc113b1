"""Pages of which each process holds its own heads."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...cache.pool import LAYERS
from ...cache.torch_storage import TorchStorage
from .group import Group

HEADS = 2  # axis of what ``dump`` returns


class HeadsOfPages(TorchStorage):
    """Own heads of all pages. Dumps and loads have all heads, so every process takes part in them."""

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

    def staged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays  # each process takes its part, of which the others get a copy

    def load_later(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]]) -> Callable[[], Callable[[], None]]:
        self.load(ids, groups[0] if len(groups) == 1 else {
            name: np.concatenate([arrays[name] for arrays in groups], LAYERS) for name in groups[0]})
        return lambda: lambda: None

"""The bytes of pages: what a pool's storage must do, and the float32 storage of a CPU."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .layout import TileLayout


class Storage(Protocol):
    """Keys and values of pages, one page id for all layers. Which ids are in use is the allocator's business.

    Keys and values that go in are (layers, heads, n, head_dim) for n tokens. Whole pages that come out are float32
    (n, layers, heads, page_tokens, head_dim).
    """

    pages: int
    page_bytes: int  # of one page: keys and values of all layers
    on_host: bool  # whether any thread may `dump` and `load` pages that are not being written; else only the engine's

    def write(self, ids: np.ndarray, places: np.ndarray, k: Any, v: Any) -> None:
        """Writes n tokens of one slab, whose pages are ``ids`` (tiles,), at ``places`` (n,) of its `token_index`."""

    def clear(self, ids: np.ndarray) -> None:
        """Makes pages zero, so that what is left unwritten in them is finite."""

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        """Copies whole pages from this or another storage; exactly, where both hold numbers in the same way."""

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        """Starts to `copy` concurrently with the device's computation; the result makes what is computed next wait for it."""

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of whole pages, as numbers."""

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The bytes of whole pages as arrays of n pages each, which a file can hold."""

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of one page in each array of `dump`, by its name; from any thread."""

    def finite(self, name: str, array: np.ndarray) -> bool:
        """Whether the numbers in an array of `dump` are finite; from any thread."""

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Writes back what `dump` gave."""


class NumpyStorage:
    """Pages in float32, each contiguous over all layers and heads, which makes writing one a plain copy.

    One page more than ``pages`` is there, of zeros: `null_page` stands wherever a graph of fixed shape wants a page and
    the session has none. All of the memory is committed at once: the system gives it out in parts of 2 MiB, and makes
    them zero, which takes a tick that is the first to write there milliseconds.
    """

    on_host = True

    def __init__(self, layout: TileLayout, layers: int, heads: int, head_dim: int, pages: int):
        self.pages, self.null_page = pages, pages
        shape = (pages + 1, layers, heads, layout.page_tokens, head_dim)
        self.k, self.v = np.full(shape, 0.0, np.float32), np.full(shape, 0.0, np.float32)
        self.page_bytes = self.k[0].nbytes + self.v[0].nbytes

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values, (rows, page_tokens, head_dim) each, one row for each page, layer and head; views."""
        return self.k.reshape(-1, *self.k.shape[3:]), self.v.reshape(-1, *self.v.shape[3:])

    def row_index(self, ids: np.ndarray) -> np.ndarray:
        """Rows of pages, int64 (layers, heads, n)."""
        layers, heads = self.k.shape[1:3]
        return ids * (layers * heads) + np.arange(layers * heads).reshape(layers, heads, 1)

    def write(self, ids: np.ndarray, places: np.ndarray, k: Any, v: Any) -> None:
        tile, offset = np.divmod(places, self.k.shape[3])
        for pool, values in ((self.k, k), (self.v, v)):
            pool[ids[tile], :, :, offset] = np.asarray(values).transpose(2, 0, 1, 3)

    def clear(self, ids: np.ndarray) -> None:
        self.k[ids] = 0.0
        self.v[ids] = 0.0

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        self.k[ids], self.v[ids] = source.read(source_ids)

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        self.copy(ids, source, source_ids)
        return lambda: None

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.k[ids], self.v[ids]

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {'k': self.k[ids], 'v': self.v[ids]}

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return dict.fromkeys('kv', (self.k.shape[1:], self.k.dtype))

    def finite(self, name: str, array: np.ndarray) -> bool:
        return bool(np.isfinite(array).all())

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.k[ids], self.v[ids] = arrays['k'], arrays['v']

"""Converts a sequence to arrays for a file, and back; in pieces, so that ticks can run in between."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .pool import OutOfPages
from .sequence import OBSERVED, PAGES, SLAB, TIER, VALID, pages_of

if TYPE_CHECKING:
    from .layout import TileLayout
    from .pool import PagePool
    from .sequence import SequenceCache

PIECE = 2**20  # approximate bytes of pages that are copied at a time, in less than a millisecond


def save(cache: SequenceCache) -> dict[str, np.ndarray]:
    """Return ``slabs`` int64 (n, 4), the table without its pages, and the content of the pages of each pool, by its name."""
    copy = Copy(cache)
    for _ in copy.pieces():
        pass
    return copy.arrays


def restore(cache: SequenceCache, arrays: dict[str, np.ndarray]) -> None:
    """Replace a sequence's content by what ``save`` returned; pages get new ids.

    Raises ValueError, and changes nothing, for arrays that do not fit; OutOfPages for a branch whose pool is full,
    which leaves it empty.
    """
    check(cache, arrays, [cache.lease(tier).guaranteed // cache.layout.tiles for tier in range(len(cache.pools))])
    cache.clear()
    for _ in fill(cache, arrays):
        pass


class Copy:
    """Copies the content of a sequence incrementally into ``arrays`` (see ``save``).

    Made from a fork, whose pages are no longer written; it may be used in another thread than the sequence if its
    storages are ``on_host``.
    """

    def __init__(self, cache: SequenceCache):
        self._cache, table = cache, cache.table
        self.on_host = all(pool.storage.on_host for pool in cache.pools)
        self.arrays = {'slabs': table.rows[:, :PAGES].copy()}
        self._parts = [(pool, ids) for tier, pool in enumerate(cache.pools) if len(ids := pages_of(table, tier))]

    @property
    def nbytes(self) -> int:
        """Bytes of the complete arrays."""
        return self.arrays['slabs'].nbytes + sum(
            len(ids) * _page_bytes(pool) for pool, ids in self._parts)

    def pieces(self) -> Iterator[None]:
        """Copy about PIECE bytes per ``next``; raise OutOfPages if a branch has lost its pages."""
        for pool, ids in self._parts:
            whole = {f'{pool.name}.{name}': np.empty((len(ids), *shape), dtype)
                     for name, (shape, dtype) in pool.storage.forms().items()}
            for first, last in _runs(pool, len(ids)):
                part = pool.storage.dump(ids[first:last])
                self._cache.require_pages()  # else another sequence may have written to the pages meanwhile
                for name, array in part.items():
                    whole[f'{pool.name}.{name}'][first:last] = array
                yield
            self.arrays |= whole


def forms(pools: tuple[PagePool, ...], counts: list[int]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and type of the arrays of ``save``, except ``slabs``, with ``counts`` pages of each pool."""
    return {f'{pool.name}.{name}': ((count, *shape), dtype) for pool, count in zip(pools, counts) if count
            for name, (shape, dtype) in pool.storage.forms().items()}


class Shape(Protocol):
    """Properties shared by all sequences of the same pools."""

    layout: TileLayout
    pools: tuple[PagePool, ...]


def check(shape: Shape, arrays: dict[str, np.ndarray], rooms: list[int]) -> None:
    """Raise ValueError for arrays that a sequence of this shape cannot hold: of other shapes or types, or of more than
    ``rooms`` slabs of each pool (0: any number)."""
    slabs = check_slabs(shape, arrays.get('slabs'), rooms)
    counts = [int((slabs[:, TIER] == tier).sum()) * shape.layout.tiles for tier in range(len(shape.pools))]
    expected = forms(shape.pools, counts)
    found = {name: (array.shape, array.dtype) for name, array in arrays.items() if name != 'slabs'}
    if found != expected:
        raise ValueError(f'pages are {found} and should be {expected}')


def require_finite(pools: tuple[PagePool, ...], arrays: dict[str, np.ndarray]) -> None:
    """Raise ValueError if pages in arrays that passed ``check`` contain numbers that are not finite."""
    for pool in pools:
        for name in pool.storage.forms():
            array = arrays.get(f'{pool.name}.{name}', ())
            if not all(pool.storage.finite(name, array[first:last]) for first, last in _runs(pool, len(array))):
                raise ValueError(f'{pool.name}.{name} has numbers that are not finite')


def fill(cache: SequenceCache, arrays: dict[str, np.ndarray]) -> Iterator[None]:
    """Write arrays that passed ``check`` into an empty sequence, about PIECE bytes per ``next``. Raises OutOfPages, which
    leaves it empty."""
    table = cache.table
    try:
        for slab in arrays['slabs']:
            table = table.put(np.concatenate([slab, cache.lease(slab[TIER]).allocate(cache.layout.tiles)]))
            cache.replace(table)
    except OutOfPages:
        cache.clear()
        raise
    for tier, pool in enumerate(cache.pools):
        ids = pages_of(table, tier)
        for first, last in _runs(pool, len(ids)):
            pool.storage.load(ids[first:last], {
                name: arrays[f'{pool.name}.{name}'][first:last] for name in pool.storage.forms()})
            yield


def check_slabs(shape: Shape, slabs: np.ndarray | None, rooms: list[int]) -> np.ndarray:
    """Return the table of a sequence without its pages; raise ValueError if it is invalid, or has more than ``rooms`` slabs of
    a pool (0: any number)."""
    if slabs is None or slabs.ndim != 2 or slabs.shape[1] != PAGES or slabs.dtype != np.int64:
        raise ValueError('the table of slabs is missing, or not int64 (n, 4)')
    number, valid, observed, tier = (slabs[:, column] for column in (SLAB, VALID, OBSERVED, TIER))
    bounds = (0 <= number) & (0 <= observed) & (observed <= valid) & (1 <= valid) & (valid <= shape.layout.frames) \
        & (0 <= tier) & (tier < len(shape.pools))
    if not bounds.all() or (number[1:] <= number[:-1]).any():  # compared, as a difference might overflow int64
        raise ValueError('the table of slabs is damaged')
    for index, room in enumerate(rooms):
        if room and (tier == index).sum() > room:
            raise ValueError(f'{int((tier == index).sum())} slabs do not fit a session of {room}')
    return slabs


def _runs(pool: PagePool, count: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of ``count`` pages begin and end."""
    step = max(1, PIECE // _page_bytes(pool))
    return ((first, min(first + step, count)) for first in range(0, count, step))


def _page_bytes(pool: PagePool) -> int:
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in pool.storage.forms().values())

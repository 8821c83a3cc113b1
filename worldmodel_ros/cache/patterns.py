"""Attention patterns: the tiles that a query tile attends to, as lists of pages for the kernels."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .layout import TileLayout
from .sequence import Table


@dataclass(frozen=True)
class Pattern:
    """A neighbourhood of whole tiles around the query's own: ``slabs`` in time and ``plane`` (rows, columns of tiles)
    in space, each centred on it; None is unbounded.

    At a border the neighbourhood is cut off or, with ``shifted``, moved inside so that it keeps its size (neighbourhood
    attention, Hassani et al. 2023; with tiles: sliding tile attention, Zhang et al. 2025).
    """

    slabs: int | None
    plane: tuple[int, int] | None
    shifted: bool = False

    def __post_init__(self):
        if min(self.slabs or 1, *(self.plane or (1, 1))) < 1:
            raise ValueError(f'a neighbourhood has at least one tile along each axis, not {self}')


SPATIAL = Pattern(1, None)        # all tiles of its slab
TEMPORAL = Pattern(None, (1, 1))  # the same tile of all slabs
EVERYTHING = Pattern(None, None)


def window(size: tuple[int, int, int], shifted: bool = False) -> Pattern:
    """Return the neighbourhood of ``size`` (slabs, rows of tiles, columns of tiles)."""
    return Pattern(size[0], size[1:], shifted)


@dataclass(frozen=True)
class PageLists:
    """The pages of one pool that each query tile visits, as compressed sparse rows; arrays are int32.

    Query tile i visits ``pages[starts[i]:starts[i + 1]]``, of which the first ``full[i]`` are full; ``lengths`` are the
    valid tokens of each page.
    """

    starts: np.ndarray
    pages: np.ndarray
    lengths: np.ndarray
    full: np.ndarray


@lru_cache(maxsize=256)
def page_lists(table: Table, layout: TileLayout, slabs: tuple[int, ...], pattern: Pattern, sinks: int = 0
               ) -> dict[int, PageLists]:
    """Return, by tier, the lists of all tiles of the query ``slabs``, slab by slab in Z-order, over the table's slabs.

    The first ``sinks`` slabs are visited at the pattern's places whatever their age. A tile without pages has an empty
    list. Results are cached by table, as tables are immutable.
    """
    # Repeat and tile before combining: broadcasting over four short axes takes three times as long.
    in_time = _slabs(table, slabs, pattern, sinks).repeat(layout.tiles, 0).repeat(layout.tiles, 1)
    visited = in_time & np.tile(_tiles(layout, pattern), (len(slabs), len(table)))
    lengths = (layout.tokens_per_frame * table.valid[:, None]).ravel()
    pages, tiers = table.pages.ravel(), table.tiers.repeat(layout.tiles)
    if len(table) and (tiers == tiers[0]).all():
        return {int(tiers[0]): _lists(visited, pages, lengths, layout.page_tokens)}
    return {tier: _lists(visited[:, of], pages[of], lengths[of], layout.page_tokens)
            for tier in np.unique(tiers).tolist() for of in [tiers == tier]}


def _slabs(table: Table, slabs: tuple[int, ...], pattern: Pattern, sinks: int) -> np.ndarray:
    """Return which slabs of the table each query slab visits, bool (query slabs, slabs)."""
    if pattern.slabs is None:
        return np.ones((len(slabs), len(table)), bool)
    near = table.slabs[min(sinks, max(0, len(table) - 1)):]
    inside = (near[0], near[-1]) if pattern.shifted and len(near) else None
    visited = _around(np.array(slabs), table.slabs, pattern.slabs, inside)
    visited[:, :sinks] = True
    return visited


@lru_cache(maxsize=64)
def _tiles(layout: TileLayout, pattern: Pattern) -> np.ndarray:
    """Return which tiles of a plane each tile visits, bool (tiles, tiles)."""
    visited = np.ones((layout.tiles, layout.tiles), bool)
    for axis in (0, 1) if pattern.plane else ():
        place, inside = layout.positions[:, axis], (0, layout.plane[axis] - 1)
        visited &= _around(place, place, pattern.plane[axis], inside if pattern.shifted else None)
    return visited


def _around(own: np.ndarray, others: np.ndarray, size: int, inside: tuple[int, int] | None) -> np.ndarray:
    """Return which of ``others`` are in a neighbourhood of ``size`` around each of ``own``, moved ``inside`` (first, last)."""
    low = own - size // 2
    if inside:
        low = np.maximum(np.minimum(low, inside[1] - size + 1), inside[0])
    return (others >= low[:, None]) & (others < low[:, None] + size)


def _lists(visited: np.ndarray, pages: np.ndarray, lengths: np.ndarray, capacity: int) -> PageLists:
    """Return ``visited``, bool (query tiles, n) of the n ``pages``, as lists, full pages first."""
    whole = lengths == capacity
    query, page, full = _entries(visited if whole.all() else visited & whole)
    if whole.all():
        counts = full
    else:
        also, partial, count = _entries(visited & ~whole)
        query, page, counts = np.concatenate([query, also]), np.concatenate([page, partial]), full + count
        page = page[np.argsort(query, kind='stable')]
    starts = np.concatenate([[0], np.cumsum(counts)])
    return PageLists(*(array.astype(np.int32) for array in (starts, pages[page], lengths[page], full)))


def _entries(visited: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row and column of each true entry, row by row, and their count in each row."""
    # Flat, as numpy finds true entries along one axis ten times as fast as along two.
    row, column = np.divmod(np.flatnonzero(visited), max(1, visited.shape[1]))
    return row, column, np.bincount(row, minlength=len(visited))

"""What a pass of a model with tiles sees of a session: lists of pages for every query tile.

A query tile attends to whole pages, and its position in time is that of its slab. A chunk to be denoised counts as whole
slabs that follow the newest one, whether that is complete or not, and its keys are in scratch pages. A committed frame is
in its own slab and sees that slab and those before it: frames that are committed together see each other within a slab.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..cache.layout import TileLayout
from ..cache.patterns import PageLists, Pattern, page_lists
from ..cache.pool import Storage
from ..cache.sequence import Table
from ..model.presets import VideoPreset


@dataclass(frozen=True)
class PassPages:
    """Pages of one pass. tier: of its own pages; own: int32 (groups * tiles,), whose first ``offset`` frames are there
    already; lists, by pattern and tier, for the tiles of each group in turn."""

    times: np.ndarray
    groups: int
    tier: int
    own: np.ndarray
    offset: int
    lists: list[list[PageLists]]


@dataclass(frozen=True, eq=False)
class TileWindow:
    """A session's table before a pass of a block of frames at ``times`` (T,), and the heading [rad] before it; ``kept``: see
    ``SequenceCache.kept``."""

    preset: VideoPreset
    table: Table
    layout: TileLayout
    storages: tuple[Storage, ...]
    times: np.ndarray
    heading: float
    kept: Callable[[Table, int], np.ndarray]

    @cached_property
    def of_chunk(self) -> PassPages:
        """Pages for a chunk to be denoised, of whole slabs, whose keys no session keeps."""
        groups, tier = len(self.times) // self.layout.frames, chunk_tier(self.storages)
        own, first = self.storages[tier].scratch, int(self.table.slabs[-1]) + 1
        table = self.table
        for group, ids in enumerate(own.reshape(groups, -1)):
            table = table.put(np.array([first + group, self.layout.frames, 0, tier, *ids]))
        return self._pass(table, self.times, range(first, first + groups), tier, own, 0)

    def of_commit(self, ids: np.ndarray) -> Iterator[tuple[slice, PassPages]]:
        """Yield, for each slab of a committed block, its frames (a slice) and the pass that writes them to the staged pages
        ``ids`` (slabs * tiles,), slab by slab, as ``Stage.places`` gives them."""
        slabs, frames = self.times // self.layout.frames, self.layout.frames
        table = self.table
        for slab, own in zip(np.unique(slabs).tolist(), ids.reshape(-1, self.layout.tiles)):
            begin, end = np.searchsorted(slabs, [slab, slab + 1]).tolist()
            valid = int(self.times[end - 1]) % frames + 1
            part = self.times[begin:end]
            # Without slabs predicted from here on, and those that committing frame by frame would have dropped.
            table = table.select(table.slabs < slab)
            table = table.select(self.kept(table, int(part[0]) - self.preset.window_frames))
            table = table.put(np.array([slab, valid, 0, 0, *own]))
            yield slice(begin, end), self._pass(table, part, (slab,), 0, own, int(part[0]) % frames)

    def _pass(self, table: Table, times: np.ndarray, slabs: range | tuple[int, ...], tier: int, own: np.ndarray,
              offset: int) -> PassPages:
        nothing, lists = _nothing(len(slabs) * self.layout.tiles), []
        for pattern in patterns_of(self.preset):
            found = page_lists(table, self.layout, tuple(slabs), pattern)
            lists.append([found.get(each, nothing) for each in range(len(self.storages))])
        return PassPages(times, len(slabs), tier, own.astype(np.int32), offset, lists)


def chunk_tier(storages: Sequence[Storage]) -> int:
    """Return the tier of the scratch pages for the keys of a chunk that is denoised: that of complete, near slabs."""
    return min(1, len(storages) - 1)


@lru_cache(maxsize=8)
def patterns_of(preset: VideoPreset) -> tuple[Pattern, ...]:
    """Return a preset's distinct neighbourhoods, shifted inwards at borders so that all query tiles cost the same."""
    plane = TileLayout(preset.tile, preset.grid).plane
    return tuple(Pattern(slabs or None, (rows or plane[0], columns or plane[1]), shifted=True)
                 for slabs, rows, columns in dict.fromkeys(preset.patterns))


def _nothing(query_tiles: int) -> PageLists:
    empty = np.zeros(0, np.int32)
    return PageLists(np.zeros(query_tiles + 1, np.int32), empty, empty, np.zeros(query_tiles, np.int32))

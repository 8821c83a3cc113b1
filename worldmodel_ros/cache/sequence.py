"""The cache of one session or branch: a table of slabs whose pages lie in pools that all sessions share."""
from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from .allocator import Lease, OutOfPages
from .layout import TileLayout
from .pool import PagePool
from .stage import Stage
from .table import OBSERVED, TIER, VALID, Table


class SequenceCache:
    """Frames by absolute number, in slabs; what is done costs the slabs that it touches, and nothing is ever moved.

    New slabs are written to the first of ``pools``. ``guaranteed_slabs``: so many slabs of each pool, or of the first
    one, can always be held, staged ones included; 0 for a branch, which takes what is left and may lose it, unless it
    is ``firm``. ``sinks``: the first slabs, which eviction spares. Not safe for use from two threads at
    once; different sequences of the same pools are.
    """

    def __init__(self, layout: TileLayout, pools: Sequence[PagePool], guaranteed_slabs: int | Sequence[int] = 0,
                 sinks: int = 0, firm: bool = False):
        self.layout, self.pools, self.sinks = layout, tuple(pools), sinks
        slabs = (guaranteed_slabs,) if isinstance(guaranteed_slabs, int) else tuple(guaranteed_slabs)
        self._holding = _Holding(layout, self.pools, slabs + (0,) * (len(self.pools) - len(slabs)), firm)
        self._finalizer = weakref.finalize(self, self._holding.abandon)
        self._finalizer.atexit = False

    @property
    def table(self) -> Table:
        """What is visible; a new object after every change. Raises as `require_pages` does."""
        self.require_pages()
        return self._holding.table

    def require_pages(self) -> None:
        """Raises OutOfPages in a branch that lost its pages to a session: what they held is no longer in them."""
        if self.lost:
            raise OutOfPages('the pages of this branch were needed by a session: branch again, or make the pool larger')

    def lease(self, tier: int) -> Lease:
        """What this sequence holds of a pool."""
        return self._holding.leases[tier]

    @property
    def lost(self) -> bool:
        """Whether a session needed the pages of this branch."""
        return self._holding.lost

    def stage(self) -> Stage:
        """A context to write frames in: visible when it ends, unless it ends with an exception."""
        return Stage(self)

    def fork(self) -> SequenceCache:
        """A branch that has the same pages; a write to either copies the pages that it changes."""
        branch = SequenceCache(self.layout, self.pools, sinks=self.sinks)
        for tier, lease in enumerate(branch._holding.leases):
            lease.share(pages_of(self.table, tier))
        branch._holding.table = self.table
        return branch

    def evict(self, before: int) -> None:
        """Drops the slabs whose frames all come before the frame ``before``, but for the sinks."""
        old = (self.table.slabs + 1) * self.layout.frames <= before
        old[:self.sinks] = False
        self._drop(old)

    def drop_predicted(self) -> None:
        """Drops every predicted frame."""
        self._drop(self.table.observed == 0)
        partly = self.table.observed < self.table.valid
        if partly.any():
            rows = self.table.rows.copy()
            rows[:, VALID] = rows[:, OBSERVED]
            self.replace(Table(rows))

    def adopt(self, other: SequenceCache) -> None:
        """Drops everything, and takes over the pages of a sequence of the same pools, which is empty then. Raises
        OutOfPages, and changes nothing, where they are more than this one is guaranteed."""
        table = other.table
        for tier in range(len(self.pools)):
            lease, count = self.lease(tier), len(pages_of(table, tier))
            if lease.guaranteed and count > lease.guaranteed:
                raise OutOfPages(f'{count} pages of {self.pools[tier].name} do not fit the {lease.guaranteed} of this '
                                 f'sequence')
        self.clear()
        for tier in range(len(self.pools)):
            self.lease(tier).share(pages_of(table, tier))
        self.replace(table)
        other.clear()

    def clear(self) -> None:
        """Drops everything."""
        self._drop(np.ones(len(self.table), bool))

    def close(self) -> None:
        """Drops everything and gives up the guarantee; a sequence that is garbage does so by itself."""
        if self._finalizer.detach():
            self._holding.abandon()

    def replace(self, table: Table) -> None:
        """Makes ``table`` the visible one. Its pages must be held, and those that it no longer has be released."""
        self._holding.table = table

    def _drop(self, dropped: np.ndarray) -> None:
        if dropped.any():
            gone = self.table.select(dropped)
            self.replace(self.table.select(~dropped))
            for tier, lease in enumerate(self._holding.leases):
                lease.release(pages_of(gone, tier))


class _Holding:
    """What a sequence holds, apart from it: its finalizer must not keep it alive."""

    def __init__(self, layout: TileLayout, pools: Sequence[PagePool], guaranteed_slabs: Sequence[int], firm: bool):
        self.table = Table.empty(layout.tiles)
        self.lost = False
        self.leases = tuple(
            pool.allocator.lease(slabs * layout.tiles) if slabs or firm else
            pool.allocator.lease(surrender=self.surrender)
            for pool, slabs in zip(pools, guaranteed_slabs, strict=True))

    def surrender(self, lease: Lease) -> np.ndarray:
        """Loses the pages of one tier to a session."""
        tier = self.leases.index(lease)
        ids = pages_of(self.table, tier)
        self.table, self.lost = self.table.select(self.table.tiers != tier), True
        return ids

    def abandon(self) -> None:
        """Loses all pages for good."""
        for tier, lease in enumerate(self.leases):
            lease.abandon(pages_of(self.table, tier))
        self.table = self.table.select(self.table.tiers < 0)


def pages_of(table: Table, tier: int) -> np.ndarray:
    """Ids of all pages of a table that lie in one tier, int64 (n,)."""
    return table.pages[table.rows[:, TIER] == tier].ravel()

"""
The cache of one session or branch: a table of slabs whose pages are in pools that all sessions share.

New frames are staged first: written to places that no table refers to, and then made visible atomically.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .keyframes import keyframes
from .layout import TileLayout
from .pool import Lease, OutOfPages, PagePool

SLAB, VALID, OBSERVED, TIER, PAGES = range(5)


@dataclass(frozen=True, eq=False)
class Table:
    """One row per slab, ascending; immutable, so that forks share it and its identity is its version.

    ``rows`` int64 (slabs, 4 + tiles): number of the slab (that of its first frame, divided by the frames of a slab),
    how many of its frames are written and how many of those were observed (the first ones, both), its tier, its pages.
    """

    rows: np.ndarray

    @classmethod
    def empty(cls, tiles: int) -> Table:
        return cls(np.empty((0, PAGES + tiles), np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def slabs(self) -> np.ndarray:
        return self.rows[:, SLAB]

    @property
    def valid(self) -> np.ndarray:
        return self.rows[:, VALID]

    @property
    def observed(self) -> np.ndarray:
        return self.rows[:, OBSERVED]

    @property
    def tiers(self) -> np.ndarray:
        return self.rows[:, TIER]

    @property
    def pages(self) -> np.ndarray:
        return self.rows[:, PAGES:]

    def find(self, slab: int) -> np.ndarray | None:
        """Return the row of a slab, or None."""
        at = int(self.slabs.searchsorted(slab))
        return self.rows[at] if at < len(self.rows) and self.rows[at, SLAB] == slab else None

    def put(self, row: np.ndarray) -> Table:
        """Return the table with a slab's row added or replaced."""
        at = int(self.slabs.searchsorted(row[SLAB]))
        behind = at + (at < len(self.rows) and self.rows[at, SLAB] == row[SLAB])
        return Table(np.concatenate([self.rows[:at], row[None], self.rows[behind:]]))

    def select(self, kept: np.ndarray) -> Table:
        """Return the table of the slabs where ``kept`` (slabs,) is true."""
        return Table(self.rows[kept])


class SequenceCache:
    """Frames by absolute number, in slabs; a change costs only the slabs that it touches, and no others are moved.

    New slabs are written to the first of ``pools``. ``guaranteed_slabs``: how many slabs of each pool, or of the first one,
    can always be held, including staged ones; 0 for a branch, which takes what is left and may lose it, unless it is
    ``firm``. ``sinks``: how many first slabs are never evicted; ``keyframes``: how many of the others stay, see
    ``cache.keyframes``. Not thread-safe, but different sequences of the same pools can be used concurrently.
    """

    def __init__(self, layout: TileLayout, pools: Sequence[PagePool], guaranteed_slabs: int | Sequence[int] = 0,
                 sinks: int = 0, firm: bool = False, keyframes: int = 0):
        self.layout, self.pools, self.sinks, self.keyframes = layout, tuple(pools), sinks, keyframes
        self.heading = 0.0  # rad, of the robot at the newest frame relative to the first; a model may turn its keys by it
        # x, y [m] and heading [rad] of the robot at the last frame of each slab, by number; only for keyframes.
        self.poses: dict[int, tuple[float, float, float]] = {}
        slabs = (guaranteed_slabs,) if isinstance(guaranteed_slabs, int) else tuple(guaranteed_slabs)
        self._holding = _Holding(layout, self.pools, slabs + (0,) * (len(self.pools) - len(slabs)), firm)
        self._finalizer = weakref.finalize(self, self._holding.abandon)
        self._finalizer.atexit = False

    @property
    def table(self) -> Table:
        """The visible table; a new object after every change. Raises as ``require_pages``."""
        self.require_pages()
        return self._holding.table

    def require_pages(self) -> None:
        """Raise OutOfPages in a branch that lost its pages, and so their content, to a session."""
        if self.lost:
            raise OutOfPages('the pages of this branch were needed by a session: branch again, or make the pool larger')

    def lease(self, tier: int) -> Lease:
        """Return this sequence's lease of a pool."""
        return self._holding.leases[tier]

    @property
    def lost(self) -> bool:
        """Whether this branch lost its pages to a session."""
        return self._holding.lost

    def stage(self) -> Stage:
        """Return a context for writing frames, which become visible when it ends without an exception."""
        return Stage(self)

    def fork(self) -> SequenceCache:
        """Return a branch with the same pages, copy-on-write."""
        branch = SequenceCache(self.layout, self.pools, sinks=self.sinks, keyframes=self.keyframes)
        for tier, lease in enumerate(branch._holding.leases):
            lease.share(pages_of(self.table, tier))
        branch._holding.table, branch.heading, branch.poses = self.table, self.heading, self.poses.copy()
        return branch

    def evict(self, before: int) -> None:
        """Drop the slabs whose frames all come before frame ``before``, except sinks and keyframes."""
        self._drop(~self.kept(self.table, before))
        if len(self.poses) > len(self.table):
            self.poses = {slab: self.poses[slab] for slab in self.table.slabs.tolist()}

    def kept(self, table: Table, before: int) -> np.ndarray:
        """Return which slabs of a table ``evict`` keeps, bool."""
        kept = (table.slabs + 1) * self.layout.frames > before
        behind = np.flatnonzero(~kept)
        kept[:self.sinks] = True
        if self.keyframes:
            others = behind[behind >= self.sinks]
            poses = np.array([self.poses[slab] for slab in table.slabs[others].tolist()])
            observed = (table.observed == table.valid)[others]
            kept[others[keyframes(poses, observed, self.keyframes)[-1]]] = True
        return kept

    def drop_predicted(self) -> None:
        """Drop every predicted frame."""
        self._drop(self.table.observed == 0)
        partly = self.table.observed < self.table.valid
        if partly.any():
            rows = self.table.rows.copy()
            rows[:, VALID] = rows[:, OBSERVED]
            self.replace(Table(rows))

    def adopt(self, other: SequenceCache) -> None:
        """Drop everything and take over the pages of a sequence of the same pools, which is then empty. Raises OutOfPages,
        and changes nothing, if they exceed this sequence's guarantee."""
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
        """Drop everything."""
        self._drop(np.ones(len(self.table), bool))
        self.heading, self.poses = 0.0, {}

    def close(self) -> None:
        """Drop everything and give up the guarantee; garbage collection does so, too."""
        if self._finalizer.detach():
            self._holding.abandon()

    def replace(self, table: Table) -> None:
        """Make ``table`` visible. The caller must hold its pages, and release those that it no longer has."""
        self._holding.table = table

    def _drop(self, dropped: np.ndarray) -> None:
        if dropped.any():
            gone = self.table.select(dropped)
            self.replace(self.table.select(~dropped))
            for tier, lease in enumerate(self._holding.leases):
                lease.release(pages_of(gone, tier))


class Stage:
    """A context for writing frames; see ``SequenceCache.stage``.

    Visible frames are never overwritten: their pages may be shared, or the context may fail. Frames are written in place
    only behind the last one of an unshared slab, which no table refers to yet.
    """

    def __init__(self, cache: SequenceCache):
        self._cache, self._base = cache, cache.table
        self._table = cache.table
        self._fresh: dict[int, np.ndarray] = {}  # pages of this context, by slab
        self._replaced: list[tuple[int, np.ndarray]] = []  # tier and pages to be released at the end

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        cache = self._cache
        if kind is None and not cache.lost and cache.table is self._base:
            cache.replace(self._table)
            for tier, ids in self._replaced:
                cache.lease(tier).release(ids)
            return
        for ids in self._fresh.values():
            cache.lease(0).release(ids)
        if kind is None and cache.table is not self._base:
            raise RuntimeError('the sequence was changed while frames were staged; nothing was written')

    def write(self, first: int, k: Any, v: Any, observed: bool = True) -> None:
        """Write T successive frames from number ``first`` on: keys, rotated to absolute time, and values, (layers,
        heads, T, tokens, head_dim) each. Raises as ``claim``."""
        layout = self._cache.layout
        if k.shape != v.shape or k.ndim != 5 or k.shape[3] != layout.tokens:
            raise ValueError(f'keys {tuple(k.shape)} and values {tuple(v.shape)} must be '
                             f'(layers, heads, T, {layout.tokens}, head_dim)')
        begin = first
        for ids in self.claim(first, k.shape[2], observed):
            end = min(first + k.shape[2], (begin // layout.frames + 1) * layout.frames)
            part = slice(begin - first, end - first)
            places = layout.token_index[begin % layout.frames:][:end - begin].ravel()
            flat = (*k.shape[:2], len(places), k.shape[-1])
            self._cache.pools[0].storage.write(ids, places, k[:, :, part].reshape(flat), v[:, :, part].reshape(flat))
            begin = end

    def claim(self, first: int, count: int, observed: bool = True) -> list[np.ndarray]:
        """Return pages for ``count`` successive frames, ids int64 (tiles,) for each slab that they touch, for a kernel that
        writes them itself. The pages already contain the frames of a slab that stay.

        Observed frames replace predicted ones; predicted frames that follow them stay. Raises ValueError for a frame
        that would leave a gap in its slab, or replace an observation by a prediction; OutOfPages.
        """
        frames, end = self._cache.layout.frames, first + count
        if first < 0 or count < 1:
            raise ValueError(f'frames are numbered from 0 on and at least one is written, not {count} from {first} on')
        return [self._claim(slab, max(0, first - slab * frames), min(frames, end - slab * frames), observed)
                for slab in range(first // frames, -(-end // frames))]

    def places(self, first: int, count: int, observed: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """``claim`` for a single write to a storage of unquantised pages: return page ids int64 (m,), slab by slab, and the
        places in them, int64 (count * tokens,), of the tokens of each frame in turn."""
        layout, ids = self._cache.layout, self.claim(first, count, observed)
        slab, frame = np.divmod(first + np.arange(count), layout.frames)
        begin = (slab - slab[0]) * (layout.tiles * layout.page_tokens)
        return np.concatenate(ids), (layout.token_index[frame] + begin[:, None]).ravel()

    def _claim(self, slab: int, first: int, end: int, observed: bool) -> np.ndarray:
        """Return pages for the frames ``first`` to ``end`` of one slab, numbered within the slab."""
        row = self._table.find(slab)
        valid, seen = (0, 0) if row is None else (int(row[VALID]), int(row[OBSERVED]))
        if first > (seen if observed else valid):
            raise ValueError(f'frame {first} of slab {slab} leaves a gap: of its frames, {seen} are observed and '
                             f'{valid} written')
        if first < seen and not observed:
            raise ValueError(f'frame {first} of slab {slab} was observed, and a prediction does not replace it')
        ids = self._writable(slab, row, first, end)
        head = slab, max(valid, end), max(seen, end) if observed else seen, 0
        self._table = self._table.put(np.array([*head, *ids]))
        return ids

    def _writable(self, slab: int, row: np.ndarray | None, first: int, end: int) -> np.ndarray:
        """Return pages in which the frames ``first`` to ``end`` of a slab may be written, with its kept frames in them."""
        if slab in self._fresh:
            return self._fresh[slab]
        cache = self._cache
        if row is not None and row[TIER] == 0 and first >= row[VALID] and not cache.lost \
                and (cache.pools[0].allocator.references(row[PAGES:]) == 1).all():
            return row[PAGES:]
        ids = self._fresh[slab] = cache.lease(0).allocate(cache.layout.tiles)
        if row is not None:
            self._replaced.append((int(row[TIER]), row[PAGES:]))
        storage = cache.pools[0].storage
        if row is not None and (first > 0 or end < row[VALID]):
            storage.copy(ids, cache.pools[int(row[TIER])].storage, row[PAGES:])
        elif end < cache.layout.frames:
            storage.clear(ids)
        return ids


class _Holding:
    """The table and leases of a sequence, in a separate object so that its finalizer does not keep the sequence alive."""

    def __init__(self, layout: TileLayout, pools: Sequence[PagePool], guaranteed_slabs: Sequence[int], firm: bool):
        # Two, since a table's identity is its version.
        self.table, self._nothing = Table.empty(layout.tiles), Table.empty(layout.tiles)
        self.lost = self._ended = False
        leases: list[Lease] = []
        try:
            for pool, slabs in zip(pools, guaranteed_slabs, strict=True):
                leases.append(pool.allocator.lease(slabs * layout.tiles) if slabs or firm else
                              pool.allocator.lease(surrender=self.surrender))
        except OutOfPages:
            for lease in leases:  # else the first pools' guarantees would remain
                lease.close()
            raise
        self.leases = tuple(leases)

    def surrender(self, lease: Lease) -> np.ndarray:
        """Lose the pages of one tier to a session."""
        self.lost = True
        table, tier = self._take(), self.leases.index(lease)
        ids = pages_of(table, tier)
        self.table = table.select(table.tiers != tier)
        if self._ended:  # meanwhile
            self._release()
        return ids

    def abandon(self) -> None:
        """Release all pages and end the leases."""
        self._ended = True
        self._release()

    def _release(self) -> None:
        table = self._take()
        for tier, lease in enumerate(self.leases):
            lease.abandon(pages_of(table, tier))

    def _take(self) -> Table:
        """Leave no table behind: the garbage collector, or another thread, may abandon pages while these are surrendered, and
        each is given back once."""
        table, self.table = self.table, self._nothing  # with nothing in between that would let another thread run
        return table


def pages_of(table: Table, tier: int) -> np.ndarray:
    """Return the ids of all pages of a table that are in one tier, int64 (n,)."""
    return table.pages[table.rows[:, TIER] == tier].ravel()

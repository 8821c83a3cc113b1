"""Tiers of slabs by age: at full precision on the device, in fewer bits, in host memory."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .pool import Lease
from .sequence import PAGES, TIER

if TYPE_CHECKING:
    from .sequence import SequenceCache


@dataclass(frozen=True)
class TierPolicy:
    """A slab moves to tier i + 1 when all its frames are older than ``ages[i]`` frames. Sinks stay where they are."""

    ages: tuple[int, ...]

    def __post_init__(self):
        if any(young >= old for young, old in zip((0, *self.ages), self.ages)):
            raise ValueError(f'ages must be at least 1 frame and ascend, not {self.ages}')

    @classmethod
    def by_window(cls, frames: int) -> TierPolicy:
        """Return the default for a window of ``frames`` frames and two tiers, FP8 and FP4: the newest quarter stays in FP8. On
        the trained model, FP4 costs quality in the newest frames (benchmarks/tier_quality.py, docs/cache.md)."""
        return cls((max(1, frames // 4),))

    def apply(self, cache: SequenceCache, newest: int) -> int:
        """Move the slabs that are old enough at frame ``newest``; return how many moved.

        Raises OutOfPages, after which the slabs not moved yet are where they were.
        """
        if len(self.ages) >= len(cache.pools):
            raise ValueError(f'{len(cache.pools)} tiers have {len(cache.pools) - 1} ages between them, '
                             f'not {self.ages}')
        end = (cache.table.slabs + 1) * cache.layout.frames - 1
        wanted = np.searchsorted(self.ages, newest - end)
        wanted[:cache.sinks] = cache.table.tiers[:cache.sinks]
        old = np.flatnonzero(wanted > cache.table.tiers)
        for slab, tier in zip(cache.table.slabs[old].tolist(), wanted[old].tolist()):
            move(cache, slab, tier)
        return len(old)


def move(cache: SequenceCache, slab: int, tier: int) -> None:
    """Move a slab to another tier, in its precision; forks keep their pages.

    Raises OutOfPages, KeyError for a slab that is not there, and what the storage raises; the slab is then where it was.
    """
    row = _row(cache, slab)
    ids = cache.lease(tier).allocate(cache.layout.tiles)
    try:
        cache.pools[tier].storage.copy(ids, cache.pools[row[TIER]].storage, row[PAGES:])
    except BaseException:  # such as a device whose memory is full
        cache.lease(tier).release(ids)
        raise
    _put(cache, row, tier, ids)


class Prefetch:
    """Copies slabs of a sequence to the tier ``target`` while the device computes.

    A slab that was begun in time is there when it is needed. Meanwhile the prefetch's own leases hold its pages in both
    tiers; a slab that changes before it is needed is copied again.
    """

    def __init__(self, cache: SequenceCache, target: int = 0):
        self._cache, self._target = cache, target
        self._coming: dict[int, _Transfer] = {}

    def begin(self, slab: int) -> None:
        """Start copying a slab, unless it is there or on its way. Raises KeyError for one that is not in the sequence, and
        OutOfPages."""
        row = _row(self._cache, slab)
        if row[TIER] != self._target and slab not in self._coming:
            self._coming[slab] = _Transfer(self._cache, row, self._target)

    def need(self, slabs: Iterable[int]) -> int:
        """Make slabs available to the next computation; return how many had not been begun. Raises as ``begin``."""
        late = 0
        for slab in slabs:
            row = _row(self._cache, slab)
            coming = self._coming.pop(slab, None)
            if row[TIER] == self._target:
                continue
            if coming is None or (coming.row != row).any():
                late += 1
                coming = _Transfer(self._cache, row, self._target)
            coming.wait()
            self._cache.lease(self._target).share(coming.ids)
            _put(self._cache, row, self._target, coming.ids)
        return late

    def cancel(self) -> None:
        """Discard the slabs that are on their way."""
        self._coming.clear()


class _Transfer:
    """A slab that is being copied from ``row`` to ``ids``."""

    def __init__(self, cache: SequenceCache, row: np.ndarray, target: int):
        source, into = cache.pools[row[TIER]], cache.pools[target]
        self.row, pages = row, row[PAGES:]
        of, to = source.allocator.lease(), into.allocator.lease()
        of.share(pages)
        weakref.finalize(self, of.abandon, pages).atexit = False
        self.ids = to.allocate(len(pages))
        try:
            self.wait = into.storage.copy_later(self.ids, source.storage, pages)
        except BaseException:
            to.release(self.ids)
            raise
        weakref.finalize(self, self._end, self.wait, to, self.ids).atexit = False

    @staticmethod
    def _end(wait: Callable[[], None], lease: Lease, ids: np.ndarray) -> None:
        wait()
        lease.abandon(ids)


def _row(cache: SequenceCache, slab: int) -> np.ndarray:
    row = cache.table.find(slab)
    if row is None:
        raise KeyError(f'slab {slab} is not in the cache, which has {cache.table.slabs.tolist()}')
    return row


def _put(cache: SequenceCache, row: np.ndarray, tier: int, ids: np.ndarray) -> None:
    """Put a slab in other pages, and release those of ``row``."""
    moved = np.concatenate([row[:PAGES], ids])
    moved[TIER] = tier
    cache.replace(cache.table.put(moved))
    cache.lease(int(row[TIER])).release(row[PAGES:])

"""An index, by content, of the slabs in an engine's pages, so that sessions can share them."""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from .sequence import SequenceCache

KEPT = 4096  # most slabs in the index


class SlabIndex:
    """Maps contents of complete slabs to the pages that hold them. Thread-safe.

    It holds no pages: those of a slab that no sequence has are free, and the slab is no longer found. What it finds is
    unchanged for two reasons: a complete slab is never written again (a sequence that changes it copies it first), and
    ``PageAllocator.uses`` reveals pages that were allocated again.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, tuple[int, np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self.shared = 0  # slabs found so far

    def add(self, content: Hashable, tier: int, ids: np.ndarray, uses: np.ndarray) -> None:
        """Record that pages ``ids`` (tiles,) of a tier, with use counts ``uses`` (tiles,), hold a complete slab of this
        content."""
        with self._lock:
            self._places[content] = tier, ids, uses
            self._places.move_to_end(content)
            while len(self._places) > KEPT:
                self._places.popitem(last=False)

    def share(self, content: Hashable, cache: SequenceCache, tier: int) -> np.ndarray | None:
        """Let a sequence hold the pages of a slab of this content, too; return their ids (tiles,), or None if there is none.
        Raises OutOfPages as ``Lease.share``."""
        with self._lock:
            place = self._places.get(content)
        if place is None or place[0] != tier:
            return None
        _, ids, uses = place
        if cache.lease(tier).share_unchanged(ids, uses):
            with self._lock:
                self.shared += 1
            return ids
        with self._lock:
            if self._places.get(content) is place:
                del self._places[content]
        return None

"""Which slabs are in the pages of an engine already, by their content, so that sessions can share them."""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from .sequence import SequenceCache

KEPT = 4096  # slabs that are known


class SlabIndex:
    """Contents of complete slabs -> the pages that hold them. From any thread.

    It holds no pages: those of a slab that no sequence has any more are free, and the slab is found no more. That what
    it finds still is what it was rests on two facts: a complete slab is never written again (a sequence that changes it
    copies it first), and pages that were given out again are told by ``PageAllocator.uses``.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, tuple[int, np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self.shared = 0  # slabs that were found

    def add(self, content: Hashable, tier: int, ids: np.ndarray, uses: np.ndarray) -> None:
        """Say that pages ``ids`` (tiles,) of a tier, when they had been given out ``uses`` (tiles,) times, hold a
        complete slab of this content."""
        with self._lock:
            self._places[content] = tier, ids, uses
            self._places.move_to_end(content)
            while len(self._places) > KEPT:
                self._places.popitem(last=False)

    def share(self, content: Hashable, cache: SequenceCache, tier: int) -> np.ndarray | None:
        """Have a sequence hold the pages of a slab of this content, too: their ids (tiles,); None where none does.
        Raises OutOfPages beyond what the sequence is guaranteed."""
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

"""The block table of one sequence: which slabs it has, and in which pages they lie."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SLAB, VALID, OBSERVED, TIER, PAGES = range(5)


@dataclass(frozen=True, eq=False)
class Table:
    """One row a slab, ascending; never changed, so that forks share it and its identity is its version.

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
        """Row of a slab, if it is there."""
        at = int(self.slabs.searchsorted(slab))
        return self.rows[at] if at < len(self.rows) and self.rows[at, SLAB] == slab else None

    def put(self, row: np.ndarray) -> Table:
        """The table with a slab's row added, or replaced."""
        at = int(self.slabs.searchsorted(row[SLAB]))
        behind = at + (at < len(self.rows) and self.rows[at, SLAB] == row[SLAB])
        return Table(np.concatenate([self.rows[:at], row[None], self.rows[behind:]]))

    def select(self, kept: np.ndarray) -> Table:
        """The slabs where ``kept`` (slabs,) is true."""
        return Table(self.rows[kept])

"""The pages of an engine's sessions, and what a pass of the network sees of one of them."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cache.layout import TileLayout
from ..cache.pool import PagePool
from ..cache.sequence import SequenceCache
from ..cache.storage import Storage
from ..cache.table import Table
from ..model.presets import Preset

BLOCKED = np.float32(-1e9)  # finite, so that a row that is blocked everywhere gives numbers instead of NaN


def page_layout(preset: Preset) -> TileLayout:
    """A page for each frame, of all its tokens: the grids of small presets are no larger than a tile."""
    return TileLayout((1, *preset.grid), preset.grid)


def slabs_of(frames: int, layout: TileLayout) -> int:
    """How many slabs ``frames`` successive frames touch at most."""
    return -(-(frames - 1) // layout.frames) + 1


class Memory:
    """One pool of pages for all sessions of an engine.

    Every session is guaranteed its window, and the slab that a tick is about to add. With each come as many pages more
    as a question what if needs: those of the window that the session meanwhile drops, and a window of the branch's own.
    """

    def __init__(self, preset: Preset, storage: Callable[[TileLayout, int], Storage], sessions: int):
        """``storage`` makes one for a layout and a number of pages."""
        self.layout = page_layout(preset)
        self._frames = preset.window_frames
        self._slabs = slabs_of(preset.window_frames, self.layout)
        self._guaranteed = self._slabs + 1
        branch = 2 * self._slabs + slabs_of(preset.chunk_frames, self.layout)
        pages = sessions * (self._guaranteed + branch) * self.layout.tiles
        self.pool = PagePool.of('pages', storage(self.layout, pages))

    def open(self) -> SequenceCache:
        """The cache of a new session. Raises OutOfPages when no window can be guaranteed any more."""
        return SequenceCache(self.layout, [self.pool], self._guaranteed)

    def roll(self, cache: SequenceCache, newest: int) -> None:
        """Drops what has left the window of the frame after ``newest``."""
        cache.evict(newest + 1 - self._frames)

    def window(self, cache: SequenceCache, times: np.ndarray, causal: bool) -> Window:
        """What a block of frames at ``times`` (T,) sees. A causal block is committed: a frame sees those before it, and
        none that a session which commits frame by frame would have dropped."""
        pages, key_times = _places(cache.table, self.layout, self._slabs, self.pool.storage.null_page)
        oldest = np.maximum((times if causal else times[:1]) - self._frames, 0)
        return Window(self.pool.storage, pages, key_times, times, oldest, causal, self.layout.tokens)


@dataclass(frozen=True, eq=False)
class Window:
    """What a block of T frames sees: pages of a storage, and itself.

    pages int64 (n,), always as many; key_times int64 (n * page_tokens,), the frame of each token in them, -1 where
    there is none; times int64 (T,), the block's own; oldest int64 (T,) or, where it is the same for all, (1,): the
    first frame that is seen; tokens: of a frame.
    """

    storage: Storage
    pages: np.ndarray
    key_times: np.ndarray
    times: np.ndarray
    oldest: np.ndarray
    causal: bool
    tokens: int

    def bias(self) -> np.ndarray:
        """Additive mask float32 (T, n * page_tokens + T * tokens) from each frame to the tokens of the pages, then to
        those of the block."""
        count = len(self.times)
        own = self.times[:, None] >= self.times if self.causal else np.ones((count, count), bool)
        seen = np.broadcast_to(self.seen(), (count, len(self.key_times)))
        seen = np.concatenate([seen, own.repeat(self.tokens, 1)], 1)
        return np.where(seen, np.float32(0.0), BLOCKED)

    def seen(self) -> np.ndarray:
        """Which tokens of the pages each frame sees, bool, a row for each of ``oldest``."""
        return (self.key_times >= self.oldest[:, None]) & (self.key_times < self.times[0])


@lru_cache(maxsize=64)
def _places(table: Table, layout: TileLayout, slabs: int, null_page: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages of a window of so many slabs, and the time of each token in them, -1 where there is none."""
    # A slab keeps its place while the window rolls on.
    place = table.slabs % slabs
    pages = np.full((slabs, layout.tiles), null_page)
    pages[place] = table.pages
    times = np.full((slabs, layout.tiles, layout.page_tokens), -1)
    written = layout.frame_index < table.valid[:, None, None]
    times[place] = np.where(written, layout.frame_index + (table.slabs * layout.frames)[:, None, None], -1)
    return pages.ravel(), times.ravel()

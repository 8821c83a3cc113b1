"""The pages of an engine's sessions, and the window that a pass of the network sees of one session."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cache.layout import TileLayout
from ..cache.pool import PagePool, Storage
from ..cache.sequence import SequenceCache, Table
from ..cache.tiers import TierPolicy
from ..model.presets import VideoPreset
from .tile_window import TileWindow

BLOCKED = np.float32(-1e9)  # finite, so that a fully blocked row gives numbers instead of NaN

# A slab moves when all its frames are older than this; up to NOT_YET_OLDER more slabs may wait to be moved.
COMPLETE_IS_OLDER = TierPolicy((1,))
NOT_YET_OLDER = 3


def page_layout(preset: VideoPreset) -> TileLayout:
    """Return the preset's tiles or, without tiles, one page per frame with all its tokens."""
    return TileLayout(preset.tile or (1, *preset.grid), preset.grid)


def slabs_of(frames: int, layout: TileLayout) -> int:
    """Return how many slabs ``frames`` successive frames touch at most."""
    return -(-(frames - 1) // layout.frames) + 1


class Memory:
    """The page pools for all sessions of an engine: one; or one for the newest slabs and one for older ones, in fewer bits;
    or a third for those older than a quarter of the window, in fewer bits still.

    Every session is guaranteed its window and the slab that a tick is about to add. The pools have further pages per
    session for a what-if question: those of its window that the session drops meanwhile, and a window of the branch's own;
    and for each anchor, in every pool, those that it keeps there.
    """

    def __init__(self, preset: VideoPreset, storage: Callable[[TileLayout, int], Storage], sessions: int,
                 older: Callable[[TileLayout, int], Storage] | None = None,
                 distant: Callable[[TileLayout, int], Storage] | None = None,
                 before_writing: Callable[[], None] = lambda: None, anchors: int = 0):
        """``storage`` makes a storage for a layout and a number of pages, ``older`` that of complete slabs, ``distant`` that
        of slabs older than a quarter of the window. ``before_writing``: see ``Backend``. ``anchors``: of a session, which have
        room for a window each, and in the other pools for what they keep there; keyframes they mostly share."""
        self.layout = page_layout(preset)
        self.before_writing = before_writing
        self._preset, self._frames = preset, preset.window_frames
        self._slabs = slabs_of(preset.window_frames, self.layout)
        chunk = slabs_of(preset.chunk_frames, self.layout)
        slabs = [(self._slabs + preset.staying_slabs + 1, (2 + anchors) * self._slabs + preset.keyframe_slabs + chunk)]
        if older is not None:
            recent = NOT_YET_OLDER + preset.sink_slabs + 1
            newest = COMPLETE_IS_OLDER.ages[0] // self.layout.frames + 1  # of an anchor, which is between two slabs
            slabs.insert(0, (recent, recent + chunk + anchors * newest))
        self._tiers = COMPLETE_IS_OLDER
        if distant is not None:
            near = TierPolicy.by_window(preset.window_frames).ages
            self._tiers = TierPolicy(COMPLETE_IS_OLDER.ages + near)
            held = slabs_of(near[0], self.layout) + NOT_YET_OLDER
            slabs.insert(1, (held, held + chunk + anchors * held))
        self._guaranteed = [guaranteed for guaranteed, _ in slabs]
        self.pools = [PagePool.of(name, make(self.layout, sessions * sum(each) * self.layout.tiles))
                      for name, make, each in zip(('pages', 'older', 'distant'), (storage, older, distant), slabs)]

    @property
    def pool(self) -> PagePool:
        """The pool that new slabs are written to."""
        return self.pools[0]

    @property
    def guaranteed_pages(self) -> list[int]:
        """Largest number of pages that a session holds of each pool."""
        return [slabs * self.layout.tiles for slabs in self._guaranteed]

    def open(self) -> SequenceCache:
        """Return the cache of a new session. Raises OutOfPages when no further window can be guaranteed."""
        return SequenceCache(self.layout, self.pools, self._guaranteed, self._preset.sink_slabs,
                             keyframes=self._preset.keyframe_slabs)

    def stage(self) -> SequenceCache:
        """Return an empty cache to be filled for a session to adopt. Its pages are never reclaimed, so that another thread
        may write to them."""
        return SequenceCache(self.layout, self.pools, sinks=self._preset.sink_slabs, firm=True,
                             keyframes=self._preset.keyframe_slabs)

    def roll(self, cache: SequenceCache, newest: int) -> None:
        """Drop what has left the window of the frame after ``newest``, and move complete slabs to storage of fewer bits."""
        cache.evict(newest + 1 - self._frames)
        if len(self.pools) > 1:
            self._tiers.apply(cache, newest)

    def window(self, cache: SequenceCache, times: np.ndarray, causal: bool) -> Window | TileWindow:
        """Return what a block of frames at ``times`` (T,) sees. A causal block is committed: a frame sees those before it,
        and none that a session which commits frame by frame would have dropped."""
        if self._preset.tile:
            storages = tuple(pool.storage for pool in self.pools)
            return TileWindow(self._preset, cache.table, self.layout, storages, times, cache.heading, cache.kept)
        pages, key_times = _places(cache.table, self.layout, self._slabs, self.pool.storage.null_page)
        oldest = np.maximum((times if causal else times[:1]) - self._frames, 0)
        return Window(self.pool.storage, pages, key_times, times, oldest, causal, self.layout.tokens)


@dataclass(frozen=True, eq=False)
class Window:
    """What a block of T frames sees: pages of a storage, and itself.

    pages int64 (n,), n fixed; key_times int64 (n * page_tokens,), the frame of each of their tokens, -1 where there is
    none; times int64 (T,), the block's own; oldest int64 (T,), or (1,) where it is the same for all: the first visible
    frame; tokens: per frame.
    """

    storage: Storage
    pages: np.ndarray
    key_times: np.ndarray
    times: np.ndarray
    oldest: np.ndarray
    causal: bool
    tokens: int

    def bias(self) -> np.ndarray:
        """Return an additive mask float32 (T, n * page_tokens + T * tokens) from each frame to the tokens of the pages, then
        to those of the block."""
        count = len(self.times)
        own = self.times[:, None] >= self.times if self.causal else np.ones((count, count), bool)
        seen = np.broadcast_to(self.seen(), (count, len(self.key_times)))
        seen = np.concatenate([seen, own.repeat(self.tokens, 1)], 1)
        return np.where(seen, np.float32(0.0), BLOCKED)

    def seen(self) -> np.ndarray:
        """Return which tokens of the pages each frame sees, bool, a row for each of ``oldest``."""
        return self._seen(self.key_times)

    def seen_pages(self) -> np.ndarray:
        """Return which pages each frame sees, where a page is one frame."""
        return self._seen(self.key_times[::self.tokens])

    def _seen(self, key_times: np.ndarray) -> np.ndarray:
        return (key_times >= self.oldest[:, None]) & (key_times < self.times[0])


@lru_cache(maxsize=64)
def _places(table: Table, layout: TileLayout, slabs: int, null_page: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pages of a window of ``slabs`` slabs, and the time of each token in them, -1 where there is none."""
    # A slab keeps its place while the window moves.
    place = table.slabs % slabs
    pages = np.full((slabs, layout.tiles), null_page)
    pages[place] = table.pages
    times = np.full((slabs, layout.tiles, layout.page_tokens), -1)
    written = layout.frame_index < table.valid[:, None, None]
    times[place] = np.where(written, layout.frame_index + (table.slabs * layout.frames)[:, None, None], -1)
    return pages.ravel(), times.ravel()

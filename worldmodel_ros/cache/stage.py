"""A staged commit: frames are written where no table looks, and become visible all at once."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .table import OBSERVED, PAGES, TIER, VALID

if TYPE_CHECKING:
    from .sequence import SequenceCache


class Stage:
    """A context; see `SequenceCache.stage`.

    A page that is visible is never overwritten: it may be shared, or the context may fail. Frames are written in place
    only behind the last one of an unshared slab, where no table looks yet.
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
        """Writes T successive frames from number ``first`` on: keys, rotated to absolute time, and values, (layers,
        heads, T, tokens, head_dim) each. See `claim` for what is refused."""
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
        """Pages for ``count`` successive frames, ids int64 (tiles,) for each slab that they touch, for a kernel that
        writes them itself. What stays of a slab is in its pages already.

        Observed frames replace predicted ones; predicted frames that follow them stay. Raises ValueError for a frame
        that would leave a gap in its slab, or replace an observation by a prediction, and OutOfPages.
        """
        frames, end = self._cache.layout.frames, first + count
        if first < 0 or count < 1:
            raise ValueError(f'frames are numbered from 0 on and at least one is written, not {count} from {first} on')
        return [self._claim(slab, max(0, first - slab * frames), min(frames, end - slab * frames), observed)
                for slab in range(first // frames, -(-end // frames))]

    def places(self, first: int, count: int, observed: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """`claim`, as what the storage of unquantised pages takes in one write: ids int64 (m,) of the pages, slab by
        slab, and the places in them, int64 (count * tokens,), of the tokens of each frame in turn."""
        layout, ids = self._cache.layout, self.claim(first, count, observed)
        slab, frame = np.divmod(first + np.arange(count), layout.frames)
        begin = (slab - slab[0]) * (layout.tiles * layout.page_tokens)
        return np.concatenate(ids), (layout.token_index[frame] + begin[:, None]).ravel()

    def _claim(self, slab: int, first: int, end: int, observed: bool) -> np.ndarray:
        """Pages for the frames ``first`` to ``end``, numbered within it, of one slab."""
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
        """Pages in which the frames ``first`` to ``end`` of a slab may be written, with what is kept of it in them."""
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

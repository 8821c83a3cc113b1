"""A sequence as arrays, for a file, and back."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .allocator import OutOfPages
from .sequence import pages_of
from .table import PAGES, TIER, Table

if TYPE_CHECKING:
    from .sequence import SequenceCache


def save(cache: SequenceCache) -> dict[str, np.ndarray]:
    """``slabs`` int64 (n, 4), the table without its pages, and what is in the pages of each pool, by its name."""
    arrays = {'slabs': cache.table.rows[:, :PAGES].copy()}
    for tier, pool in enumerate(cache.pools):
        ids = pages_of(cache.table, tier)
        if len(ids):
            arrays |= {f'{pool.name}.{name}': array for name, array in pool.storage.dump(ids).items()}
    return arrays


def restore(cache: SequenceCache, arrays: dict[str, np.ndarray]) -> None:
    """Replaces what a sequence holds by what `save` gave; pages get new ids.

    Raises ValueError, and changes nothing, for arrays that do not fit; OutOfPages for a branch whose pool is full,
    which leaves it empty.
    """
    slabs = _checked_slabs(cache, arrays.get('slabs'))
    contents = [{name.removeprefix(f'{pool.name}.'): array for name, array in arrays.items()
                 if name.startswith(f'{pool.name}.')} for pool in cache.pools]
    if 1 + sum(map(len, contents)) != len(arrays):
        raise ValueError(f'{sorted(arrays)} do not fit the tiers {[pool.name for pool in cache.pools]}')
    counts = [int((slabs[:, TIER] == tier).sum()) for tier in range(len(cache.pools))]
    for count, content, pool in zip(counts, contents, cache.pools):
        if count or content:
            pool.storage.check(count * cache.layout.tiles, content)
    cache.clear()
    table = cache.table
    try:
        for slab in slabs:
            table = table.put(np.concatenate([slab, cache.lease(slab[TIER]).allocate(cache.layout.tiles)]))
            cache.replace(table)
    except OutOfPages:
        cache.clear()
        raise
    for tier, (count, content) in enumerate(zip(counts, contents)):
        if count:
            cache.pools[tier].storage.load(pages_of(table, tier), content)


def _checked_slabs(cache: SequenceCache, slabs: np.ndarray | None) -> np.ndarray:
    if slabs is None or slabs.ndim != 2 or slabs.shape[1] != PAGES or slabs.dtype != np.int64:
        raise ValueError('the table of slabs is missing, or not int64 (n, 4)')
    number, valid, observed, tier = slabs.T
    room = cache.lease(0).guaranteed // cache.layout.tiles
    bounds = (0 <= number) & (0 <= observed) & (observed <= valid) & (1 <= valid) & (valid <= cache.layout.frames) \
        & (0 <= tier) & (tier < len(cache.pools))
    if not bounds.all() or (np.diff(number) <= 0).any():
        raise ValueError('the table of slabs is damaged')
    if room and (tier == 0).sum() > room:
        raise ValueError(f'{int((tier == 0).sum())} slabs do not fit a session of {room}')
    return slabs

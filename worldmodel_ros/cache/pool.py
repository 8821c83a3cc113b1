"""
A pool of pages: their allocation, and the keys and values in them.

Pages are reference-counted, so that branches share them; no branch can take pages that a session is guaranteed.
"""
from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from .layout import TileLayout

Result = TypeVar('Result')

LAYERS = 1  # axis of what ``dump`` returns


class OutOfPages(RuntimeError):
    """More pages were requested than there are, or than are not guaranteed to others."""


@dataclass(frozen=True)
class Usage:
    """Pages of a pool. ``shared``: held by more than one lease. ``guaranteed``: promised to leases, used or not.

    ``fragmentation`` is the share of the free pages outside the longest free run; ``scattered`` counts the
    allocations so far that no run was long enough for.
    """

    pages: int
    used: int
    shared: int
    guaranteed: int
    longest_free_run: int
    fragmentation: float
    scattered: int

    @property
    def free(self) -> int:
        return self.pages - self.used


class PageAllocator:
    """Allocates the pages, ids 0 to ``pages`` - 1, of one pool, whatever their content. Thread-safe.

    Pages are held by leases. A lease with a guarantee always gets its pages: there are always as many free ones as the
    guaranteed leases do not hold yet. A branch, which has no guarantee, costs nothing as long as it shares a session's
    pages; when the session releases them and guarantees could not be kept, the oldest branches lose theirs. A page that
    several guaranteed leases share counts for only one of them, as each may need its own later; and for none while a lease
    holds it that neither has a guarantee nor surrenders, as it then stays in use when they release it.
    """

    def __init__(self, pages: int):
        self._references = np.zeros(pages, np.int32)
        self._of_guaranteed = np.zeros(pages, np.int32)  # of the references, those of leases with a guarantee
        self._of_firm = np.zeros(pages, np.int32)  # of the references, those of leases without one that do not surrender
        self._uses = np.zeros(pages, np.int64)  # how often each page was allocated
        self._free = pages
        self._guaranteed = 0
        self._promised = 0  # of the guaranteed pages, those that are not held yet, or do not count
        self._scattered = 0
        self._branches: deque[weakref.ref[Lease]] = deque()
        self._lock = threading.Lock()
        # Filled by the garbage collector, which may run while this very thread holds the lock.
        self._abandoned: deque[tuple[Lease, np.ndarray]] = deque()
        # Called, without the lock, when pages are short: each releases some pages that are held ahead of their use, and
        # returns whether it had any. They must not block.
        self.givers: list[Callable[[], bool]] = []

    @property
    def pages(self) -> int:
        return len(self._references)

    def lease(self, guaranteed: int = 0, surrender: Callable[[Lease], np.ndarray] | None = None) -> Lease:
        """Return a lease that can always hold ``guaranteed`` pages; raise OutOfPages if that cannot be guaranteed.

        One without a guarantee shares pages with guaranteed ones at no cost if it has ``surrender``, a method that gives up
        all its pages when they are needed: it returns their ids, and must not call back.
        """
        lease = Lease(self, guaranteed, firm=not guaranteed and surrender is None)

        def promise() -> Lease:
            with self._lock:
                self._collect()
                self._require(guaranteed, 'to be guaranteed')
                self._guaranteed += guaranteed
                self._promised += guaranteed
                if surrender:
                    lease._surrender = weakref.WeakMethod(surrender)
                    alive = [branch for branch in self._branches if branch() is not None]
                    self._branches = deque([*alive, weakref.ref(lease)])
            return lease
        return self._with_room(promise)

    def usage(self) -> Usage:
        with self._lock:
            self._collect()
            starts, ends = self._free_runs()
            longest = int((ends - starts).max(initial=0))
            return Usage(self.pages, self.pages - self._free, int((self._references > 1).sum()), self._guaranteed,
                         longest, 1.0 - longest / self._free if self._free else 0.0, self._scattered)

    def references(self, ids: np.ndarray) -> np.ndarray:
        """Return how many leases hold each page, int32 (n,)."""
        with self._lock:
            self._collect()
            return self._references[ids]

    def uses(self, ids: np.ndarray) -> np.ndarray:
        """Return how often each page has been allocated, int64 (n,): while that is unchanged, the page is still held for the
        same purpose, or has become free."""
        with self._lock:
            return self._uses[ids]

    def _share_unchanged(self, lease: Lease, ids: np.ndarray, uses: np.ndarray) -> bool:
        with self._lock:
            self._collect()
            if (self._uses[ids] != uses).any() or (self._references[ids] == 0).any():
                return False
            self._admit_shared(lease, ids)
            self._hold(lease, ids)
            return True

    def _allocate(self, lease: Lease, count: int) -> np.ndarray:
        def find() -> np.ndarray:
            with self._lock:
                self._collect()
                self._admit(lease, count)
                if not lease.guaranteed:
                    self._require(count, 'needed')
                ids = self._find(count)
                self._uses[ids] += 1
                self._hold(lease, ids)
                return ids
        return find() if lease.guaranteed else self._with_room(find)

    def _share(self, lease: Lease, ids: np.ndarray) -> None:
        def share() -> None:
            with self._lock:
                self._collect()
                self._admit_shared(lease, ids)
                self._hold(lease, ids)
        if lease.firm:
            self._with_room(share)
        else:
            share()

    def _release(self, lease: Lease, ids: np.ndarray) -> None:
        with self._lock:
            self._collect()
            self._let_go(lease, ids)
            while self._free < self._promised and self._branches:
                branch = self._branches.popleft()()
                surrender = branch and branch._surrender()
                if surrender:
                    self._let_go(branch, surrender(branch))
            short = self._free < self._promised
        while short and self._given():
            with self._lock:
                self._collect()
                short = self._free < self._promised

    def _close(self, lease: Lease) -> None:
        with self._lock:
            self._end(lease)

    def _with_room(self, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt``, which may raise OutOfPages, and retry while ``givers`` can release pages."""
        while True:
            try:
                return attempt()
            except OutOfPages:
                if not self._given():
                    raise

    def _given(self) -> bool:
        return any(give() for give in self.givers)

    def _collect(self) -> None:
        while self._abandoned:
            lease, ids = self._abandoned.popleft()
            self._let_go(lease, ids)
            self._end(lease)

    def _admit(self, lease: Lease, count: int) -> None:
        if lease.guaranteed and lease.held + count > lease.guaranteed:
            raise OutOfPages(f'{count} more pages are needed, but of the {lease.guaranteed} guaranteed ones '
                             f'{lease.held} are held: evict slabs, or open the session with a larger window')

    def _admit_shared(self, lease: Lease, ids: np.ndarray) -> None:
        self._admit(lease, len(ids))
        if lease.firm:
            self._require(self._counted(ids), 'needed in place of shared ones')

    def _counted(self, ids: np.ndarray) -> int:
        """Return how many of the pages count for guarantees: those that are free once their guaranteed leases, and branches,
        release them."""
        return int(np.count_nonzero((self._of_guaranteed[ids] > 0) & (self._of_firm[ids] == 0)))

    def _require(self, count: int, what: str) -> None:
        spare = self._free - self._promised
        if count > spare:
            raise OutOfPages(f'{count} more pages are {what}, and of {self.pages} only {spare} are free and '
                             f'unreserved: close sessions, drop branches, or make the pool larger')

    def _hold(self, lease: Lease, ids: np.ndarray) -> None:
        # The ids of one lease are distinct, so plain indexing counts each.
        self._free -= int(np.count_nonzero(self._references[ids] == 0))
        self._references[ids] += 1
        self._change(lease, ids, 1)

    def _let_go(self, lease: Lease, ids: np.ndarray) -> None:
        self._references[ids] -= 1
        self._free += int(np.count_nonzero(self._references[ids] == 0))
        self._change(lease, ids, -1)

    def _change(self, lease: Lease, ids: np.ndarray, by: int) -> None:
        lease.held += by * len(ids)
        if lease.guaranteed or lease.firm:
            self._promised += self._counted(ids)
            (self._of_guaranteed if lease.guaranteed else self._of_firm)[ids] += by
            self._promised -= self._counted(ids)

    def _end(self, lease: Lease) -> None:
        self._guaranteed -= lease.guaranteed
        self._promised -= lease.guaranteed  # it no longer holds pages
        lease.guaranteed = 0

    def _find(self, count: int) -> np.ndarray:
        if count == 1:
            return self._references.argmin(keepdims=True)  # the first zero, in a single pass
        starts, ends = self._free_runs()
        fitting = np.flatnonzero(ends - starts >= count)
        if len(fitting):
            return np.arange(starts[fitting[0]], starts[fitting[0]] + count)
        self._scattered += 1
        return np.flatnonzero(self._references == 0)[:count]

    def _free_runs(self) -> tuple[np.ndarray, np.ndarray]:
        free = np.zeros(self.pages + 2, bool)
        free[1:-1] = self._references == 0
        edges = np.flatnonzero(free[1:] != free[:-1])
        return edges[::2], edges[1::2]


class Lease:
    """Pages that are held together, each id at most once. ``firm``: without a guarantee, and kept nevertheless until they are
    released."""

    def __init__(self, allocator: PageAllocator, guaranteed: int, firm: bool):
        self._allocator = allocator
        self._surrender: weakref.WeakMethod | None = None
        self.guaranteed, self.firm = guaranteed, firm
        self.held = 0

    def allocate(self, count: int) -> np.ndarray:
        """Allocate pages and return their ids, int64 (count,): the first free run that is long enough, else scattered.

        Raises OutOfPages.
        """
        return self._allocator._allocate(self, count)

    def share(self, ids: np.ndarray) -> None:
        """Hold pages that another lease holds, too. Raises OutOfPages beyond the guarantee, if there is one; and for a
        ``firm`` lease if a session that releases them could not get others."""
        self._allocator._share(self, ids)

    def share_unchanged(self, ids: np.ndarray, uses: np.ndarray) -> bool:
        """As ``share``, if others still hold the pages for the same purpose as when their use counts were ``uses`` (see
        PageAllocator.uses); return whether that is so."""
        return self._allocator._share_unchanged(self, ids, uses)

    def release(self, ids: np.ndarray) -> None:
        """Release pages; those without remaining references become free."""
        self._allocator._release(self, ids)

    def close(self) -> None:
        """Give up the guarantee, after the pages were released."""
        self._allocator._close(self)

    def abandon(self, ids: np.ndarray) -> None:
        """Release ``ids`` and close, from a finalizer: takes no lock, and takes effect with the next call."""
        self._allocator._abandoned.append((self, ids))


class Storage(Protocol):
    """Keys and values of pages, one page id for all layers. The allocator tracks which ids are in use.

    Keys and values to write are (layers, heads, n, head_dim) for n tokens. Whole pages that are read are float32
    (n, layers, heads, page_tokens, head_dim).
    """

    pages: int
    page_bytes: int  # bytes of one page: keys and values of all layers
    on_host: bool  # whether any thread may ``dump`` and ``load`` pages that are not being written; else only the engine's

    def write(self, ids: np.ndarray, places: np.ndarray, k: Any, v: Any) -> None:
        """Write n tokens of one slab, whose pages are ``ids`` (tiles,), at ``places`` (n,) of its ``token_index``."""

    def clear(self, ids: np.ndarray) -> None:
        """Set pages to zero, so that unwritten places in them are finite."""

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        """Copy whole pages from this or another storage; exactly, if both have the same number format."""

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        """Start to ``copy`` concurrently with the device's computation; calling the result makes later computation wait for
        it."""

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of whole pages, dequantised."""

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the bytes of whole pages, for a file, as arrays of n pages each."""

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and type of one page in each array of ``dump``, by name; thread-safe."""

    def finite(self, name: str, array: np.ndarray) -> bool:
        """Return whether the numbers in an array of ``dump``, or some layers of it, are finite; thread-safe."""

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Write back what ``dump`` returned."""

    def staged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what ``dump`` returned, or some layers of it, in memory that the device copies from asynchronously;
        thread-safe."""

    def load_later(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]]) -> Callable[[], Callable[[], None]]:
        """Prepare to ``load`` pages whose layers come in ``groups`` of successive ones, each of which was ``staged``, after all
        work queued so far. Calling the result, in any thread, starts the copy concurrently with the device's computation and
        returns a function that waits for it; until then the arrays must not change, and the pages must stay with their
        holder."""


def with_layers(groups: Sequence[dict[str, np.ndarray]]) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Yield the layers of each of the groups of ``Storage.load_later``, and the group."""
    first = 0
    for arrays in groups:
        last = first + next(iter(arrays.values())).shape[LAYERS]
        yield slice(first, last), arrays
        first = last


class NumpyStorage:
    """Pages in float32, each contiguous over all layers and heads, so that writing one is a plain copy.

    There is one page more than ``pages``, of zeros: ``null_page`` is used wherever a graph of fixed shape needs a page and
    the session has none. All memory is committed at the start: the system allocates and zeroes it in parts of 2 MiB, which
    would cost the first tick to write there milliseconds.
    """

    on_host = True

    def __init__(self, layout: TileLayout, layers: int, heads: int, head_dim: int, pages: int):
        self.pages, self.null_page = pages, pages
        shape = (pages + 1, layers, heads, layout.page_tokens, head_dim)
        self.k, self.v = np.full(shape, 0.0, np.float32), np.full(shape, 0.0, np.float32)
        self.page_bytes = self.k[0].nbytes + self.v[0].nbytes

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return views of keys and values, (rows, page_tokens, head_dim) each, one row for each page, layer and head."""
        return self.k.reshape(-1, *self.k.shape[3:]), self.v.reshape(-1, *self.v.shape[3:])

    def row_index(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of pages, int64 (layers, heads, n)."""
        layers, heads = self.k.shape[1:3]
        return ids * (layers * heads) + np.arange(layers * heads).reshape(layers, heads, 1)

    def write(self, ids: np.ndarray, places: np.ndarray, k: Any, v: Any) -> None:
        tile, offset = np.divmod(places, self.k.shape[3])
        for pool, values in ((self.k, k), (self.v, v)):
            pool[ids[tile], :, :, offset] = np.asarray(values).transpose(2, 0, 1, 3)

    def clear(self, ids: np.ndarray) -> None:
        self.k[ids] = 0.0
        self.v[ids] = 0.0

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        self.k[ids], self.v[ids] = source.read(source_ids)

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        self.copy(ids, source, source_ids)
        return lambda: None

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.k[ids], self.v[ids]

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {'k': self.k[ids], 'v': self.v[ids]}

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return dict.fromkeys('kv', (self.k.shape[1:], self.k.dtype))

    def finite(self, name: str, array: np.ndarray) -> bool:
        return bool(np.isfinite(array).all())

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self._load(ids, [arrays])

    def _load(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]]) -> None:
        for layers, arrays in with_layers(groups):
            self.k[ids, layers], self.v[ids, layers] = arrays['k'], arrays['v']

    def staged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return arrays

    def load_later(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]]) -> Callable[[], Callable[[], None]]:
        def start() -> Callable[[], None]:
            self._load(ids, groups)
            return lambda: None
        return start


@dataclass(frozen=True)
class PagePool:
    """One tier of the cache; ``name`` identifies it in statistics and files."""

    name: str
    allocator: PageAllocator
    storage: Storage

    @classmethod
    def of(cls, name: str, storage: Storage) -> PagePool:
        return cls(name, PageAllocator(storage.pages), storage)

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that are held."""
        return self.allocator.usage().used * self.storage.page_bytes

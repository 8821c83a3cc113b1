"""Which pages are whose: reference counts, arenas of neighbouring pages, and guarantees that branches cannot eat up."""
from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


class OutOfPages(RuntimeError):
    """Pages were asked for beyond what there is, or what the others were guaranteed."""


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
    """Ids 0 to ``pages`` - 1 of the pages of one pool; it knows nothing of what they hold. For any thread.

    Pages are held by leases. A lease with a guarantee gets its pages whatever the others do: there are always as many
    free ones as the guaranteed leases do not hold yet. A branch, which has none, costs nothing as long as it shares a
    session's pages; when the session lets go of them and what was promised could not be kept, the oldest branches
    lose theirs. A page that several guaranteed leases share keeps one promise only: each may need one of its own later.
    """

    def __init__(self, pages: int):
        self._references = np.zeros(pages, np.int32)
        self._of_guaranteed = np.zeros(pages, np.int32)  # of the references, those of leases with a guarantee
        self._uses = np.zeros(pages, np.int64)  # how often each page was given out
        self._free = pages
        self._guaranteed = 0
        self._promised = 0  # of the guaranteed pages, those that are not held yet, or are shared
        self._scattered = 0
        self._branches: deque[weakref.ref[Lease]] = deque()
        self._lock = threading.Lock()
        # Filled by the garbage collector, which may strike while this very thread holds the lock.
        self._abandoned: deque[tuple[Lease, np.ndarray]] = deque()

    @property
    def pages(self) -> int:
        return len(self._references)

    def lease(self, guaranteed: int = 0, surrender: Callable[[Lease], np.ndarray] | None = None) -> Lease:
        """A lease that can always hold ``guaranteed`` pages; raises OutOfPages if that cannot be promised.

        One without a guarantee may hold pages together with guaranteed ones if it has ``surrender``, a method that
        gives them all up when they are needed: it returns their ids, and must not call back.
        """
        lease = Lease(self, guaranteed)
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

    def usage(self) -> Usage:
        with self._lock:
            self._collect()
            starts, ends = self._free_runs()
            longest = int((ends - starts).max(initial=0))
            return Usage(self.pages, self.pages - self._free, int((self._references > 1).sum()), self._guaranteed,
                         longest, 1.0 - longest / self._free if self._free else 0.0, self._scattered)

    def references(self, ids: np.ndarray) -> np.ndarray:
        """How many leases hold each page, int32 (n,)."""
        with self._lock:
            self._collect()
            return self._references[ids]

    def uses(self, ids: np.ndarray) -> np.ndarray:
        """How often each page has been given out, int64 (n,): as long as that is the same, it is held for the same
        purpose, or free since."""
        with self._lock:
            return self._uses[ids]

    def _share_unchanged(self, lease: Lease, ids: np.ndarray, uses: np.ndarray) -> bool:
        with self._lock:
            self._collect()
            if (self._uses[ids] != uses).any() or (self._references[ids] == 0).any():
                return False
            self._admit(lease, len(ids))
            self._hold(lease, ids)
            return True

    def _allocate(self, lease: Lease, count: int) -> np.ndarray:
        with self._lock:
            self._collect()
            self._admit(lease, count)
            if not lease.guaranteed:
                self._require(count, 'needed')
            ids = self._find(count)
            self._uses[ids] += 1
            self._hold(lease, ids)
            return ids

    def _share(self, lease: Lease, ids: np.ndarray) -> None:
        with self._lock:
            self._collect()
            self._admit(lease, len(ids))
            self._hold(lease, ids)

    def _release(self, lease: Lease, ids: np.ndarray) -> None:
        with self._lock:
            self._collect()
            self._let_go(lease, ids)
            while self._free < self._promised and self._branches:
                branch = self._branches.popleft()()
                surrender = branch and branch._surrender()
                if surrender:
                    self._let_go(branch, surrender(branch))

    def _close(self, lease: Lease) -> None:
        with self._lock:
            self._end(lease)

    def _collect(self) -> None:
        while self._abandoned:
            lease, ids = self._abandoned.popleft()
            self._let_go(lease, ids)
            self._end(lease)

    def _admit(self, lease: Lease, count: int) -> None:
        if lease.guaranteed and lease.held + count > lease.guaranteed:
            raise OutOfPages(f'{count} more pages are needed, but of the {lease.guaranteed} guaranteed ones '
                             f'{lease.held} are held: evict slabs, or open the session with a larger window')

    def _require(self, count: int, what: str) -> None:
        spare = self._free - self._promised
        if count > spare:
            raise OutOfPages(f'{count} more pages are {what}, and of {self.pages} only {spare} are free and '
                             f'unreserved: close sessions, drop branches, or make the pool larger')

    def _hold(self, lease: Lease, ids: np.ndarray) -> None:
        # The ids of one lease are distinct, so plain indexing counts each.
        self._free -= int(np.count_nonzero(self._references[ids] == 0))
        self._references[ids] += 1
        lease.held += len(ids)
        if lease.guaranteed:
            self._promised -= int(np.count_nonzero(self._of_guaranteed[ids] == 0))
            self._of_guaranteed[ids] += 1

    def _let_go(self, lease: Lease, ids: np.ndarray) -> None:
        self._references[ids] -= 1
        self._free += int(np.count_nonzero(self._references[ids] == 0))
        lease.held -= len(ids)
        if lease.guaranteed:
            self._of_guaranteed[ids] -= 1
            self._promised += int(np.count_nonzero(self._of_guaranteed[ids] == 0))

    def _end(self, lease: Lease) -> None:
        self._guaranteed -= lease.guaranteed
        self._promised -= lease.guaranteed  # it holds nothing any more
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
    """Pages that are held together; every id at most once."""

    def __init__(self, allocator: PageAllocator, guaranteed: int):
        self._allocator = allocator
        self._surrender: weakref.WeakMethod | None = None
        self.guaranteed = guaranteed
        self.held = 0

    def allocate(self, count: int) -> np.ndarray:
        """Ids int64 (count,) of free pages: the first free run that is long enough, else scattered.

        Raises OutOfPages.
        """
        return self._allocator._allocate(self, count)

    def share(self, ids: np.ndarray) -> None:
        """Holds pages that another lease holds too. Raises OutOfPages beyond what is guaranteed, if anything is."""
        self._allocator._share(self, ids)

    def share_unchanged(self, ids: np.ndarray, uses: np.ndarray) -> bool:
        """As `share`, if others still hold the pages for what they held them when they had been given out ``uses``
        times (see PageAllocator.uses); returns whether that is so."""
        return self._allocator._share_unchanged(self, ids, uses)

    def release(self, ids: np.ndarray) -> None:
        """Gives pages back; those without a reference left are free."""
        self._allocator._release(self, ids)

    def close(self) -> None:
        """Gives up the guarantee, after the pages were released."""
        self._allocator._close(self)

    def abandon(self, ids: np.ndarray) -> None:
        """Releases ``ids`` and closes, from a finalizer: takes no lock, and takes effect with the next call."""
        self._allocator._abandoned.append((self, ids))

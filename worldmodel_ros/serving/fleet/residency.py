"""Decides which sessions of a server have pages, when there are more sessions than pages for them."""
from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from worldmodel_ros.cache.stores.protocol import StoreError
from worldmodel_ros.serving.service.messages import ServiceFull, Tick

_log = logging.getLogger(__name__)
_THREADS = 2       # that move sessions; no more transfers are begun, so that their order is decided as late as possible
_OVERDUE = 0.25    # intervals after the expected tick, and at least
_OVERDUE_S = 0.3   # s, after which no tick of a robot is expected
_INTERVALS = 2     # the shortest of these is expected next, also after a pause
_KEPT = 100        # durations that are remembered
_FEWEST = 5        # durations before which nothing is predicted
_FIRST_LEAD = 0.25  # s ahead of a tick, until the time to fetch a session is known
_LEAD = 1.5        # times the high quantile of that time,
_MARGIN = 0.02     # plus s, ahead of a tick
_FLYING = 1.0      # s after which an unanswered tick is not waited for
_AGAIN = 0.02      # s until a session that was busy may be asked again to leave
_FAILED = 1.0      # s until one that could not be stored, or read, may be: that takes time from the ticks
_QUANTILE = 0.99


class Place(enum.Enum):
    """Where a session is."""

    HERE = 'here'        # it has pages
    LEAVING = 'leaving'  # it is being stored
    AWAY = 'away'        # it is in the store
    COMING = 'coming'    # it is being read


class Transfers(Protocol):
    """Moves a session between pages and store; both methods wait."""

    def leave(self, session: Any) -> bool:
        """Store a session and free its pages; return False if it is busy, and still has them."""

    def come(self, session: Any) -> None:
        """Give a session pages with their former contents. One that is lost begins again; raises if it may still be there."""


@dataclass(eq=False)
class _Record:
    session: Any
    place: Place = Place.HERE
    ticked: float = -math.inf  # when its last tick came, steady s
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    flying: float = -math.inf  # when a tick that is not answered yet was handed over
    begun: float = 0.0         # when its transfer was begun
    not_before: float = 0.0    # when it may be asked to leave, or be fetched
    wanted: bool = False       # a caller or its next tick needs it
    pinned: int = 0            # it must not leave
    held: Tick | None = None

    def due(self, now: float) -> float:
        """Return when its next tick is expected; infinite if none is."""
        if self.wanted or self.held is not None:
            return now
        if not self.intervals:
            return math.inf
        shortest = min(self.intervals)
        due = self.ticked + shortest
        return due if now < due + max(_OVERDUE * shortest, _OVERDUE_S) else math.inf

    def due_after(self, soonest: float, now: float) -> float:
        """Return when the first tick is expected that it can be in time for, if it is here at ``soonest``; infinite if none
        is, ``now`` if it is waited for already."""
        due = self.due(now)
        if self.wanted or self.held is not None or due >= soonest or math.isinf(due):
            return due
        shortest = max(min(self.intervals), 1e-3)
        return due + math.ceil((soonest - due) / shortest) * shortest


class Residency:
    """
    Sessions of one service, of which at most ``places`` have pages at a time. From any thread.

    A thread fetches sessions that are away ahead of their next expected tick, by as long as that takes (a high quantile of
    the measured times), and keeps one place free; of those that are here, the one whose tick is expected last leaves first.
    A tick of a session that is away waits for it, unless it would be late: then it is refused at once, and the session is
    fetched for the next tick that it can be in time for.
    """

    def __init__(self, places: int, transfers: Transfers, hand_over: Callable[[Any, Tick], None],
                 refuse: Callable[[Any, Tick, float], None], expect: Callable[[Any, float], None] = lambda session, when: None
                 ) -> None:
        """``hand_over`` gives a tick of a session that is here to the service; ``refuse`` answers one whose session would be
        here only by a steady time [s]. ``expect`` is called with the time of each session's next expected tick."""
        if places < 1:
            raise ValueError(f'{places} places: at least one session must have pages')
        self._places, self._transfers = places, transfers
        self._hand_over, self._refuse, self._expect = hand_over, refuse, expect
        self._records: dict[Hashable, _Record] = {}
        self._opening = self._wanting = 0  # sessions being opened that have a place, or wait for one
        self._changed = threading.Condition(threading.RLock())
        self._took: deque[float] = deque(maxlen=_KEPT)
        self._left: deque[float] = deque(maxlen=_KEPT)
        self._counts: Counter[str] = Counter()
        self._over = False
        self._executor = ThreadPoolExecutor(_THREADS, 'residency')
        self._thread = threading.Thread(target=self._run, name='residency', daemon=True)
        self._thread.start()

    @contextmanager
    def opening(self, patience: float) -> Iterator[None]:
        """Reserve a place for a session that is opened in the block, and then added. Waits; raises ServiceFull."""
        with self._changed:
            self._wanting += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._free > 0, patience):
                    raise ServiceFull(f'{self._places} sessions have pages, and none could leave for {patience:g} s')
                self._opening += 1
            finally:
                self._wanting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    def add(self, session: Any) -> None:
        """Add a session that is open, and has pages."""
        with self._changed:
            self._records[session] = _Record(session)

    def remove(self, session: Any, patience: float) -> bool:
        """Forget a session; return whether it had pages. Waits for its transfer."""
        with self._changed:
            record = self._records.get(session)
            if record is None:
                return True
            self._changed.wait_for(lambda: record.place in (Place.HERE, Place.AWAY), patience)
            del self._records[session]
            self._changed.notify_all()
            return record.place is Place.HERE

    @contextmanager
    def here(self, session: Any, patience: float) -> Iterator[None]:
        """Fetch a session, and keep it here during the block. Waits; raises ServiceFull."""
        with self._changed:
            record = self._records.get(session) or _Record(session)  # one that ends has none any more, and nothing to wait for
            record.wanted = True
            record.pinned += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: record.place is Place.HERE, patience):
                    raise ServiceFull(f'the session has not got pages for {patience:g} s')
            except BaseException:
                record.pinned -= 1
                raise
            finally:
                record.wanted = False
        try:
            yield
        finally:
            with self._changed:
                record.pinned -= 1
                self._changed.notify_all()

    def tick(self, session: Any, tick: Tick) -> None:
        """Take a tick: hand it over now, or when the session is here, or refuse it. Does not wait."""
        now = time.monotonic()
        with self._changed:
            record = self._records.get(session)
            if record is None:
                self._hand_over(session, tick)
                return
            if record.ticked > -math.inf:
                record.intervals.append(now - record.ticked)
            record.ticked = now
            self._expect(session, record.due(now))
            if record.place is Place.HERE:
                self._counts['found_here'] += 1
                record.flying = now
                self._hand_over(session, tick)
                return
            self._counts['found_away'] += 1
            if record.held is not None:
                self._refuse(session, record.held, now)
                record.held = None
            expected = self._expected(record, now)
            if tick.answer and expected > tick.due:
                self._counts['refused'] += 1
                self._refuse(session, tick, expected)
                record.wanted = not record.intervals  # for the next one, whose time cannot be predicted
            else:
                record.held = tick
            self._changed.notify_all()

    def answered(self, session: Any) -> None:
        """Note that a tick of a session has been answered. Does not wait."""
        with self._changed:
            record = self._records.get(session)
            if record:
                record.flying = -math.inf

    def status(self) -> dict[str, Any]:
        """Return places, sessions and transfers, as JSON values."""
        with self._changed:
            took, left = ([round(float(np.quantile(times, level)) * 1e3, 2) if times else None for level in (0.5, _QUANTILE)]
                          for times in (self._took, self._left))
            return {'places': self._places, 'sessions': len(self._records),
                    'here': sum(record.place is Place.HERE for record in self._records.values()), **self._counts,
                    'come_ms': took, 'leave_ms': left}

    def close(self) -> None:
        """End the threads. Sessions stay where they are."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        self._executor.shutdown()

    # --- decisions ---

    @property
    def _free(self) -> int:
        return self._places - self._opening - sum(record.place is not Place.AWAY for record in self._records.values())

    @property
    def _lead(self) -> float:
        if len(self._took) < _FEWEST:
            return _FIRST_LEAD
        leaving = float(np.quantile(self._left, _QUANTILE)) if self._left else 0.0
        return _LEAD * (float(np.quantile(self._took, _QUANTILE)) + leaving) + _MARGIN

    def _expected(self, record: _Record, now: float) -> float:
        """Return when a session that is not here will be, by measured times; now, if there are too few."""
        if record.place is Place.AWAY:
            now = max(now, record.not_before)
        if len(self._took) < _FEWEST:
            return now
        takes = float(np.quantile(self._took, _QUANTILE))
        return max(now, record.begun + takes) if record.place is Place.COMING else now + takes

    def _run(self) -> None:
        with self._changed:
            while not self._over:
                self._changed.wait(self._decide(time.monotonic()))

    def _decide(self, now: float) -> float | None:
        """Begin the transfers whose time has come; return how long until the next one [s]."""
        lead, soonest = self._lead, math.inf
        # Fetching a session for a tick that it cannot be in time for would cost another one its place: if transfers take all
        # the time there is, all would be too late.
        here = now + (float(np.median(self._took)) if len(self._took) >= _FEWEST else 0.0)
        places = [record.place for record in self._records.values()]
        leaving = places.count(Place.LEAVING)
        threads = _THREADS - leaving - places.count(Place.COMING)
        short = [now] * self._wanting  # for each place needed: only sessions expected later than this may leave
        away = [(record.due_after(here, now), record) for record in self._records.values() if record.place is Place.AWAY]
        for due, record in sorted(away, key=lambda each: each[0]):
            begin = due - lead
            if begin > now:
                soonest = min(soonest, begin)
                break
            if record.not_before > now:
                soonest = min(soonest, record.not_before)
                continue
            if self._free <= self._wanting:
                short.append(due)
            elif threads > 0:
                self._start(record, Place.COMING, self._come, now)
                threads -= 1
        if away or self._wanting:
            short.append(now + lead)  # one place stays free for unexpected sessions
        for after in short[max(0, self._free) + leaving:][:max(0, threads)]:
            victim = self._victim(now, after)
            if victim is None:
                soonest = min(soonest, now + _AGAIN)
                break
            self._start(victim, Place.LEAVING, self._leave, now)
        return None if math.isinf(soonest) else max(0.001, soonest - now)

    def _victim(self, now: float, after: float) -> _Record | None:
        """Return the session, of those here and idle, whose tick is expected last, if that is after ``after``."""
        idle = [record for record in self._records.values()
                if record.place is Place.HERE and not record.pinned and not record.wanted and record.not_before <= now
                and now - record.flying > _FLYING]
        last = max(idle, key=lambda record: (record.due(now), -record.ticked), default=None)
        return last if last is not None and last.due(now) > after else None

    # --- transfers ---

    def _start(self, record: _Record, place: Place, work: Callable[[_Record], None], now: float) -> None:
        record.place, record.begun = place, now
        self._executor.submit(work, record)

    def _leave(self, record: _Record) -> None:
        left, again = False, _AGAIN
        try:
            left = self._transfers.leave(record.session)
        except Exception as error:  # it stays
            again = _FAILED
            _log.warning('a session that was to leave its pages stays: %s', error)
        with self._changed:
            now = time.monotonic()
            self._counts['left' if left else 'busy'] += 1
            if left:
                self._left.append(now - record.begun)
            record.place, record.not_before = (Place.AWAY, now) if left else (Place.HERE, now + again)
            self._deliver(record)

    def _come(self, record: _Record) -> None:
        came = False
        try:
            self._transfers.come(record.session)
            came = True
        except StoreError as error:
            _log.warning('a session cannot be read now: %s', error)
        except Exception:
            _log.exception('a session could not get pages')
        with self._changed:
            now = time.monotonic()
            self._counts['came' if came else 'failed'] += 1
            if came:
                self._took.append(now - record.begun)
            record.place = Place.HERE if came else Place.AWAY
            if not came:  # a later tick tries again
                record.not_before = now + _FAILED
                held, record.held, record.wanted = record.held, None, bool(record.pinned)
                if held is not None:
                    self._refuse(record.session, held, math.inf)
            self._deliver(record)

    def _deliver(self, record: _Record) -> None:
        """Hand over the tick that has waited for a transfer, and wake up waiting threads."""
        if record.place is Place.HERE:
            record.wanted = record.wanted and bool(record.pinned)
            held, record.held = record.held, None
            if held is not None:
                record.flying = time.monotonic()
                try:
                    self._hand_over(record.session, held)
                except Exception as error:  # it was closed meanwhile
                    _log.warning('a tick that has waited for its session came to nothing: %s', error)
        self._changed.notify_all()

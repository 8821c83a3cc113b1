"""Keeps the sessions of one server in a store, so that they outlive the connection, the server and its machine."""
from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worldmodel_ros import realtime
from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.cache.stores.blob import Corrupt
from worldmodel_ros.cache.stores.measured import MeasuredStore
from worldmodel_ros.cache.stores.protocol import NotStored, SlabStore, StoreError
from worldmodel_ros.clocks import Moment
from worldmodel_ros.control.worker import uncancellable_future
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.session_file import Capture
from worldmodel_ros.engine.session_folder import SessionFileError
from worldmodel_ros.engine.session_store import (
    Checkpoint, Fenced, Manifest, SessionLog, StoredSession, check_session, claim, claim_next, owner_of, read_newest)
from worldmodel_ros.engine.session_transfer import advance, wait
from worldmodel_ros.engine.what_if import Question, QuestionError
from worldmodel_ros.serving.service.client import Continuity
from worldmodel_ros.serving.service.messages import Picture, Reply, ServiceFull, ServiceListener, Tick
from worldmodel_ros.serving.service.service import Service
from .residency import Residency

_log = logging.getLogger(__name__)
_THREADS = 4
_STRIPES = 64  # locks that all names share
_UNREACHABLE_S = 60.0  # s after which a session begins again if the store cannot be read; its robot has its own model meanwhile
_HELD_SWITCH = 0.0001  # s for which the engine's thread keeps the GIL while a robot waits for its session to move
_AT_ONCE = 2   # slabs on a device filled together with the adoption: a turn of their own would wait for another batch
_AHEAD = 30.0  # s by which the clock of a session's former host may be ahead of this one's
_OF_THE_KEEPER = ('at', 'since_boot', 'boot', 'newest', 'note')  # keys of a manifest's ``about``; the rest are Continuity's


class TooSlow(StoreError):
    """A session whose reading, by measurement, would take longer than allowed, or that has not ticked for too long."""


@dataclass(frozen=True)
class KeeperSettings:
    """
    ``period`` [s]: a session is stored at most once per period while it ticks, and when it ends or moves. ``patience`` [s]:
    for the service's thread to find a moment between two ticks. ``within`` [s]: a session begins again if, by measurement,
    reading it would take longer. ``longest_gap`` [s]: likewise if it has not ticked for this long, since the robot is
    somewhere else by then. ``groups``: as of ``SessionLog``. ``history``: keep what has left the window. ``places``:
    sessions that have pages at a time, if the service takes more; the others are in the store until they are expected to
    tick (``Residency``). 0: all have. ``files``: as ``Endpoint.files``, for servers on other hosts. ``prepared`` [s]: a
    session that was prepared and has not come by then loses its pages.
    """

    period: float = 0.5
    patience: float = 2.0
    within: float = 2.0
    longest_gap: float = 300.0
    groups: int = 0
    history: bool = False
    places: int = 0
    files: tuple[str, str, str] = ('', '', '')
    prepared: float = 20.0


@dataclass(eq=False)
class Kept:
    """A session of the service that is kept in the store. ``number``: in the service. ``lock``: of its log."""

    name: str
    number: int
    generation: int
    log: SessionLog
    frames: int = 0  # that it had seen when it was opened
    newest: int = 0  # number of its newest tick,
    note: str = ''   # and its robot's newest note
    stored_at: float = -math.inf
    storing: bool = False
    closed: bool = False
    fenced: str = ''  # its new owner, in words
    lock: threading.Lock = field(default_factory=threading.Lock)
    manifest: Manifest | None = None  # the last one,
    stored_frames: int = -1           # and the frames that the session had seen by then
    away: bool = False                # the session has no pages; under the lock
    unread_since: float = math.inf    # steady time since which the store does not answer
    moving: bool = False              # its move stores it
    parts: dict[str, float] = field(default_factory=dict)  # s of its last checkpoint
    ticked_at: Moment = field(default_factory=Moment.now)  # when its newest tick came, here or elsewhere


class Keeper:
    """
    All sessions of a service, by the names that robots give them. ``address``: where this server is reached, written into
    its claims. Methods may be called from any thread; those that say so wait.
    """

    def __init__(self, service: Service, engine: Engine, store: SlabStore, address: str,
                 settings: KeeperSettings = KeeperSettings(),
                 expect: Callable[[str, float], None] = lambda name, when: None) -> None:
        """``engine``: the first one of the service. ``expect``: called with a session's name and the steady time [s] of its
        next expected tick."""
        self._service, self._engine, self.address, self.settings = service, engine, address, settings
        self.store = MeasuredStore(store)
        self._executor = ThreadPoolExecutor(_THREADS, 'keeper')
        # Periodic checkpoints have threads of their own: a robot that waits for its session does not wait for them.
        self._storing = ThreadPoolExecutor(_THREADS, 'storing')
        self._lock = threading.Lock()
        self._names = [threading.RLock() for _ in range(_STRIPES)]  # for sessions that are being opened or ended
        self._coming: dict[str, _Prepared] = {}  # prepared, and not taken over yet; oldest first
        self._parked: dict[str, Kept] = {}  # taken over for a robot that is not here yet
        self._counts: Counter[str] = Counter()
        self._expect = expect
        self.residency = Residency(
            settings.places, _Pages(self), lambda kept, tick: service.tick(kept.number, tick), self._refuse,
            lambda kept, when: expect(kept.name, when)) if settings.places else None
        for pool in engine.memory.pools:
            pool.allocator.givers.append(self._give_pages)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Promise:
        """Have one of the keeper's threads call a function, which may wait."""
        return self._executor.submit(function, *arguments)

    def open(self, listener: ServiceListener, account: Hashable, name: str, wanted: Callable[[], bool] = lambda: True
             ) -> Kept | None:
        """
        Open the session of a robot: the one that was taken over for it, the one in the store, or a new one. None if it is not
        ``wanted`` any more by the time that no other call is opening it: then nothing was claimed.

        Waits. Raises ServiceFull, StoreError, and ValueError for an invalid name.
        """
        check_session(name)
        with self._alone(name):
            if not wanted():
                return None
            with self._lock:
                parked = self._parked.pop(name, None)
            if parked:
                self._service.listen(parked.number, listener, account)
                self._counts['attached'] += 1
                return parked
            generation = claim_next(self.store, name, self.address)
            stored = self._prepared(name) or self._engine.stored_session(self.store)
            try:
                try:
                    manifest, wrong = read_newest(self.store, name, stored, self._allow)
                    for reason in wrong:
                        _log.error('session %s: %s; an earlier state of it is used', name, reason)
                    kept = self._go_on(listener, account, stored, manifest, generation, {})
                    self._counts['resumed'] += 1
                    return kept
                except NotStored as error:
                    if '; ' in str(error):
                        _log.error('%s', error)
                except (TooSlow, SessionFileError, OutOfPages) as error:
                    _log.warning('session %s begins again: %s', name, error)
                    self._counts['refused'] += 1
            finally:
                stored.close()
            with self._place():
                number = self._service.open(listener, account=account)
                self._counts['begun'] += 1
                return self._added(Kept(name, number, generation, self._log_of(name, generation)))

    def prepare(self, name: str) -> Manifest:
        """
        Load the stored part of a session that is about to come into pages, so that little is left when it does.

        It loses them if others need them, and if it has not come for a while. Waits. Raises ServiceFull, OutOfPages,
        StoreError, SessionFileError.
        """
        check_session(name)
        if self._service.full:
            raise ServiceFull('this server has no place for another session')
        with self._alone(name):
            stored, manifest = self._read(name)
            try:
                self._fill(stored)
            except BaseException:
                stored.close()
                raise
            timer = threading.Timer(self.settings.prepared, self._give_back, [name, stored])
            timer.daemon = True
            with self._lock:
                self._coming[name] = _Prepared(stored, timer)
            timer.start()
            return manifest

    def take_over(self, name: str, generation: int) -> Kept:
        """
        Become the owner of a session, and get it ready for its robot.

        Waits. Raises StoreError; AlreadyStored if another server owns this generation; ServiceFull.
        """
        check_session(name)
        parts: dict[str, float] = {}
        with self._alone(name), realtime.switching_at(_HELD_SWITCH):
            with _timed(parts, 'read'):
                stored, manifest = self._read(name)  # what is new since it was prepared
            try:
                if manifest.generation != generation - 1:
                    raise Fenced(f'session {name} is at generation {manifest.generation} in the store, not {generation - 1}')
                # The session is opened before it is claimed: the claim ends the other server's.
                kept = self._go_on(_Parked(), None, stored, manifest, generation, parts)
                try:
                    with _timed(parts, 'claim'):
                        claim(self.store, name, generation, self.address)
                except BaseException:
                    if self.residency:
                        self.residency.remove(kept, self.settings.patience)
                    self._service.close(kept.number)
                    raise
            finally:
                stored.close()
            with self._lock:
                self._parked[name] = kept
            self._counts['taken_over'] += 1
        _log.info('session %s was taken over in %.1f ms: %s', name, sum(parts.values()) * 1e3, in_words(parts))
        return kept

    def expects(self, name: str) -> bool:
        """Return whether a session was taken over for a robot that is not here yet."""
        with self._lock:
            return name in self._parked

    def rest(self, kept: Kept) -> None:
        """Store a session whose robot is not connected, and may continue with another server. Does not wait."""
        if not kept.closed and not kept.fenced:  # even behind a checkpoint in progress, which may lack the last tick
            self._storing.submit(self._store, kept)

    def give_up(self, kept: Kept) -> None:
        """End a session that was taken over, if its robot has not come. Waits."""
        with self._lock:
            if self._parked.get(kept.name) is not kept:
                return
            del self._parked[kept.name]
        self.end(kept)

    def ticked(self, kept: Kept) -> None:
        """Note an answered tick, and store the session unless it was stored recently. Does not wait."""
        now = time.monotonic()
        if self.residency:
            self.residency.answered(kept)
        busy = kept.storing or kept.moving or kept.closed or kept.fenced
        if busy or now - kept.stored_at < self.settings.period:
            return
        kept.storing, kept.stored_at = True, now
        self._storing.submit(self._store, kept)

    def tick(self, kept: Kept, tick: Tick) -> None:
        """Hand a tick to the service: at once, or when its session has pages. Raises as ``Service.tick``."""
        kept.ticked_at = Moment.now()
        if self.residency:
            self.residency.tick(kept, tick)
        else:
            self._expect(kept.name, time.monotonic() + self._service.spec.step_period)
            self._service.tick(kept.number, tick)

    def ask(self, kept: Kept, question: Question) -> Promise:
        """As ``Service.ask``, for a session that may have to be fetched first."""
        if not self.residency:
            return self._service.ask(kept.number, question)
        promise = uncancellable_future()

        def ask() -> None:
            try:
                with ExitStack() as stack:
                    stack.enter_context(self.here(kept))
                    asked = self._service.ask(kept.number, question)
                    asked.add_done_callback(partial(_answered, promise, stack.pop_all()))
            except Exception as error:  # a client waits for the answer
                promise.set_exception(error)
        self._executor.submit(ask)
        return promise

    @contextmanager
    def here(self, kept: Kept) -> Iterator[None]:
        """Have a session keep, or get, its pages during the block. Waits; raises ServiceFull."""
        if self.residency:
            with self.residency.here(kept, self.settings.patience):
                yield
        else:
            yield

    def checkpoint(self, kept: Kept, held: bool = False) -> Manifest:
        """Store the session as it is now, and delete what is no longer needed. ``held``: its robot waits, so pages are copied
        between the next two batches instead of in idle time, and nothing is deleted. Waits; raises StoreError (Fenced if
        another server owns it), SessionFileError, and ValueError if it has seen nothing."""
        with kept.lock, realtime.switching_at(_HELD_SWITCH) if held else nullcontext():
            if kept.away:  # it was stored as it left
                if not kept.stored_frames:
                    raise ValueError(f'session {kept.name} has seen no frame yet')
                return kept.manifest
            return self._checkpoint(kept, held)

    def _checkpoint(self, kept: Kept, held: bool = False) -> Manifest:
        def begin(capture: Capture, continuity: Continuity) -> tuple[Checkpoint, Iterator[None], int, bool]:
            checkpoint = kept.log.checkpoint(capture, {**continuity.to_dict(), **kept.ticked_at.to_dict(),
                                                       'newest': kept.newest, 'note': kept.note})
            pieces = checkpoint.pieces()
            # Mostly one slab is new. A turn of its own would come after another batch, such as the answer's images.
            more = checkpoint.on_host or not held or advance(pieces)
            return checkpoint, pieces, int(capture.state['time'][0]) + 1, more
        with _timed(kept.parts, 'capture'):
            checkpoint, pieces, frames, more = wait(self._service.captured(kept.number, begin), self.settings.patience)
        with _timed(kept.parts, 'copy'):
            if more:
                self._service.run_pieces(None if held else kept.number, pieces, checkpoint.on_host, self.settings.patience)
        with _timed(kept.parts, 'write'):
            kept.manifest = checkpoint.write(prune=not held)
        kept.stored_frames = frames
        kept.stored_at = time.monotonic()
        self._counts['stored'] += 1
        return kept.manifest

    def reclaim(self, kept: Kept) -> None:
        """Raise the generation of a session that stays here after all. Waits; raises AlreadyStored if another server was
        faster, and owns it."""
        claim(self.store, kept.name, kept.generation + 1, self.address)
        with kept.lock:
            kept.generation += 1
            kept.log.generation = kept.generation

    def owner(self, name: str) -> tuple[int, str]:
        """Return the generation and the address of the owner of a session. Waits; raises StoreError."""
        return owner_of(self.store, name)

    def end(self, kept: Kept, store: bool = True) -> None:
        """Close a session; store it first, unless another server owns it. Waits."""
        with self._alone(kept.name):
            if kept.closed:
                return
            kept.closed = True
            here = not self.residency or self.residency.remove(kept, self.settings.patience)
            self._expect(kept.name, math.inf)
            if here and store and not kept.fenced:
                try:
                    self.checkpoint(kept)
                except Exception as error:  # the session ends in any case
                    seen_nothing = isinstance(error, ValueError) and not isinstance(error, SessionFileError)
                    if not seen_nothing:
                        _log.warning('session %s is not stored as it ended: %s', kept.name, error)
            self._service.close(kept.number)

    def close(self) -> None:
        """End parked and prepared sessions, and the threads. The store is not touched."""
        with self._lock:
            parked = list(self._parked.values())
        for kept in parked:
            self.give_up(kept)
        for executor in (self._executor, self._storing):
            executor.shutdown()  # sessions that end are stored first
        while self._give_pages():
            pass
        for pool in self._engine.memory.pools:
            pool.allocator.givers.remove(self._give_pages)
        if self.residency:
            self.residency.close()

    def status(self) -> dict[str, Any]:
        """Return counts, and how fast the store is, as JSON values."""
        rate = self.store.bandwidth
        residency = {'residency': self.residency.status()} if self.residency else {}
        return {'address': self.address, **self._counts, 'parked': len(self._parked), **residency,
                'shared_slabs': self._engine.slab_index.shared,
                'store_read_mb_s': None if rate is None else round(rate / 1e6, 1)}

    def _allow(self, manifest: Manifest) -> None:
        """Raise TooSlow if a session must not be read."""
        gap = Moment.from_dict(manifest.about).ago()
        if gap < -_AHEAD:
            raise TooSlow(f'by the clock of this host its last tick comes only in {-gap:.0f} s: synchronise the clocks of '
                          'the hosts')
        if gap > self.settings.longest_gap:
            raise TooSlow(f'it has not ticked for {gap:.0f} s, and at most {self.settings.longest_gap:g} are allowed')
        predicted = self.store.predicted(manifest.nbytes)
        if predicted is not None and predicted > self.settings.within:
            raise TooSlow(f'to read its {manifest.nbytes / 1e6:.1f} MB would take {predicted:.2f} s by what was measured, and '
                          f'{self.settings.within:g} are allowed')

    def _read(self, name: str) -> tuple[StoredSession, Manifest]:
        """Read the newest state of a session, on top of what was prepared of it; its pages are yet to be filled."""
        stored = self._prepared(name) or self._engine.stored_session(self.store)
        try:
            manifest, _ = read_newest(self.store, name, stored)
            return stored, manifest
        except BaseException:
            stored.close()
            raise

    def _prepared(self, name: str) -> StoredSession | None:
        """Return what was prepared of a session, if anything; the caller owns it, and it is no longer given up for others."""
        with self._lock:
            prepared = self._coming.pop(name, None)
        if prepared is None:
            return None
        prepared.timer.cancel()
        return prepared.stored

    def _give_back(self, name: str, stored: StoredSession) -> None:
        """Free the pages of a session that was prepared and has not come."""
        with self._lock:
            if name not in self._coming or self._coming[name].stored is not stored:
                return
            del self._coming[name]
        _log.info('session %s was prepared, and has not come: its pages are given back', name)
        stored.close()

    def _give_pages(self) -> bool:
        """Give up the session that was prepared first, to free pages; return whether there was one. Any thread that takes pages
        may call it, even the engine's: nothing of that session is being read or filled, so this does not wait."""
        with self._lock:
            name = next(iter(self._coming), None)
            prepared = self._coming.pop(name) if name is not None else None
        if prepared is None:
            return False
        prepared.timer.cancel()
        prepared.stored.close()
        return True

    def _go_on(self, listener: ServiceListener, account: Hashable, stored: StoredSession, manifest: Manifest,
               generation: int, parts: dict[str, float]) -> Kept:
        """``parts``: receives how long each part took [s]."""
        try:
            continuity = Continuity.from_dict({
                key: value for key, value in manifest.about.items() if key not in _OF_THE_KEEPER})
            newest, note = int(manifest.about.get('newest', 0)), str(manifest.about.get('note', ''))
        except ValueError as error:
            raise SessionFileError(f'session {manifest.session}: {error}') from error
        with ExitStack() as place:
            with _timed(parts, 'open'):
                place.enter_context(self._place())
                number = self._service.open(listener, continuity.seed, account)
            try:
                with _timed(parts, 'fill'):
                    if stored.on_host or stored.left > _AT_ONCE:
                        self._fill(stored)
                with _timed(parts, 'adopt'):
                    wait(self._service.adopt(number, stored, continuity), self.settings.patience)
            except BaseException:
                self._service.close(number)
                raise
            frames = int(stored.state['time'][0]) + 1
            log = self._log_of(manifest.session, generation, manifest)
            log.came_back(manifest, stored.uses)
            return self._added(Kept(manifest.session, number, generation, log, frames, newest, note,
                                    ticked_at=Moment.from_dict(manifest.about)))

    def _fill(self, stored: StoredSession) -> None:
        """Fill a session's pages. On a device, the engine's thread allocates them in turns of a millisecond, and the device
        fills them while ticks continue."""
        self._service.run_pieces(None, stored.pieces(), stored.on_host, self.settings.patience)
        stored.settle()

    def _place(self) -> AbstractContextManager[None]:
        return self.residency.opening(self.settings.patience) if self.residency else nullcontext()

    def _added(self, kept: Kept) -> Kept:
        if self.residency:
            self.residency.add(kept)
        return kept

    def _refuse(self, kept: Kept, tick: Tick, expected: float) -> None:
        wait_for = (expected - time.monotonic()) * 1e3
        reason = f'its session is in the store, and would have its pages in {wait_for:.0f} ms' if wait_for > 0.0 else \
            'its session was still on its way from the store when a newer tick came'
        self._service.refuse(kept.number, tick, reason, expected)

    def _log_of(self, name: str, generation: int, known: Manifest | None = None) -> SessionLog:
        return SessionLog(self.store, name, generation, self.settings.groups, self._engine.slab_index, known,
                          self.settings.history)

    def _store(self, kept: Kept) -> None:
        try:
            self.checkpoint(kept)
        except Fenced as error:
            kept.fenced = str(error)
            _log.error('%s: it is not stored from here any more', error)
        except Exception as error:
            if not kept.closed:
                self._counts['not_stored'] += 1
                _log.warning('session %s is not stored: %s', kept.name, error)
        finally:
            kept.storing = False

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with self._names[hash(name) % _STRIPES]:
            yield


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A session that is in pages before it comes. ``timer``: frees these."""

    stored: StoredSession
    timer: threading.Timer


class _Pages:
    """Moves a keeper's sessions between pages and store, for its residency."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def leave(self, kept: Kept) -> bool:
        keeper, service = self._keeper, self._keeper._service
        # A refused tick's frame that is still to be taken in would have to be stored too: not now, then.
        if kept.fenced or kept.closed or not service.settled(kept.number):
            return False
        with kept.lock:
            frames = service.frames_seen(kept.number)
            if not frames:
                kept.stored_frames = 0
            elif frames != kept.stored_frames:
                keeper._checkpoint(kept)
            kept.away = wait(service.leave(kept.number, kept.stored_frames), keeper.settings.patience)
            return kept.away

    def come(self, kept: Kept) -> None:
        keeper, service = self._keeper, self._keeper._service
        with kept.lock:
            if kept.stored_frames:
                self._read(kept)
            else:
                service.come_back(kept.number, None, keeper.settings.patience)
            kept.away = False

    def _read(self, kept: Kept) -> None:
        keeper, service = self._keeper, self._keeper._service
        stored = keeper._engine.stored_session(keeper.store)
        try:
            stored.read(kept.manifest)
            service.come_back(kept.number, stored, keeper.settings.patience)
            kept.log.came_back(kept.manifest, stored.uses)
            kept.unread_since = math.inf
        except (StoreError, SessionFileError) as error:
            if isinstance(error, StoreError) and not isinstance(error, (Corrupt, NotStored)):
                now = time.monotonic()
                kept.unread_since = min(kept.unread_since, now)
                if now < kept.unread_since + _UNREACHABLE_S:
                    raise  # nothing is lost yet: the store may be away for a moment
            kept.unread_since = math.inf
            _log.error('session %s begins again: %s', kept.name, error)
            service.reset(kept.number)
        finally:
            stored.close()


@contextmanager
def _timed(parts: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    parts[part] = time.perf_counter() - start


def in_words(parts: dict[str, float]) -> str:
    """Return the times of parts [s] as a text in ms, for logs."""
    return ', '.join(f'{part} {seconds * 1e3:.1f}' for part, seconds in parts.items())


def _answered(promise: Promise, stack: ExitStack, done: Promise) -> None:
    stack.close()
    if done.cancelled() or done.exception():
        promise.set_exception(QuestionError('the session was closed meanwhile') if done.cancelled() else done.exception())
    else:
        promise.set_result(done.result())


class _Parked:
    """The listener of a session whose robot is not here yet."""

    def replied(self, reply: Reply) -> None:
        pass

    def pictured(self, picture: Picture) -> None:
        pass

    def failed(self, reason: str, error: Exception) -> None:
        _log.error('a session that was taken over failed: %s', reason, exc_info=error)

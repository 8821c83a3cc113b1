"""Many sessions on one device: takes ticks and questions from any thread, and runs them in batches in one of its own.

The scheduler decides what runs next, and knows requests by number; ``Requests`` maps them to clients and handles their results;
the jobs know what to compute. Questions wait in ``Questions`` while there are ticks to run.
"""
from __future__ import annotations

import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future as Promise
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from worldmodel_ros import realtime
from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.control.worker import WorkThread, uncancellable_future
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.session_file import Capture
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.session_store import StoredSession
from worldmodel_ros.engine.session_transfer import Transfer, run_pieces, wait
from worldmodel_ros.engine.what_if import Question, QuestionError
from worldmodel_ros.serving.scheduler import EDF_LADDER, Batch, Kind, Policy, Scheduler, Settings, StepTable
from .calibration import calibrate
from .client import Client, Continuity, ModelSession
from .jobs import BorderJob, CallJob, Job, PagesJob, run_batch
from .messages import ServiceFull, ServiceListener, SessionError, Tick, check, require_alike
from .networks import Networks
from .questions import Questions, Waiting
from .quotas import Quotas
from .requests import Requests
from .states import Event, State

Result = TypeVar('Result')

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceSettings:
    """
    ``sessions``: how many may be open; None for as many as the engines were made for. ``pictures``: whether predictions are
    decoded. ``priority``: SCHED_FIFO priority of the thread that runs the networks; 0 for none. ``quotas``: of each account.
    """

    sessions: int | None = None
    policy: Policy = EDF_LADDER
    scheduling: Settings = field(default_factory=Settings)
    pictures: bool = True
    priority: int = 0
    quotas: Quotas = Quotas()


class Service:
    """One device, and the one thread that runs its networks. The public methods may be called from any thread.

    ``smaller``: an engine for the same robot, for the tier SMALLER. ``table``: step times that were measured before;
    without it, ``start`` measures them.
    """

    def __init__(self, engine: Engine, smaller: Engine | None = None, settings: ServiceSettings | None = None,
                 clock: Callable[[], float] = time.monotonic, table: StepTable | None = None):
        self.settings = settings or ServiceSettings()
        engines = [engine] + [smaller] * (smaller is not None)
        require_alike([each.spec for each in engines])
        self.spec = engine.spec
        self.table = table or StepTable(padded=len(engine.backend.sizes) > 1)
        self._calibrated = table is not None
        names = [each.spec.name for each in engines]
        if len(set(names)) < len(names):
            names[1] += '-smaller'
        self._models = {name: Networks(each, name) for name, each in zip(names, engines)}
        self._engines, self._clock = engines, clock
        self._capacity = self.settings.sessions or min(each.sessions for each in engines)
        scheduler = Scheduler(self.table, self.settings.policy, self.settings.scheduling)
        self._requests = Requests(scheduler, list(self._models.values()), self.settings.pictures, self.settings.quotas)
        self._clients: dict[int, Client] = {}
        self._opened = 0
        self._questions = Questions()
        self._border: deque[CallJob | BorderJob] = deque()  # calls made between two batches, before anything else
        self._thread = WorkThread('service')
        self._wake = self._thread.wake
        self._started = self._busy = 0.0

    def calibrate(self) -> None:
        """Measure the step times, unless they are known."""
        if not self._calibrated:
            for networks in self._models.values():
                with networks.engine.backend.starting_up():
                    calibrate(networks, self.table, self._clock)
            self._calibrated = True

    def start(self) -> None:
        """Start the thread, and return when it has calibrated; raises any error of that."""
        self._thread.start(self.step, _failed, self._prepared)

    def stop(self) -> None:
        """Close all sessions and end the thread after the batch in progress."""
        for number in list(self._clients):
            self.close(number)
        self._thread.stop()
        self._questions.cancel()
        while self._border:
            promise = self._border.popleft().promise
            if not promise.done():
                promise.set_exception(QuestionError('the service was stopped'))

    def open(self, listener: ServiceListener, seed: int = 0, account: Hashable = None) -> int:
        """Open a session; return its number, never used before. Raises ServiceFull.

        ``account``: the one whose quotas and share of the device it is served from, alone or with other sessions; None: its
        own.
        """
        with self._wake:
            if len(self._clients) >= self._capacity:
                raise ServiceFull(f'{self._capacity} sessions are open, and there is room for no more: close one, or '
                                  f'start the service for more sessions')
            try:
                number = self._opened + 1
                client = Client(number, listener, self._engines, seed, number if account is None else account)
            except OutOfPages as error:
                raise ServiceFull(f'no memory is left for another session: {error}') from error
            self._opened += 1
            self._clients[client.number] = client
            return client.number

    @property
    def full(self) -> bool:
        """Whether no more sessions can be opened."""
        with self._wake:
            return len(self._clients) >= self._capacity

    def tick(self, session: int, tick: Tick) -> None:
        """Hand over a frame; the reply comes through the listener, for a refusal at arrival before this returns.

        Raises ValueError for a tick that does not fit the model.
        """
        check(tick, self.spec)
        with self._wake:
            client = self._client(session)
            if not self._calibrated:
                raise SessionError('the service has no step times: start it before the first tick')
            self._requests.tick(client, tick, self._clock())
            deliveries = self._requests.take_deliveries()
            self._thread.stir()
        _deliver(deliveries)

    def refuse(self, session: int, tick: Tick, reason: str, expected: float) -> None:
        """Refuse a tick whose session would have its pages only at ``expected`` [s, steady]; its frame is not taken in."""
        with self._wake:
            self._requests.refuse(self._client(session), tick, reason, expected, self._clock())
            deliveries = self._requests.take_deliveries()
        _deliver(deliveries)

    def ask(self, session: int, question: Question) -> Promise:
        """Ask a question; the promise holds a ``what_if.Answer``, or raises QuestionError."""
        with self._wake:
            client = self._client(session)
            refusal = self._requests.over_questions(client, self._clock())
            promise = self._questions.ask(client, question) if not refusal else uncancellable_future()
            self._thread.stir()
        if refusal:
            promise.set_exception(refusal)
        return promise

    def save(self, session: int, folder: SessionFolder, name: str) -> str:
        """Write a session to a file, in the calling thread, which waits for idle time; return how long it took, in words.
        Raises SessionFileError."""
        return Transfer(self._engines[0], partial(self._call, session, loads=False)).save(folder, name)

    def load(self, session: int, folder: SessionFolder, name: str) -> str:
        """Replace a session by one from a file; as ``save``. If it raises, nothing was changed."""
        return Transfer(self._engines[0], partial(self._call, session, loads=False)).load(
            folder, name, partial(self._call, session, loads=True))

    def listen(self, session: int, listener: ServiceListener, account: Hashable) -> None:
        """Set the listener and account of a session that has no tick in flight."""
        with self._wake:
            client = self._client(session)
            client.listener, client.account = listener, account

    def settled(self, session: int) -> bool:
        """Return whether no frame of a session is in flight: it is between two ticks."""
        with self._wake:
            return self._requests.settled(self._client(session))

    def captured(self, session: int, take: Callable[[Capture, Continuity], Result]) -> Promise[Result]:
        """Return a promise of the result of ``take``, called in the service's thread right after the batch in progress, with
        the session and what else its next answer depends on. It does not wait for idle time, since sessions move away when the
        device is busy. The promise raises ValueError before the first frame, QuestionError when the session ends."""
        with self._wake:
            client = self._client(session)
            return self._at_border(CallJob(client, lambda live: take(live.capture(), client.continuity()),
                                           uncancellable_future(), False))

    def run_pieces(self, session: int | None, pieces: Iterator[None], on_host: bool, patience: float) -> None:
        """Run ``pieces`` that copy or fill pages: in this thread if the pages are in host memory, otherwise one by one in the
        service's thread, waiting for each at most ``patience`` s. With a ``session``, whose pages these are, they run in idle
        time; with None, for an incoming session or one that a robot waits for, each runs between the next two batches. Raises
        what ``pieces`` raise, and SessionFileError."""
        def at_border(function: Callable[[Any], Any]) -> Promise:
            with self._wake:
                return self._at_border(BorderJob(lambda: function(None), Promise()))
        run_pieces(pieces, on_host, at_border if session is None else partial(self._call, session, loads=False), patience)

    def adopt(self, session: int, stored: StoredSession, continuity: Continuity) -> Promise[None]:
        """Have a session that has seen nothing continue as one that was captured elsewhere. Pages that are not filled yet are
        filled in the same turn of the service's thread."""
        def go_on(live: Session) -> None:
            for _ in stored.pieces():
                pass
            live.restore(stored)
        with self._wake:
            client = self._client(session)
            seen = client.go_on(continuity)
            return self._at_border(CallJob(client, go_on, uncancellable_future(), True, seen, continuity.stamp))

    def frames_seen(self, session: int) -> int:
        """Return how many frames a session has seen; 0 if it has no pages."""
        with self._wake:
            live = self._client(session).models[0].session
            return live.frames_seen if live else 0

    def leave(self, session: int, frames: int) -> Promise[bool]:
        """Free a session's pages between two batches. The promise is False if it has not seen exactly the ``frames`` frames
        that are in a store, or if anything is in flight for it. It continues only by ``come_back``."""
        def leave(model: ModelSession) -> bool:
            with self._wake:
                idle = client.state in (State.EMPTY, State.READY) and self._requests.settled(client)
            if not idle or model.session is None or model.session.frames_seen != frames:
                return False
            model.leave()
            return True
        with self._wake:
            client = self._client(session)
            return self._at_border(PagesJob(client, leave, Promise()))

    def come_back(self, session: int, stored: StoredSession | None, patience: float) -> None:
        """Give a session pages again after ``leave``, filled with ``stored``; None: it has seen nothing. Waits at most
        ``patience`` s for each part. Raises OutOfPages, SessionFileError; QuestionError when the session ends."""
        if stored:
            self.run_pieces(None, stored.pieces(), stored.on_host, patience)
            stored.settle()
        with self._wake:
            back = self._at_border(PagesJob(self._client(session), lambda model: model.come_back(stored), Promise()))
        wait(back, patience)

    def reset(self, session: int) -> None:
        """Forget all frames. What is in flight is cancelled: ticks are replied to with a refusal."""
        self._end(session, Event.RESET, 'the session was reset')

    def close(self, session: int) -> None:
        """Close a session and free its place."""
        self._end(session, Event.CLOSE, 'the session was closed')

    def stats(self) -> dict:
        """Return the statistics since the start, as JSON values."""
        with self._wake:
            elapsed = self._clock() - self._started
            pages = [pool.allocator.usage() for engine in self._engines for pool in engine.memory.pools]
            return {'models': list(self._models), 'backend': self._engines[0].backend.name,
                    'sessions': len(self._clients), 'most_sessions': self.settings.sessions, 'waiting': self._requests.waiting,
                    'pages': {'used': sum(each.used for each in pages), 'total': sum(each.pages for each in pages)},
                    **self._requests.statistics.summary(),
                    'busy': round(self._busy / elapsed, 4) if self._thread.running and elapsed > 0 else 0.0,
                    'step_times': self.table.to_dict('', self.spec.name)['rows'] if self._calibrated else []}

    def phase(self) -> float:
        """Return the best phase of a new client's ticks, steady time modulo the step period [s]: amid the widest gap."""
        with self._wake:
            return self._requests.phase(self.spec.step_period)

    def _call(self, session: int, function: Callable[[Session], Any], loads: bool) -> Promise:
        promise = uncancellable_future()
        with self._wake:
            self._requests.call(CallJob(self._client(session), function, promise, loads), self._clock())
            self._thread.stir()
        return promise

    def _at_border(self, job: CallJob | BorderJob) -> Promise:
        self._border.append(job)
        self._thread.stir()
        return job.promise

    def _run_border(self, job: CallJob | BorderJob) -> None:
        try:
            if job.stale:
                raise QuestionError(job.client.reason)
            job.run()
            if job.loads:
                with self._wake:
                    job.client.event(Event.OBSERVED)
        except Exception as error:  # a thread may wait for the promise
            if not job.promise.done():
                job.promise.set_exception(error)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        realtime.apply(LOG, self.settings.priority)  # before calibration: it changes the times
        # Another Python thread, taking a tick or reading a socket, can keep this one waiting that long.
        sys.setswitchinterval(realtime.SWITCH_INTERVAL)
        self.calibrate()
        self._started = self._clock()
        # Collecting the garbage of start-up takes longer than a step.
        gc.collect()
        gc.freeze()
        yield

    def _end(self, session: int, event: Event, reason: str) -> None:
        with self._wake:
            client = self._client(session)
            self._requests.begin_anew(client, event, reason, self._clock())
            if event is Event.CLOSE:
                del self._clients[session]
            deliveries = self._requests.take_deliveries()
            self._thread.stir()
        _deliver(deliveries)

    def _client(self, session: int) -> Client:
        if session not in self._clients:
            raise SessionError(f'session {session} is not open: it was closed, or never opened')
        return self._clients[session]

    def step(self) -> float | None:
        """Do the most urgent piece of work; return how long there is no more [s], None for until more comes."""
        if self._border:
            self._run_border(self._border.popleft())
        patience = 0.0
        with self._wake:
            drawn = self._requests.next(self._clock())
            over = self._questions.take_expired(self._clock())
            self._requests.statistics.counts['what_if_incomplete'] += len(over)
            busy = drawn and drawn[0].kind is Kind.TICK
            asked = None if busy else self._questions.next()
            deliveries = self._requests.take_deliveries()
            if not (asked or drawn or self._border):
                wake_at = self._requests.wake_at(self._clock())
                patience = None if wake_at is None else max(0.0, wake_at - self._clock())
        _deliver([*deliveries, *over])
        self._thread.urgent(bool(busy) or not (asked or drawn))
        if drawn:
            self._execute(*drawn)
        if asked:
            self._begin_question(asked)
        return patience

    def _execute(self, batch: Batch, jobs: list[Job]) -> None:
        backend = self._models[batch.network.rpartition('/')[0]].engine.backend
        errors, finish = run_batch(batch, jobs, backend, self._clock)
        with self._wake:
            self._busy += finish - batch.begun
            self._requests.finished(batch, jobs, errors, finish)
            deliveries = self._requests.take_deliveries()
        _deliver(deliveries)

    def _begin_question(self, waiting: Waiting) -> None:
        try:
            branches = waiting.branches(next(iter(self._models.values())))
            with self._wake:
                self._requests.question(waiting.client, branches, waiting.question.due, self._clock())
        except Exception as error:  # a thread waits for the promise
            waiting.refuse(error)


def _deliver(deliveries: list[Callable[[], Any]]) -> None:
    for deliver in deliveries:
        try:
            deliver()
        except Exception:  # a listener's
            LOG.exception('a listener of the service failed')


def _failed(error: Exception) -> None:
    """Handle an error of the service itself, not of a session: other sessions must continue."""
    end_if_lost(error)
    LOG.error('the service goes on after an error of its own', exc_info=error)

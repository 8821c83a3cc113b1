"""The server's engine as seen by a robot's node: sends observations, receives answers, and detects a lost server."""
from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future as Promise, TimeoutError as TimeUp
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from worldmodel_ros.control.deciding_worker import Decided
from worldmodel_ros.control.ladder import MODEL_TIERS, Tier
from worldmodel_ros.control.responder import Listener, Observation, Prediction, Responder
from worldmodel_ros.engine import what_if
from worldmodel_ros.engine.session_folder import SessionFileError, check_name
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import AddressError
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import ConnectionLost
from .link import STORE_TIMEOUT, Link, Outdated, Unavailable, open_link
from .network import Endpoint, EndpointError, server_address
from .requests import RemoteRequests, to_future

PATIENCE = 0.15     # s without an answer to a tick after which the server hangs: less than a plan has actions for
_OVERDUE = 0.1      # s after the deadline, if that is later: with a longer deadline, an answer may take longer
_POLL = 0.03        # s between two checks for overdue answers
_LATE_IN_A_ROW = 3  # answers after which the server is too slow: as many as the last plan of 4 bridges
_FILE_PATIENCE = 30.0  # s for the server to save or load a session
_RETURN = 0.001     # s that an answer takes from the server to the node
_STOP = 1.0         # s that ``stop`` waits for the thread: longer than it takes, unless a server that hangs is being connected
_RETRY = (0.25, 2.0)  # s between attempts to connect, from the first to the later ones
_OUTDATED = 5       # attempts in a row that find an older generation: the store is lost, or the server has none any more
_UNSHOWN = 16       # answers whose images are still expected, at most


class Chooser(Protocol):
    """Decides between this engine and the robot's own. Called from the worker's thread."""

    def connected(self, link: Link) -> None:
        """A session on the server is open, which has seen nothing yet."""

    def away(self, reason: str, observation: Observation | None, idle: bool = False) -> None:
        """
        There is no session, or it is of no use; ``observation``: the newest that it has not answered. ``idle``: it ended only
        because nothing was observed.
        """

    def tried(self, good: bool) -> None:
        """A trial has ended; ``good``: with a plan in time."""


class _Away(RuntimeError):
    """The server is there, but of no use."""


class _Moved(Exception):
    """The session is on another server."""

    def __init__(self, moved: messages.Moved) -> None:
        super().__init__(f'it has moved to {moved.address}')
        self.address, self.generation = moved.address, moved.generation


class _Idle(_Away):
    """The server has ended the session because nothing was observed for a long time."""


@dataclass
class _Sent:
    observation: Observation
    slot: int
    at: float
    trial: bool = False
    shown: bool = False       # it was answered already, and is only taken in, to imagine
    plan: np.ndarray | None = None  # this plan,
    decided: Decided | None = None  # decided like this
    tick: messages.Tick | None = None
    total: float = 0.0      # s from its receipt to the answer
    predicted: float = 0.0


class RemoteWorker:
    """
    A session on the server at ``path``, reopened whenever it is lost. The public methods may be called from any
    thread; ``executed`` as for ``control.worker.Worker``.
    """

    def __init__(self, path: Path | Endpoint, robot: str, own: Preset, executed: Callable[[int | None, int], np.ndarray],
                 responder: Responder, listener: Listener, chooser: Chooser,
                 earlier: Callable[[float], None] = lambda seconds: None, files: tuple[str, str, str] = ('', '', '')) -> None:
        """``earlier``: called with the time by which ticks should come earlier, for the server's robots to fit better [s].
        ``files``: as ``Endpoint.files``, for a session that moves to another host."""
        self._earlier, self._files = earlier, files
        self._home = self._path = path  # ``_path``: where the session has moved to, while it is there
        self._robot, self._own, self._executed = robot, own, executed
        self._responder, self._listener, self._chooser = responder, listener, chooser
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._stopping = threading.Event()
        self._wanted = threading.Event()  # an observation has come, or the thread must end
        self._thread: threading.Thread | None = None
        self._number = 0
        self._free: list[int] = []
        self._pending: dict[int, _Sent] = {}
        self._unshown: dict[int, _Sent] = {}
        self._requests = RemoteRequests()
        self._seen: tuple[int, int] | None = None  # episode and stamp [ns] of the newest frame that was sent
        self._late = 0
        self._session, self._generation = uuid.uuid4().hex, 0  # by which a server with a store knows it

    def start(self) -> None:
        """Start connecting."""
        self._thread = threading.Thread(target=self._run, name='server', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the session, and give up open requests."""
        self._stopping.set()
        self._wanted.set()
        with self._lock:
            if self._link:
                self._link.connection.shutdown()
        if self._thread:
            self._thread.join(_STOP)

    def offer(self, observation: Observation, trial: bool = False) -> bool:
        """
        Send an observation; return False if there is no server to send it to.

        The answer to a ``trial`` is only judged, not used.
        """
        link, tick = self._next_tick(observation, trial=trial)
        if tick is None:
            return False
        if not trial:
            self._responder.open(observation)
            if not observation.wants_answer:
                self._responder.pass_over(observation)
        self._send(link, tick)
        return True

    def show(self, observation: Observation, plan: np.ndarray | None, decided: Decided | None) -> bool:
        """
        Send an observation that is answered already, to be taken in, and the decision ``plan`` (T, A), to be imagined (None:
        nothing is). Return False if there is no server; the observation is skipped while the server has no free slot.
        """
        link, tick = self._next_tick(observation, shown=True, plan=plan, decided=decided)
        if tick:
            self._send(link, tick)
        return link is not None

    def ask(self, question: what_if.Question) -> Promise:
        """Ask a what-if question; as ``Worker.ask``."""
        return self._requests.send(self._send_now, lambda number: messages.Question(
            number, question.goal, question.due, question.stamp, tuple(
                messages.Branch(b.name, b.steps, np.zeros((0, 0)) if b.actions is None else b.actions)
                for b in question.branches), question.denoising_steps, question.keep, question.onward))

    def save(self, name: str) -> str:
        """Have the server write the session to a file in its folder; return a text that says so. Raises SessionFileError."""
        return self._transfer(name, load=False)

    def load(self, name: str) -> str:
        """Have the server replace the session by one from a file in its folder; as ``save``."""
        said = self._transfer(name, load=True)
        self._responder.forget_plan()
        return said

    def _transfer(self, name: str, load: bool) -> str:
        check_name(name)
        promise = self._requests.send(self._send_now, lambda number: messages.SessionFile(number, load, name))
        try:
            promise.result(_FILE_PATIENCE)
        except TimeUp:
            raise SessionFileError(f'the engine\'s server has not answered within {_FILE_PATIENCE:g} s: see its log, '
                                   'and look for a slow disk') from None
        except SessionFileError:
            raise
        except ValueError as error:
            raise SessionFileError(str(error)) from error
        return 'by the server, whose log says what it took'

    # --- sending ---

    def _next_tick(self, observation: Observation, **more: Any) -> tuple[Link | None, messages.Tick | None]:
        with self._lock:
            link = self._link
            if link is None or not self._free:
                self._wanted.set()
                return link, None
            self._number += 1
            sent = self._pending[self._number] = _Sent(observation, self._free.pop(), time.monotonic(), **more)
            sent.tick = self._tick(link, self._number, sent)
            return link, sent.tick

    def _tick(self, link: Link, number: int, sent: _Sent) -> messages.Tick:
        observation = sent.observation
        link.slots.write(sent.slot, number, fit(observation.image, link.spec.image_size))
        episode, before = self._seen or (None, None)
        executed = self._executed(before if episode == observation.episode else None, observation.stamp)
        self._seen = observation.episode, observation.stamp
        if sent.shown:  # images have time until the next ones, and yield to other robots' commands
            return messages.Tick(number, sent.slot, observation.stamp, observation.episode, observation.goal,
                                 observation.received + self._own.step_period, sent.plan is not None, executed, plan=sent.plan)
        due = observation.due - self._responder.settings.reserve - _RETURN
        return messages.Tick(number, sent.slot, observation.stamp, observation.episode, observation.goal, due,
                             not observation.stale, executed, spacing=observation.spacing, moved=observation.moved)

    def _send_now(self, message: Any) -> bool:
        with self._lock:
            link = self._link
        if link:
            self._send(link, message)
        return link is not None

    def _send(self, link: Link, message: Any) -> None:
        try:
            link.connection.send(message)
        except ConnectionLost:
            link.connection.shutdown()  # the receiving thread notices, and handles it

    # --- receiving ---

    def _run(self) -> None:
        pause, outdated = _RETRY[0], 0
        while not self._stopping.is_set():
            try:
                link = open_link(self._path, self._robot, self._own, self._session, self._generation, STORE_TIMEOUT,
                                 files=self._files)
            except Exception as error:  # whatever a server sends, this thread must try again
                if self._stopping.is_set():
                    return  # ``stop`` may not have waited for this
                known = isinstance(error, Unavailable)
                self._path = self._home
                outdated = outdated + 1 if isinstance(error, Outdated) else 0
                if outdated >= _OUTDATED:  # a new session is better than no server at all
                    self._session, self._generation, outdated = uuid.uuid4().hex, 0, 0
                self._chooser.away(str(error) if known else f'{type(error).__name__}: {error}', None)
                self._stopping.wait(pause)
                pause = min(2.0 * pause, _RETRY[1])
                continue
            if self._stopping.is_set():
                link.connection.close()
                return
            self._open(link)
            idle, outdated = False, 0
            try:
                while not self._stopping.is_set():
                    try:
                        self._receive(link)
                    except _Moved as moved:
                        link = self._follow(link, moved)
                reason = 'the node is being deactivated'
            except (ConnectionLost, MessageError, _Away) as error:
                reason, idle = str(error), isinstance(error, _Idle)
            except Exception as error:  # whatever it is, the robot's own engine must take over
                reason = f'{type(error).__name__}: {error}'
                self._listener.failed(reason, error, False)
            self._close(link, reason, idle)
            pause = _RETRY[0]
            if idle and not self._stopping.is_set():  # connecting at once would occupy a place that others may need
                self._wanted.wait()
            else:
                self._stopping.wait(pause)

    def _follow(self, link: Link, moved: _Moved) -> Link:
        """Continue at the server that has the session now, with the open ticks. Raises _Away."""
        try:
            path = server_address(moved.address, *self._files)
            # Not with the store's patience: the session is open there, and what is sent meanwhile is answered too late.
            new = open_link(path, self._robot, self._own, self._session, moved.generation, files=self._files)
        except (Unavailable, AddressError, EndpointError) as error:
            raise _Away(f'{moved}, and cannot be reached there: {error}') from error
        try:
            with self._lock:
                self._link, self._path, self._generation = new, path, new.generation
                self._free = list(range(len(new.slots)))
                pending = list(self._pending.values())
                for sent in pending:
                    sent.slot, sent.at = self._free.pop(), time.monotonic()  # its time starts over at this server
                    new.slots.write(sent.slot, sent.tick.number, fit(sent.observation.image, new.spec.image_size))
                    sent.tick = replace(sent.tick, slot=sent.slot)
        except Exception:
            new.connection.close()  # the caller closes the former one
            raise
        link.connection.close()
        self._requests.give_up('the session has moved to another server: ask again')
        for sent in pending:
            self._send(new, sent.tick)
        return new

    def _open(self, link: Link) -> None:
        with self._lock:
            self._link, self._seen, self._late, self._generation = link, None, 0, link.generation
            self._free = list(range(len(link.slots)))
        self._chooser.connected(link)

    def _close(self, link: Link, reason: str, idle: bool) -> None:
        with self._lock:
            self._link = None
            self._wanted.clear()
            pending = [sent for sent in self._pending.values() if not sent.trial]
            self._pending.clear()
            self._unshown.clear()
        link.connection.close()
        self._requests.give_up(f'the engine\'s server was lost: {reason}')
        if not self._stopping.is_set():
            self._chooser.away(reason, pending[-1].observation if pending else None, idle)

    def _receive(self, link: Link) -> None:
        received = link.receive(_POLL)
        if received is None:
            with self._lock:
                oldest = min(self._pending.values(), key=lambda sent: sent.at, default=None)
            if oldest is not None:
                patience = max(PATIENCE, oldest.observation.due - oldest.observation.received + _OVERDUE)
                if time.monotonic() - oldest.at > patience:
                    raise _Away(f'it has not answered for {patience * 1e3:.0f} ms')
            return
        message, frames = received
        if isinstance(message, (messages.Planned, messages.Refused, messages.Failed)):
            self._answered(message)
        elif isinstance(message, messages.Imagined):
            self._imagined(link, message, frames)
        elif isinstance(message, messages.ImaginedBranch):
            self._requests.add_branch(message, to_future(link.spec, message, frames))
        elif isinstance(message, (messages.Answered, messages.Done)):
            self._requests.answered(message)
        elif isinstance(message, messages.Rejected):
            raise _Away(message.reason)
        elif isinstance(message, messages.Moved):
            raise _Moved(message)
        elif isinstance(message, messages.Idle):
            raise _Idle(message.reason)
        else:
            raise MessageError(f'{type(message).__name__} is no message of a server')

    def _answered(self, message: messages.Planned | messages.Refused | messages.Failed) -> None:
        """Take the answer to a tick. If it raises, the tick stays open for another engine to answer."""
        with self._lock:
            sent = self._pending.get(message.number)
        if sent is None:
            raise MessageError(f'an answer to tick {message.number}, which waits for none')
        if isinstance(message, messages.Failed):
            self._failed(sent, message.reason)
        elif isinstance(message, messages.Refused):
            self._refused(sent, message)
        else:
            self._planned(sent, message)
        with self._lock:
            del self._pending[message.number]
            self._free.append(sent.slot)

    def _planned(self, sent: _Sent, message: messages.Planned) -> None:
        observation, plan = sent.observation, message.plan
        if plan.ndim != 2 or not len(plan) or plan.shape[1] != self._own.actions or not np.isfinite(plan).all():
            raise _Away(f'its plan is none: {plan.shape}, {"" if np.isfinite(plan).all() else "not "}finite')
        if message.tier not in MODEL_TIERS:
            raise MessageError(f'a plan of tier {message.tier}')
        if 0.0 < message.earlier < self._own.step_period and not sent.trial:
            self._earlier(message.earlier)  # only offered to robots that send the spacing of their images
        sent.total = time.monotonic() - observation.received
        sent.predicted = message.predicted - observation.received
        if sent.trial:
            limit = observation.due - self._responder.settings.reserve
            self._chooser.tried(time.monotonic() <= limit)
            return
        if observation.wants_answer and not sent.shown:
            in_time = self._responder.relay(observation, Tier(message.tier), message.predicted, message.reason, plan)
            self._late = 0 if in_time else self._late + 1
            if self._late >= _LATE_IN_A_ROW:
                raise _Away(f'{self._late} answers in a row came too late')
        self._unshown[message.number] = sent
        while len(self._unshown) > _UNSHOWN:
            del self._unshown[next(iter(self._unshown))]

    def _refused(self, sent: _Sent, message: messages.Refused) -> None:
        if sent.shown or not sent.observation.wants_answer:
            return
        if sent.trial:
            self._chooser.tried(False)
        elif not self._responder.bridge(sent.observation, message.predicted, f'the server refuses: {message.reason}'):
            raise _Away(f'it refuses, and the last plan has no action left: {message.reason}')

    def _failed(self, sent: _Sent, reason: str) -> None:
        if not sent.trial:
            raise _Away(f'its model failed: {reason}')
        self._chooser.tried(False)

    def _imagined(self, link: Link, message: messages.Imagined, frames: np.ndarray | None) -> None:
        sent = self._unshown.pop(message.number, None)
        if sent is None:
            return
        future = to_future(link.spec, message, frames)
        # Show the observation at the size of the imagined images: the server's smaller model has another one.
        observation = replace(sent.observation, image=fit(sent.observation.image, future.frames.shape[1:3]))
        timings = {**dict(zip(messages.TIMINGS, map(float, message.timings), strict=True)),
                   'total': sent.total, 'predicted': sent.predicted}
        command_tier = self._responder.served(observation) or Tier.NONE
        self._listener.predicted(Prediction(observation, Tier(message.tier), command_tier, future, timings, sent.decided))

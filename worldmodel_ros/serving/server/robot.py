"""The server's side of one robot: passes messages from its connection to its session, and replies back."""
from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future as Promise, wait
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import what_if
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.cache.stores.protocol import StoreError
from worldmodel_ros.serving.service.messages import Picture, Reply, ServiceFull, SessionError, Tick
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from worldmodel_ros.serving.transport.frames import SLOTS, FrameSlots, make_memory

if TYPE_CHECKING:
    from worldmodel_ros.serving.fleet.keeper import Keeper, Kept
    from worldmodel_ros.serving.service.service import Service

_log = logging.getLogger(__name__)
_QUESTIONS = 16      # that one robot may have open at a time; each holds memory
_UNREAD = 64 << 20   # bytes of images that one robot may leave unread; until read they occupy the server's memory


class Robot:
    """
    One session of the service, as its listener, and the connection to its front end.

    ``receive`` is called from the server's thread; replies come from the service's. After ``park`` it has no connection,
    until ``attach`` gives it another one.
    """

    def __init__(self, name: str, pid: int, connection: Connection, service: Service, shows: Executor,
                 files: Executor, folder: SessionFolder, keeper: Keeper | None = None, linger: float = 0.0) -> None:
        """
        ``linger`` [s]: how long the session waits for its robot when the connection is lost.
        ``shows``: sends images, which takes too long for the service's thread; ``files``: saves and loads sessions, in
        ``folder``. ``keeper``: keeps the session in a store, if the robot names it.
        """
        self.name, self.pid = name, pid
        self._connection, self._service, self._shows = connection, service, shows
        self._files, self._folder = files, folder
        self._filing = False  # a session is being saved or loaded
        self._slots: FrameSlots | None = None
        self._number = 0  # of the session; 0: it is not open yet
        self._session = ''
        self._keeper, self._kept = keeper, None
        self._holding = threading.RLock()  # a tick may be replied to before it is handed over
        self._held: list[Tick] | None = None  # ticks that came while the session moves
        self._border: threading.Event | None = None  # set when a tick has been answered, if ``hold`` waits for that
        self._showing = False  # images of a tick are being sent
        self._questions: set[int] = set()  # numbers of the open ones
        self._unread = 0  # bytes of images sent since all had been read
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.gone = ''  # why its connection is no longer served
        self.linger = linger
        self._sending = threading.RLock()
        self._newest, self._note = 0, ''  # number of the newest tick, and the front end's newest note
        self._answer_to_newest: Any = None

    def open(self, session: str, room: Promise | None = None) -> None:
        """
        Open the robot's session and welcome it; asynchronously if a keeper has to look up ``session``, and only once ``room``
        is done, if that comes soon. Raises ServiceFull, ConnectionLost.
        """
        self._session = session
        if self._keeper and session:
            self._keeper.submit(self._contained(self._open_kept), session, room)
        else:
            self._number = self._service.open(self, account=self._account)
            self._welcome()

    @property
    def session(self) -> str:
        """The robot's name for its session; empty: it has none."""
        return self._session

    @property
    def kept(self) -> Kept | None:
        """The session, if it is kept in a store."""
        return self._kept

    @property
    def waiting(self) -> bool:
        """Whether the robot waits for an answer to a question."""
        return bool(self._questions)

    def receive(self, message: Any) -> None:
        """Take a message of the front end. Raises MessageError for an invalid one."""
        if not self._number:
            raise MessageError(f'{type(message).__name__} before Welcome')
        handle = {messages.Tick: self._on_tick, messages.Question: self._on_question, messages.Note: self._on_note,
                  messages.SessionFile: self._on_file}.get(type(message))
        if handle is None:
            raise MessageError(f'{type(message).__name__} is no message of a robot that is connected')
        try:
            handle(message)
        except (SessionError, ValueError) as error:
            raise MessageError(f'{type(message).__name__}: {error}') from error

    def park(self) -> bool:
        """Have the session wait without a connection, if it may linger; return whether it does."""
        if not self.linger or not self._number:
            return False
        with self._sending:
            self.gone = 'it waits for its robot'
        if self._kept:
            self._keeper.rest(self._kept)
        return True

    def attach(self, connection: Connection, pid: int, linger: float) -> None:
        """Continue over another connection, beginning with the newest note and the answer to the newest tick."""
        with self._sending:
            self._connection, self.pid, self.linger = connection, pid, linger
        if self._kept:
            self._keeper.submit(self._contained(self._attach_kept), connection)
        else:
            self._attach(connection)

    def close(self) -> Promise | None:
        """Close the session; nothing more is sent. Return the promise of its end; None: it has ended."""
        self.gone = self.gone or 'closed'
        if self._kept:
            return self._keeper.submit(self._contained(self._keeper.end), self._kept)
        if self._number:
            self._service.close(self._number)
        return None

    def hold(self, patience: float) -> None:
        """See ``fleet.move.Moving``. Raises TimeoutError."""
        border = self._border = threading.Event()
        border.wait(2.0 * self._service.spec.step_period)  # times out if the robot does not tick
        with self._holding:
            if self._held is None:
                self._held = []
        end = time.monotonic() + patience
        while not self._service.settled(self._number):
            if time.monotonic() > end:
                raise TimeoutError(f'its last tick is not done after {patience:g} s')
            time.sleep(0.0005)

    def release(self) -> None:
        """See ``fleet.move.Moving``."""
        self._border = None
        with self._holding:
            held, self._held = self._held or [], None
            for tick in held:
                self._hand_over(tick)

    def send_to(self, address: str, generation: int) -> None:
        """See ``fleet.move.Moving``."""
        self.linger = 0.0  # first: its client leaves as soon as it knows, and must not be waited for
        self._send(messages.Moved(address, generation))
        self._end(f'its session has moved to {address}')

    def status(self) -> dict[str, Any]:
        """Return this robot's part of ``worldmodel serve --status``."""
        kept = {'session': self._kept.name, 'generation': self._kept.generation} if self._kept else {}
        with self._counting:
            return {'robot': self.name, 'pid': self.pid, **kept, **self._counts}

    def replied(self, reply: Reply) -> None:
        """Send the answer to a tick."""
        self._count('refused' if reply.tier is Tier.NONE else reply.tier.name.lower())
        if self._border:
            # Hold from right after an answer, so that a whole period is left until the next one is missed.
            with self._holding:
                if self._held is None and not self._border.is_set():
                    self._held = []
            self._border.set()
        if self._kept:
            self._keeper.ticked(self._kept)
        message = _told(reply)
        with self._sending:
            if reply.sequence == self._newest:
                self._answer_to_newest = message
            self._send(message)

    def pictured(self, picture: Picture) -> None:
        """Send the imagined images of a plan; drop them if earlier ones are still being sent."""
        if not self._showing:
            self._showing = True
            self._shows.submit(self._contained(self._show), picture)

    def failed(self, reason: str, error: Exception) -> None:
        """Count and log a failure."""
        self._count('failures')
        _log.error('%s: %s', self.name, reason, exc_info=error)
        end_if_lost(error)

    def _on_tick(self, tick: messages.Tick) -> None:
        self._count('ticks')
        self._newest, self._answer_to_newest = tick.number, None
        self._on_note(tick)
        # Copied: the service may read it after the answer, when the slot belongs to the front end again.
        taken = Tick(self._slots.read(tick.slot, tick.number), tick.executed, tick.due, tick.number, tick.stamp, tick.episode,
                     tick.goal, tick.prefix if tick.prefix.size else None, tick.answer, tick.spacing, tick.moved,
                     tick.plan if tick.plan.size else None)
        with self._holding:
            if self._held is not None:
                self._held.append(taken)
            else:
                self._hand_over(taken)

    def _hand_over(self, tick: Tick) -> None:
        if self._kept:
            self._keeper.tick(self._kept, tick)
        else:
            self._service.tick(self._number, tick)

    def _on_note(self, message: messages.Note | messages.Tick) -> None:
        self._note = message.note
        if self._kept:
            self._kept.newest, self._kept.note = self._newest, self._note

    def _on_question(self, question: messages.Question) -> None:
        if len(self._questions) >= _QUESTIONS:
            self._send(messages.Answered(question.number, 0, False, f'{_QUESTIONS} questions are open: wait for them'))
            return
        if question.number in self._questions:
            raise MessageError(f'question {question.number} is open already')
        if len(question.branches) > what_if.MAX_BRANCHES:
            raise MessageError(f'{len(question.branches)} branches: at most {what_if.MAX_BRANCHES} are allowed')
        branches = tuple(self._branch(branch) for branch in question.branches)
        try:
            asked = what_if.Question(branches, question.goal, question.due, question.stamp, question.denoising_steps,
                                     question.keep, question.onward)
        except what_if.QuestionError as error:
            self._send(messages.Answered(question.number, 0, False, str(error)))
            return
        promise = self._keeper.ask(self._kept, asked) if self._kept else self._service.ask(self._number, asked)
        asking = self._connection
        self._questions.add(question.number)
        promise.add_done_callback(
            lambda done: self._shows.submit(self._contained(self._answer), question.number, done, asking))

    def _branch(self, branch: messages.Branch) -> what_if.Branch:
        actions = branch.actions if branch.actions.size else None
        steps = branch.steps if actions is None else len(actions)
        if not 0 < steps <= what_if.MAX_STEPS:
            raise MessageError(f'branch {branch.name!r} has {steps} steps: 1 to {what_if.MAX_STEPS} are allowed')
        if actions is not None and (actions.shape != (steps, self._service.spec.actions)
                                    or not np.isfinite(actions).all()):
            raise MessageError(f'branch {branch.name!r}: actions must be rows of {self._service.spec.actions} finite '
                               f'numbers, and are {actions.shape}')
        return what_if.Branch(branch.name, steps, actions)

    def _on_file(self, request: messages.SessionFile) -> None:
        if self._filing:
            self._send(messages.Done(request.number, 'another session is being saved or loaded: wait for it'))
            return
        self._filing = True
        self._files.submit(self._contained(self._file), request)

    def _file(self, request: messages.SessionFile) -> None:
        refusal = 'the session was closed meanwhile'
        try:
            if not self.gone:
                transfer = self._service.load if request.load else self._service.save
                with self._keeper.here(self._kept) if self._kept else nullcontext():
                    took = transfer(self._number, self._folder, request.name)
                _log.info('%s: session %s %s: %s', self.name, request.name, 'loaded' if request.load else 'saved', took)
                refusal = ''
        except SessionFileError as error:
            refusal = str(error)
        except Exception as error:  # a client waits for the answer
            refusal = f'{type(error).__name__}: {error}'
            _log.warning('%s: session file %s: %s', self.name, request.name, refusal)
        self._filing = False
        self._send(messages.Done(request.number, refusal))

    @property
    def _account(self) -> tuple[int, str]:
        return self.pid, self.name

    def _open_kept(self, session: str, room: Promise | None) -> None:
        if room:
            wait([room], self._keeper.settings.patience)
        if self.gone:
            return  # it would cost the owner of the session a generation, and others a thread
        try:
            kept = self._keeper.open(self, self._account, session, lambda: not self.gone)
        except (ServiceFull, StoreError, ValueError) as error:
            self._send(messages.Rejected(f'the session cannot be opened: {error}'))
            self._end(str(error))
            return
        if kept is None:
            return
        self._kept, self._number = kept, kept.number
        self._newest, self._note = kept.newest, kept.note
        if self.gone:  # meanwhile
            self._keeper.end(kept)
        else:
            self._welcome()

    def _attach_kept(self, connection: Connection) -> None:
        try:
            self._kept.log.require_own()
        except StoreError as error:
            self.linger = 0.0
            connection.send(messages.Rejected(f'the session is not this server\'s any more: connect again: {error}'))
            connection.shutdown()
            return
        self._attach(connection)

    def _attach(self, connection: Connection) -> None:
        with self._sending:
            if connection is not self._connection:
                return  # it was lost while the store was asked, and a newer one continues
            self.gone, self._unread = '', 0
            self._questions.clear()
            self._welcome(goes_on=True)
            if self._answer_to_newest:
                self._send(self._answer_to_newest)

    def _welcome(self, goes_on: bool = False) -> None:
        spec: Preset = self._service.spec
        descriptor = make_memory(spec.image_size)
        generation, frames = (self._kept.generation, self._kept.frames) if self._kept else (0, 0)
        try:
            self._slots = FrameSlots(os.dup(descriptor), spec.image_size)  # before a tick can come
            self._connection.send(messages.Welcome(
                spec.name, str(self._service.stats()['backend']), json.dumps(spec.to_dict()), SLOTS, generation, frames,
                self._newest, goes_on and self._newest > 0, self._note), descriptor)
        finally:
            os.close(descriptor)

    def _show(self, picture: Picture) -> None:
        self._showing = False
        reply, future = picture.reply, picture.future
        # The unit 'observe' encodes, commits and plans.
        timings = {**reply.timings, 'queue': reply.queue, 'commit': reply.timings.get('observe', 0.0),
                   'decode': picture.seconds}
        self._send_pictures(messages.Imagined(
            reply.sequence, reply.tier, future.actions, future.collision_risk, self._progress(future),
            np.array([timings.get(name, 0.0) for name in messages.TIMINGS])), future.frames)

    def _answer(self, number: int, promise: Promise, asking: Connection) -> None:
        if asking is not self._connection:
            return  # the client that asked is gone
        self._questions.discard(number)
        refusal = _refusal(promise)
        if refusal:
            again = 0.0 if promise.cancelled() else getattr(promise.exception(), 'again', 0.0)
            self._send(messages.Answered(number, 0, False, refusal, again))
            return
        answer: what_if.Answer = promise.result()
        for name, future in answer.branches:
            self._send_pictures(messages.ImaginedBranch(
                number, name, future.actions, future.collision_risk, self._progress(future)), future.frames)
        self._send(messages.Answered(number, answer.stamp, answer.complete, ''))

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1

    def _progress(self, future: Any) -> np.ndarray:
        return np.array([future.progress.get(goal, math.nan) for goal in self._service.spec.goals])

    def _send_pictures(self, message: Any, frames: np.ndarray) -> None:
        if self.gone:
            return
        if self._unread + frames.nbytes > _UNREAD and self._unread:
            if isinstance(message, messages.Imagined):
                self._count('pictures_dropped')
            else:
                self._end(f'it leaves {self._unread >> 20} MiB of pictures unread')
            return
        self._unread += frames.nbytes
        descriptor = pictures.put(frames)
        try:
            self._send(message, descriptor)
        finally:
            os.close(descriptor)

    def _send(self, message: Any, descriptor: int | None = None) -> None:
        with self._sending:
            if self.gone:
                return
            if descriptor is None and self._connection.unread() == 0:
                self._unread = 0
            try:
                self._connection.send(message, descriptor)
            except (ConnectionLost, MessageError) as error:
                self._end(str(error))

    def _end(self, reason: str) -> None:
        self.gone = reason
        self._connection.shutdown()  # the server's thread notices, and closes it

    def _contained(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception:  # an executor would swallow it
                _log.exception('%s: sending failed', self.name)
        return call


def _told(reply: Reply) -> messages.Planned | messages.Refused | messages.Failed:
    """Return the message that tells a robot the reply to a tick."""
    if reply.failed:
        return messages.Failed(reply.sequence, reply.reason)
    predicted = reply.finish if reply.predicted is None else reply.predicted
    if reply.plan is None:
        return messages.Refused(reply.sequence, predicted, reply.reason)
    return messages.Planned(reply.sequence, reply.tier, predicted, reply.finish, reply.reason, reply.plan, reply.queue,
                            reply.earlier)


def _refusal(promise: Promise) -> str:
    """Return why a promise has no result; empty if it has one."""
    if promise.cancelled():
        return 'the session was closed meanwhile'
    error = promise.exception()
    return f'{error}' or type(error).__name__ if error else ''

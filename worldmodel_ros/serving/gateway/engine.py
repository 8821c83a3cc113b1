"""A session of the engine's server, for asyncio: answers come as futures, and nothing blocks."""
from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.client.link import HANDSHAKE_TIMEOUT, STORE_TIMEOUT, Link, SentOn, Unavailable, open_link
from worldmodel_ros.serving.client.network import Endpoint, server_address
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import ConnectionLost

_OVERDUE = 1.0     # s after its deadline that an answer is waited for; then the engine hangs
_PATIENCE = 60.0   # s, the same for the answer to a question
_NEWEST = 0        # stamp: branch from the newest observation

Answer = messages.Planned | messages.Refused | messages.Failed


class EngineAway(RuntimeError):
    """There is no engine, or not for this session; the text says why."""


class NotAnswered(RuntimeError):
    """A refused question; the text says why. ``again`` [s]: it may be asked again after so long; 0: never as it is."""

    def __init__(self, text: str, again: float = 0.0) -> None:
        super().__init__(text)
        self.again = again


@dataclass(frozen=True)
class Resumed:
    """
    What the server knew of a session when it was opened: the number of its newest tick, 0 if it has seen none; the note
    of that tick; and the answer to it, None if it is no longer known.
    """

    number: int
    note: str
    answer: asyncio.Future[Answer] | None


class EngineSession:
    """One session on the server. Used by the event loop's thread only."""

    def __init__(self, link: Link) -> None:
        self.resumed = Resumed(link.number, link.note, None)
        self.spec: Preset = link.spec
        self.backend = link.backend
        self.gone = ''  # why it is no longer of use
        self.moved: Path | Endpoint | None = None  # where the session is now, if it has moved to another server of a fleet,
        self.generation = link.generation         # and its newest generation
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._free = list(range(len(link.slots)))
        self._ticks: dict[int, tuple[int | None, asyncio.Future[Answer]]] = {}
        self._questions: dict[int, tuple[asyncio.Future, list]] = {}
        self._asked = 0
        self._idle = False
        self.ended: Callable[[str, bool], None] | None = None  # called with why it ends, and whether only for being idle
        self.pictured: Callable[[messages.Imagined, np.ndarray], None] | None = None  # called with each prediction
        if link.answered:
            self.resumed = replace(self.resumed, answer=self._loop.create_future())
            self._ticks[link.number] = None, self.resumed.answer
        self._loop.add_reader(link.connection.fileno(), self._read)

    @classmethod
    async def open(cls, path: Path, name: str, session: str = '', linger: float = 0.0, generation: int = 0,
                   mobile: bool = False) -> EngineSession:
        """
        Open a session for the robot ``name`` on the server at a socket; with a ``session``, the one that it knows by this name,
        which waits there for ``linger`` s whenever its connection is lost, and must be of no older ``generation``;
        ``mobile``: its robot can connect to another host. Raises EngineAway; SentOn if that robot must do so.
        """
        def opened() -> Link:  # may block for up to half a second, or longer to read from a store
            return open_link(path, name, None, session, generation, STORE_TIMEOUT if session else HANDSHAKE_TIMEOUT, linger,
                             for_mobile=mobile)
        try:
            return cls(await asyncio.to_thread(opened))
        except SentOn:
            raise
        except Unavailable as error:
            raise EngineAway(str(error)) from error

    async def tick(self, number: int, frame: np.ndarray, goal: str, executed: np.ndarray, due: float, stamp: int,
                   episode: int, prefix: np.ndarray | None = None, answer: bool = True, note: str = '',
                   spacing: float = 0.0, moved: float = 0.0, plan: np.ndarray | None = None) -> Answer:
        """
        Send an observation, as ``messages.Tick``, with a frame of the model's size; return the answer. ``number`` must rise.

        Raises EngineAway.
        """
        self._require()
        if not self._free:
            raise EngineAway(f'{len(self._ticks)} observations are not answered yet')
        slot = self._free.pop()
        self._link.slots.write(slot, number, frame)
        future = self._loop.create_future()
        self._ticks[number] = slot, future
        self._send(messages.Tick(number, slot, stamp, episode, goal, due, answer, executed, prefix, note, spacing,
                                 moved, plan))
        return await self._wait(future, max(0.0, due - time.monotonic()) + _OVERDUE)

    async def imagine(self, actions: np.ndarray, due: float, keep: bool, onward: bool) -> np.ndarray:
        """
        Return the frames, uint8 (T, H, W, 3), imagined for actions (T, A) from the newest observation on, or, if ``onward``,
        from the end of the branch that was kept last; ``keep``: keep the end of this one.

        Raises EngineAway, NotAnswered.
        """
        branch = messages.Branch('camera', len(actions), actions)
        _, branches = await self.ask(messages.Question(0, '', due, _NEWEST, (branch,), 2, keep, onward))
        if len(branches) != 1:
            raise NotAnswered('the time was over before it was imagined')
        return branches[0][1]

    async def ask(self, question: messages.Question
                  ) -> tuple[messages.Answered, list[tuple[messages.ImaginedBranch, np.ndarray]]]:
        """Ask a question, whose number is replaced; return its answer, and the branches with their frames, uint8 (T, H, W, 3).
        Raises EngineAway, NotAnswered."""
        self._require()
        self._asked += 1
        future = self._loop.create_future()
        self._questions[self._asked] = future, []
        self._send(replace(question, number=self._asked))
        return await self._wait(future, max(0.0, question.due - time.monotonic()) + _PATIENCE)

    def note(self, text: str) -> None:
        """Have the server keep a text with the session, for clients that continue it."""
        if not self.gone:
            self._send(messages.Note(text))

    def end(self) -> None:
        """End the session for good, without lingering."""
        if not self.gone:
            self._send(messages.Goodbye())
        self.close()

    @property
    def frames(self) -> int:
        """Number of frames that the session had seen when it was opened."""
        return self._link.frames

    def stay(self) -> None:
        """Send a message, so that the session does not end for being idle."""
        if not self.gone:
            self._send(messages.StatusRequest())

    def close(self, reason: str = 'closed') -> None:
        """Leave the session; open requests raise EngineAway."""
        if self.gone:
            return
        self.gone = reason
        self._loop.remove_reader(self._link.connection.fileno())
        self._link.connection.close()
        for future in [future for _, future in (*self._ticks.values(), )] + [
                future for future, _ in self._questions.values()]:
            if not future.done():
                future.set_exception(EngineAway(reason))
                future.exception()  # marked as retrieved: nothing may be waiting for it
        self._ticks.clear()
        self._questions.clear()
        if self.ended:
            self.ended(reason, self._idle)

    def _require(self) -> None:
        if self.gone:
            raise EngineAway(self.gone)

    async def _wait(self, future: asyncio.Future, patience: float) -> Any:
        # Not asyncio.wait_for, which costs a task and two more turns of the loop for each tick.
        overdue = self._loop.call_later(patience, self.close, f'the engine has not answered for {patience:.1f} s')
        try:
            return await future
        finally:
            overdue.cancel()

    def _send(self, message: Any) -> None:
        try:
            self._link.connection.send(message)
        except (ConnectionLost, MessageError) as error:
            self.close(f'the engine was lost: {error}')

    def _read(self) -> None:
        try:
            while not self.gone and (received := self._link.connection.receive(0.0)):
                self._take(*received)
        except (ConnectionLost, MessageError, ValueError) as error:
            self.close(f'the engine was lost: {error}')

    def _take(self, message: Any, descriptor: int | None) -> None:
        if isinstance(message, (messages.Imagined, messages.ImaginedBranch)) and descriptor is not None:
            self._picture(message, descriptor)
            return
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, Answer):
            slot, future = self._ticks.pop(message.number, (None, None))
            if future is None:
                raise MessageError(f'an answer to tick {message.number}, which is not pending')
            if slot is not None:
                self._free.append(slot)
            if not future.done():
                future.set_result(message)
        elif isinstance(message, messages.Answered):
            future, branches = self._questions.pop(message.number, (None, []))
            if future is None or future.done():
                return
            if message.refusal:
                future.set_exception(NotAnswered(message.refusal, message.again))
            else:
                future.set_result((message, branches))
        elif isinstance(message, messages.Status):
            pass  # the answer to ``stay``
        elif isinstance(message, messages.Moved):
            self.moved, self.generation = server_address(message.address), message.generation
            self.close(f'the session has moved to {message.address}')
        elif isinstance(message, (messages.Rejected, messages.Idle)):
            self._idle = isinstance(message, messages.Idle)
            self.close(message.reason)
        else:
            raise MessageError(f'{type(message).__name__} is no message of a server')

    def _picture(self, message: Any, descriptor: int) -> None:
        if isinstance(message, messages.ImaginedBranch) and message.number in self._questions:
            self._questions[message.number][1].append((message, pictures.take(descriptor)))
        elif isinstance(message, messages.Imagined) and self.pictured:
            self.pictured(message, pictures.take(descriptor))
        else:
            os.close(descriptor)

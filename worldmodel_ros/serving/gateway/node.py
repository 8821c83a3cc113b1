"""
A robot's own node on another machine: the messages of ``serving.transport`` to an engine's server, over a WebSocket.

Their times are of this machine's steady clock, which the node estimates from the exchange (``transport.network``). Sessions
end with their connection, as on a Unix socket, and are not saved to files; a robot of the fleet continues its own session, and
is told where that has moved.
"""
from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from websockets.exceptions import ConnectionClosed

from worldmodel_ros.serving.client.link import SentOn
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.frames import SLOTS
from worldmodel_ros.serving.transport.network import Stamps, unwrap, wrap
from .engine import EngineAway, EngineSession, NotAnswered
from .msgpack import WireError
from .sessions import Refusal, Session

if TYPE_CHECKING:
    from .server import Client

NAME = 'node'
_LATEST = 60.0   # s ahead that a deadline may be
_CLOSED = 1008   # the reason has been sent before


class Dialect:
    """Encodes refusals for a node; knows the connections of all."""

    name = NAME

    def __init__(self) -> None:
        self.bridges: dict[tuple[str, str], Bridge] = {}  # by account, and by the node's own name for its session

    def refusal(self, refusal: Refusal) -> bytes:
        """Return the message; after it, a node drives with its own model, and connects again."""
        return wrap(messages.Rejected(str(refusal)[:1000]), Stamps(time.monotonic()))


class Bridge:
    """One node's connection, and its session on the engine. Used by the event loop's thread only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._heard = Stamps(0.0)
        self._tasks: set[asyncio.Task] = set()
        self._showing = False  # images are being sent
        self._newest = 0       # number of the newest tick
        self._engine: EngineSession | None = None
        self._session: Session | None = None

    async def run(self) -> None:
        """Serve the node until its connection ends. Raises WireError, ConnectionClosed, Refusal."""
        hello, _ = await self._next()
        if not isinstance(hello, messages.Hello):
            raise WireError(f'{type(hello).__name__} before Hello')
        sessions, bridges, key = self._client.gateway.sessions, self._client.dialect.bridges, (
            self._client.account.name, hello.session)
        if key in bridges:
            bridges[key].give_way()
        self._session = session = sessions.claim(self._client.account, '', NAME, self._client)
        if hello.session:
            bridges[key] = self
        session.label, engine = hello.robot, None
        if self._client.account.fleet:  # others' sessions end with their connections
            session.known_as, session.generation, session.mobile = hello.session, hello.generation, hello.mobile
        try:
            self._engine = engine = await session.engine()
            engine.pictured, engine.ended = self._pictured, self._ended
            await self._send(messages.Welcome(engine.spec.name, engine.backend, json.dumps(engine.spec.to_dict()), SLOTS,
                                              engine.generation, engine.frames, engine.resumed.number))
            while True:
                message, pixels = await self._next()
                if message is None:
                    await self._send(None)
                elif isinstance(message, messages.Tick):
                    self._tick(session, engine, message, pixels)
                elif isinstance(message, messages.Question):
                    self._spawn(self._ask(engine, replace(message, due=_due(message.due))))
                elif isinstance(message, messages.SessionFile):
                    await self._send(messages.Done(message.number, 'sessions are saved and loaded on the engine\'s own machine '
                                                                   'alone'))
                else:
                    raise WireError(f'{type(message).__name__} is no message of a node')
        except SentOn as error:
            await self._send(messages.Moved(error.address, hello.generation))
        finally:
            if engine:
                engine.pictured = engine.ended = None
            for task in self._tasks:
                task.cancel()
            if bridges.get(key) is self:
                del bridges[key]
            sessions.release(session, self._client)
            if engine:
                engine.end()  # it may have been opened after this one gave way

    def give_way(self) -> None:
        """End the session, so that its place is free, and the connection: the node has another one, so this one is dead."""
        if self._engine:
            self._engine.ended = None
        self._client.gateway.sessions.release(self._session, self._client)
        self._client.connection.transport.abort()

    def _tick(self, session: Session, engine: Any, tick: messages.Tick, pixels: np.ndarray | None) -> None:
        if pixels is None or pixels.shape != (1, *engine.spec.image_size, 3):
            raise WireError('a tick without a frame of the model\'s size')
        if tick.number <= self._newest:
            raise WireError(f'tick {tick.number} after {self._newest}')
        self._newest = tick.number
        self._spawn(self._answer(session, engine, replace(tick, due=_due(tick.due)), pixels[0]))

    async def _answer(self, session: Session, engine: Any, tick: messages.Tick, frame: np.ndarray) -> None:
        arrival, prefix = time.monotonic(), tick.prefix if tick.prefix.size else None
        try:
            answer = await engine.tick(tick.number, frame, tick.goal, tick.executed, tick.due, tick.stamp, tick.episode, prefix,
                                       tick.answer, spacing=tick.spacing, moved=tick.moved,
                                       plan=tick.plan if tick.plan.size else None)
        except EngineAway as error:
            if engine.gone:
                return  # ``_ended`` has told the node
            answer = messages.Refused(tick.number, time.monotonic(), str(error))
        session.count(answer, tick.due, arrival)
        await self._send(answer)

    async def _ask(self, engine: Any, question: messages.Question) -> None:
        try:
            answered, branches = await engine.ask(question)
        except EngineAway:
            return
        except NotAnswered as error:
            await self._send(messages.Answered(question.number, 0, False, str(error), error.again))
            return
        for branch, frames in branches:
            await self._send(replace(branch, number=question.number), frames)
        await self._send(replace(answered, number=question.number))

    def _pictured(self, message: messages.Imagined, frames: np.ndarray) -> None:
        """Send the imagined images of a plan; drop them if earlier ones are still being sent."""
        if not self._showing:
            self._showing = True
            self._spawn(self._show(message, frames))

    async def _show(self, message: messages.Imagined, frames: np.ndarray) -> None:
        try:
            await self._send(message, frames)
        finally:
            self._showing = False

    def _ended(self, reason: str, idle: bool) -> None:
        moved = self._engine.moved
        if isinstance(moved, Endpoint) and self._client.account.fleet:
            self._spawn(self._end(messages.Moved(str(moved), self._engine.generation)))
        else:
            self._spawn(self._end(messages.Idle(reason) if idle else messages.Rejected(reason)))

    async def _end(self, message: Any) -> None:
        await self._send(message)
        await self._client.connection.close(_CLOSED, 'the session has ended')

    async def _next(self) -> tuple[Any, np.ndarray | None]:
        data = await self._client.receive()
        received = time.monotonic()
        try:
            if isinstance(data, str):
                raise MessageError('a text')
            message, stamps, pixels = unwrap(data)
        except MessageError as error:
            raise WireError(str(error)) from error
        self._heard = Stamps(0.0, stamps.sent, received)
        return message, pixels

    async def _send(self, message: Any, pixels: np.ndarray | None = None) -> None:
        await self._client.send(wrap(message, replace(self._heard, sent=time.monotonic()), pixels))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._contained(work))
        self._tasks.add(task)

        def done(_: asyncio.Task) -> None:
            self._tasks.discard(task)
            work.close()  # it may never have begun
        task.add_done_callback(done)

    async def _contained(self, work: Any) -> None:
        try:
            await work
        except ConnectionClosed:
            pass  # ``run`` handles it


def _due(due: float) -> float:
    """Return a node's deadline, steady time [s], at most ``_LATEST`` s ahead. Raises WireError."""
    if not math.isfinite(due):
        raise WireError('a deadline that is not finite')
    return min(due, time.monotonic() + _LATEST)

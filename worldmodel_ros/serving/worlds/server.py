"""
Serves one open world model at a socket: a world for each name, which waits for its gateway when that is lost.

Networks run in one thread, in which worlds take turns by the scheduler (``turns``); all else runs in an event loop. A request
is completed even if no client waits for it any more: a client that repeats it, by its event, gets the frames.
"""
from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .link import WorldAbout
from .turns import Late, Turns
from .walk import Walk

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.world import OpenWorld

_log = logging.getLogger(__name__)
_CONNECTIONS = 256      # at most
_WAITING = 4            # requests of one connection
_MOST_POSES = 1024      # of one request
_HELLO = 5.0            # s in which a connection must send its first message
_LOOK = 1.0             # s between two checks for expired worlds and connections
_KEPT = 64 << 20        # bytes, at most, of a world's newest frames that are kept to be repeated


class _Refused(Exception):
    """A refused request. ``kind``: one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(eq=False)
class _Place:
    """A name, its world if it has one, and the connection that walks in it."""

    session: str
    linger: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one request at a time
    walk: Walk | None = None
    holder: _Peer | None = None
    requests: int = 0  # not answered yet, those in line for the lock and of lost clients included
    left: float = 0.0  # since when there is no holder, steady time in s
    note: str = ''     # of the walk that began the world
    event: str = ''    # the newest one, and its answer; frames: None if they are too large
    answer: tuple[messages.Walked, np.ndarray | None] | None = None


@dataclass(eq=False)
class _Peer:
    connection: Connection
    since: float
    place: _Place | None = None  # None before its WorldHello
    waiting: int = 0             # requests


class WorldServer:
    """The server; runs in the event loop of ``run``."""

    def __init__(self, world: OpenWorld, listening: ListeningSocket, networks: ThreadPoolExecutor,
                 deadline: float = 0.0) -> None:
        """``networks``: one thread, the one in which the model was loaded. No argument is closed here. ``deadline``: see
        ``turns.Turns``."""
        self._world, self._listening, self._networks = world, listening, networks
        self.about, self._turns = WorldAbout.of(world), Turns(world, networks, deadline)
        self._peers: dict[Connection, _Peer] = {}
        self._places: dict[str, _Place] = {}
        self._tasks: set[asyncio.Task] = set()
        self._begun = time.monotonic()
        self._counts = {'worlds': 0, 'frames': 0, 'repeated': 0, 'refused': 0, 'failed': 0}

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Measure the model, and serve until ``stop`` is set; wait for a pass in progress."""
        self._loop = asyncio.get_running_loop()
        await self._turns.calibrate()
        self._loop.add_reader(self._listening.fileno(), self._accept)
        always = [asyncio.create_task(self._expire()), asyncio.create_task(self._turns.run())]
        ready()
        try:
            await stop.wait()
        finally:
            self._loop.remove_reader(self._listening.fileno())
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for connection in list(self._peers):
                self._drop(connection)
            for place in list(self._places.values()):
                await self._end(place)
            for task in always:
                task.cancel()
            await asyncio.gather(*always, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """Return the state of the server."""
        return {'pid': os.getpid(), 'socket': str(self._listening.path), 'uptime_s': time.monotonic() - self._begun,
                'world': asdict(self.about), 'waiting': sum(place.holder is None for place in self._places.values()),
                'service': {'backend': self.about.backend, 'sessions': sum(
                    place.walk is not None for place in self._places.values()), 'requests': sum(
                    peer.waiting for peer in self._peers.values()), **self._counts, **self._turns.counts,
                    'deadline_s': self._turns.deadline, 'step_times': self._turns.table.to_dict('', self.about.name)['rows']}}

    # --- connections ---

    def _accept(self) -> None:
        accepted = self._listening.accept()
        if accepted is None:
            return
        connection = Connection(accepted[0])
        if len(self._peers) >= _CONNECTIONS:
            self._reject(connection, f'{_CONNECTIONS} connections are open')
            connection.close()
            return
        self._peers[connection] = _Peer(connection, time.monotonic())
        self._loop.add_reader(connection.fileno(), self._read, connection)

    def _read(self, connection: Connection) -> None:
        try:
            while connection in self._peers and (received := connection.receive(0.0)):
                self._handle(self._peers[connection], *received)
        except ConnectionLost:
            self._drop(connection)
        except MessageError as error:
            self._reject(connection, str(error))
            self._drop(connection)

    def _handle(self, peer: _Peer, message: Any, descriptor: int | None) -> None:
        image = None
        if descriptor is not None:
            if not isinstance(message, messages.Walk):
                os.close(descriptor)
                raise MessageError(f'memory came with {type(message).__name__}')
            image = self._image(descriptor)
        if isinstance(message, messages.StatusRequest):
            peer.connection.send(messages.Status(json.dumps(self.status())))
        elif isinstance(message, messages.Hello):
            raise MessageError(f'{self.about.name} is an open world model, which drives no robot')
        elif isinstance(message, messages.WorldHello) and peer.place is None:
            self._open(peer, message)
        elif isinstance(message, messages.Goodbye):
            self._drop(peer.connection)
            if peer.place is not None:
                self._spawn(self._leave(peer.place))
        elif peer.place is None or not isinstance(message, (messages.Walk, messages.Forget)):
            raise MessageError(f'{type(message).__name__} is not expected here')
        elif peer.waiting >= _WAITING:
            raise MessageError(f'{_WAITING} requests wait already')
        else:
            if isinstance(message, messages.Walk):
                _check(message)
            peer.waiting += 1
            peer.place.requests += 1
            self._spawn(self._answer(peer, peer.place, message, image, time.monotonic()))

    def _image(self, descriptor: int) -> np.ndarray:
        image, size = pictures.take(descriptor), (1, *self.about.image_size, 3)
        if image.shape != size:
            raise MessageError(f'an image of {image.shape}, and must be {size}')
        return image[0]

    def _open(self, peer: _Peer, hello: messages.WorldHello) -> None:
        if not hello.session:
            raise MessageError('a world has a name')
        place = self._places.setdefault(hello.session, _Place(hello.session))
        if place.holder is not None:  # its loss was not noticed yet
            before = place.holder.connection
            self._reject(before, 'its world goes on over a newer connection')
            self._drop(before)
        place.holder, peer.place = peer, place
        place.linger = min(max(0.0, hello.linger), messages.LONGEST_LINGER)  # NaN counts as 0
        peer.connection.send(messages.WorldWelcome(place.walk is not None, place.note, json.dumps(asdict(self.about))))

    def _reject(self, connection: Connection, reason: str) -> None:
        self._counts['refused'] += 1
        try:
            connection.send(messages.Rejected(reason))
        except (ConnectionLost, MessageError):
            pass  # it is being closed anyway

    def _drop(self, connection: Connection) -> None:
        peer = self._peers.pop(connection)
        self._loop.remove_reader(connection.fileno())
        connection.close()
        if peer.place is not None and peer.place.holder is peer:
            peer.place.holder, peer.place.left = None, time.monotonic()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            for connection, peer in list(self._peers.items()):
                if peer.place is None and now - peer.since > _HELLO:
                    self._drop(connection)
            for place in list(self._places.values()):
                if place.holder is None and now - place.left > place.linger and not place.requests:
                    await self._end(place)

    # --- worlds ---

    async def _answer(self, peer: _Peer, place: _Place, message: messages.Walk | messages.Forget, image: np.ndarray | None,
                      arrival: float) -> None:
        try:
            async with place.lock:
                reply, frames = await self._reply(place, message, image, arrival)
        finally:
            peer.waiting -= 1
            place.requests -= 1
        if peer.connection in self._peers:
            await self._send(peer.connection, reply, frames)

    async def _reply(self, place: _Place, message: messages.Walk | messages.Forget, image: np.ndarray | None, arrival: float
                     ) -> tuple[messages.Walked, np.ndarray | None]:
        try:
            if isinstance(message, messages.Forget):
                await self._forget(place)
                return messages.Walked(message.number), None
            if message.event and message.event == place.event:
                return self._again(place, message)
            return await self._walk(place, message, image, arrival)
        except _Refused as refused:
            self._counts['refused'] += 1
            return messages.Walked(message.number, kind=refused.kind, refusal=str(refused)), None
        except OutOfPages as error:
            await self._forget(place)
            self._counts['failed'] += 1
            return messages.Walked(message.number, kind='model', refusal=f'no memory is left to imagine in: {error}'), None
        except Exception as error:  # other worlds continue
            end_if_lost(error)
            _log.exception('a world failed')
            await self._forget(place)
            self._counts['failed'] += 1
            return messages.Walked(message.number, kind='model', refusal=f'{type(error).__name__}: {error}'), None

    async def _walk(self, place: _Place, message: messages.Walk, image: np.ndarray | None, arrival: float
                    ) -> tuple[messages.Walked, np.ndarray]:
        begun, path, shown = time.monotonic(), message.poses, []
        # Images are played from the time of the request, or from when the first of them must be there.
        due = arrival + self._turns.deadline
        if image is not None:
            await self._begin(place, image, path[0])
            place.note = message.note
            path, shown = path[1:], [image[None]]
        walk, observed = place.walk, time.monotonic()
        if walk is None:
            raise _Refused('session', 'there is no world yet: send an image')
        before = 0
        for chunk in walk.along(path, message.intrinsics[-len(path):]):
            needed = before if self._turns.deadline else before + chunk.end - chunk.first
            try:
                shown.append(await self._turns.take(place.session, chunk, due + needed * self.about.step_period, before == 0))
            except Late as late:
                if image is not None:  # the client does not know of the world that it began
                    await self._forget(place)
                raise _Refused('deadline', f'no chunk within {self._turns.deadline:g} s: {late}') from late
            before += chunk.end - chunk.first
            place.event, place.answer = '', None  # only now has the world gone on
        now = time.monotonic()
        frames = np.concatenate(shown)
        self._counts['frames'] += len(path)
        reply = messages.Walked(message.number, walk.imagined, len(path), begun - arrival, observed - begun, now - observed)
        if message.event:
            place.event, place.answer = message.event, (reply, frames if frames.nbytes <= _KEPT else None)
        return reply, frames

    async def _begin(self, place: _Place, image: np.ndarray, pose: np.ndarray) -> None:
        await self._forget(place)
        while True:
            try:
                session = await self._do(self._world.open, image, pose)
                break
            except OutOfPages as error:
                free = [each for each in self._places.values() if each.walk and each.holder is None and not each.requests]
                if not free:  # no world is without a client
                    raise _Refused('sessions', 'all worlds that there is memory for are taken: try again later') from error
                await self._end(min(free, key=lambda each: each.left))
        place.walk = Walk(session, self.about.frame_images)
        self._counts['worlds'] += 1

    def _again(self, place: _Place, message: messages.Walk) -> tuple[messages.Walked, np.ndarray]:
        reply, frames = place.answer
        if frames is None or len(frames) != len(message.poses):
            raise _Refused('event', f'{message.event} was answered, and its frames are not kept: the world goes on after them'
                           if frames is None else f'{message.event} was answered, with {len(frames)} frames')
        self._counts['repeated'] += 1
        return replace(reply, number=message.number, repeated=True), frames

    async def _forget(self, place: _Place) -> None:
        place.note, place.event, place.answer = '', '', None
        walk, place.walk = place.walk, None
        if walk is not None:
            await self._do(walk.close)

    async def _leave(self, place: _Place) -> None:
        async with place.lock:
            if place.holder is None and not place.requests:  # no other connection has come
                await self._end(place)

    async def _end(self, place: _Place) -> None:
        if self._places.get(place.session) is place:
            del self._places[place.session]
            self._turns.close(place.session)
        await self._forget(place)

    async def _send(self, connection: Connection, message: messages.Walked, frames: np.ndarray | None) -> None:
        descriptor = None
        try:
            if frames is not None:
                descriptor = await asyncio.to_thread(pictures.put, frames)
            connection.send(message, descriptor)
        except (ConnectionLost, MessageError, OSError):
            if connection in self._peers:
                self._drop(connection)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._networks, call, *arguments)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check(walk: messages.Walk) -> None:
    """Raise MessageError for an invalid walk."""
    poses, rows = walk.poses, walk.intrinsics
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not 0 < len(poses) <= _MOST_POSES or rows.shape != (len(poses), 4) \
            or not np.isfinite(poses).all() or not np.isfinite(rows).all():
        raise MessageError(f'poses are finite (N, 4, 4), N from 1 to {_MOST_POSES}, with intrinsics (N, 4); these are '
                           f'{poses.shape} and {rows.shape}')

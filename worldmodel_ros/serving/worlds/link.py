"""A world on the server of an open world model, for asyncio; and the description of such a server's model."""
from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.serving.client.link import Unavailable, say
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.world import OpenWorld

_PATIENCE = 600.0  # s for an answer: the largest models take seconds a chunk, and worlds wait for each other


@dataclass(frozen=True)
class WorldAbout:
    """A model with images of ``image_size`` (H, W), one every ``step_period`` s, ``frame_images`` of them per latent frame and
    ``chunk_frames`` per chunk, except for the first one."""

    name: str
    backend: str
    image_size: tuple[int, int]
    step_period: float
    frame_images: int
    chunk_frames: int

    @classmethod
    def of(cls, world: OpenWorld) -> WorldAbout:
        """Return the description of a loaded model."""
        return cls(world.spec.name, world.backend, tuple(world.spec.image_size), world.spec.step_period, world.frame_images,
                   world.spec.chunk_frames)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> WorldAbout:
        """Return the description in the JSON values of ``dataclasses.asdict``. Raises Unavailable."""
        try:
            height, width = values['image_size']
            return cls(**{**values, 'image_size': (int(height), int(width))})
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f'its model cannot be understood: {error}') from error


class WorldRefused(RuntimeError):
    """A refused request; the text says why. ``kind``: one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class WorldLink:
    """One world, by its name on the server. Used by the event loop's thread only."""

    def __init__(self, connection: Connection, welcome: messages.WorldWelcome) -> None:
        self.begun = welcome.begun  # there is a world to continue
        self.note = welcome.note    # of the walk that began it
        self.about = WorldAbout.read(json.loads(welcome.about))
        self.gone = ''              # why it is no longer of use
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[tuple[messages.Walked, np.ndarray | None]]] = {}
        self._loop.add_reader(connection.fileno(), self._read)

    @classmethod
    async def open(cls, path: Path, session: str, linger: float) -> WorldLink:
        """Open a world, or continue it, by a name at a server's socket. It waits there for ``linger`` s when the connection is
        lost. Raises Unavailable."""
        return cls(*await asyncio.to_thread(say, path, messages.WorldHello(session, linger), messages.WorldWelcome))

    async def walk(self, event: str, image: np.ndarray | None, poses: np.ndarray, intrinsics: np.ndarray, note: str = ''
                   ) -> tuple[messages.Walked, np.ndarray]:
        """
        Return the answer and the frames, uint8 (N, H, W, 3), for poses (N, 4, 4) with intrinsics (N, 4), as ``messages.Walk``;
        an ``image``, uint8 (H, W, 3), begins the world, and the ``note`` is kept with it.

        Raises WorldRefused, Unavailable.
        """
        descriptor = None if image is None else await asyncio.to_thread(pictures.put, image[None])
        try:
            answer, frames = await self._ask(messages.Walk(
                self._asked + 1, event, poses, intrinsics, note), descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if frames is None or len(frames) != len(poses):
            self.close('the server gave another number of frames than there are poses')
            raise Unavailable(self.gone)
        self.begun = True
        if image is not None:
            self.note = note  # repeated, too: the server may have begun the world only after this link was opened
        return answer, frames

    async def forget(self) -> None:
        """End the world; the next walk must begin one. Raises Unavailable."""
        await self._ask(messages.Forget(self._asked + 1))
        self.begun = False

    def end(self) -> None:
        """End the world for good, without lingering."""
        if not self.gone:
            self._send(messages.Goodbye())
        self.close()

    def close(self, reason: str = 'closed') -> None:
        """Leave the world; open requests raise Unavailable."""
        if self.gone:
            return
        self.gone = reason
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(reason))
        self._waiting.clear()

    async def _ask(self, message: messages.Walk | messages.Forget, descriptor: int | None = None
                   ) -> tuple[messages.Walked, np.ndarray | None]:
        if self.gone:
            raise Unavailable(self.gone)
        self._asked = message.number
        future = self._waiting[message.number] = self._loop.create_future()
        overdue = self._loop.call_later(_PATIENCE, self.close, f'the server has not answered for {_PATIENCE:g} s')
        try:
            self._send(message, descriptor)
            answer, frames = await future
        finally:
            overdue.cancel()
            self._waiting.pop(message.number, None)
        if answer.refusal:
            self.begun = self.begun and answer.kind != 'model'  # that refusal ends the world
            raise WorldRefused(answer.kind, answer.refusal)
        return answer, frames

    def _send(self, message: Any, descriptor: int | None = None) -> None:
        try:
            self._connection.send(message, descriptor)
        except (ConnectionLost, MessageError) as error:
            self.close(f'the server was lost: {error}')

    def _read(self) -> None:
        try:
            while not self.gone and (received := self._connection.receive(0.0)):
                message, descriptor = received
                frames = None if descriptor is None else pictures.take(descriptor)
                if isinstance(message, messages.Rejected):
                    self.close(message.reason)
                elif not isinstance(message, messages.Walked):
                    raise MessageError(f'{type(message).__name__} is not expected')
                elif (future := self._waiting.get(message.number)) and not future.done():
                    future.set_result((message, frames))
        except (ConnectionLost, MessageError, ValueError) as error:
            self.close(f'the server was lost: {error}')

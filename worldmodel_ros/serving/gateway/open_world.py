"""
The dialect of camera-controlled worlds (``camera``), answered by the server of an open world model (``serving.worlds``).

Such a model follows any camera, so poses are taken as they are: one for each image, sixteen images a second. That server keeps
the worlds and the frames of each one's newest event, so they outlive this process.
"""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel_ros.inputs.images import fit
from worldmodel_ros.serving.client.link import Unavailable
from worldmodel_ros.serving.worlds.link import WorldAbout, WorldLink, WorldRefused
from . import camera, poses
from .engine import EngineAway
from .msgpack import encode
from .rest import EngineStatus
from .sessions import Refusal, Session

NAME = 'open world'
_FIRST_LACKS = 4  # images fewer in the first chunk than in the others


class Dialect(camera.Dialect):
    """As ``camera.Dialect``, with a server of its own."""

    name = NAME

    def __init__(self, socket: Path, linger: float) -> None:
        """``socket``: of ``worldmodel serve`` with an open world model, where worlds wait for ``linger`` s."""
        super().__init__((0.0,) * 6)
        self._mount = np.eye(4)  # poses are the camera's own
        self._socket, self._linger = socket, linger
        self._status = EngineStatus(socket)

    async def about(self) -> WorldAbout:
        """Return the description of the server's model. Raises EngineAway."""
        status = await self._status.get()
        if status is None:
            raise EngineAway(f'no open world model is served at {self._socket}')
        try:
            return WorldAbout.read(status.get('world'))
        except Unavailable as error:
            raise EngineAway(f'at {self._socket} is no server of an open world model: {error}') from error

    def refuses(self, spec: Any) -> str:
        """Return '': it follows any camera."""
        return ''

    def greeting(self, spec: WorldAbout, backend: str) -> bytes:
        """Return the first message to a client."""
        height, width = spec.image_size
        return encode({
            'patch_size': [1, 2, 2], 'vae_stride': [spec.frame_images, 8, 8],
            'latent_frames_per_chunk': spec.chunk_frames // spec.frame_images,
            'max_area': height * width, 'model': spec.name, 'backend': backend, 'image_size': list(spec.image_size),
            'fps': 1.0 / spec.step_period, 'max_poses': poses.MOST, 'extensions': camera.Extensions.offered()})

    async def answer(self, session: Session, request: camera.Request, arrival: float, holder: Any
                     ) -> AsyncIterator[bytes | str]:
        """Yield the messages that answer a request which arrived at a steady time [s]. Raises Refusal."""
        if request.endpoint == 'reset':
            async with session.lock:
                await self._reset(session)
            yield 'reset successful'
            return
        extensions = holder.extensions = (holder.extensions or camera.Extensions()).taken(request.extensions)
        async with session.lock:
            link = await self._link(session)
            if request.image is None and not link.begun:
                raise Refusal('session', f'{session.name} has no world yet: send an image')
            if request.event_id:
                yield encode({'type': 'receipt', 'event_id': request.event_id, 'accepted': True})
            messages = await self._imagined(session, link, request, arrival, extensions)
        for message in messages:
            yield message

    async def _link(self, session: Session) -> WorldLink:
        if session.link is None or session.link.gone:
            try:
                session.link = await WorldLink.open(self._socket, session.key, self._linger if session.kept else 0.0)
            except Unavailable as error:
                self._status.forget()
                raise Refusal('engine', str(error)) from error
        return session.link

    async def _reset(self, session: Session) -> None:
        try:
            await (await self._link(session)).forget()
        except Unavailable as error:
            raise Refusal('engine', str(error)) from error
        session.begin_anew()

    async def _imagined(self, session: Session, link: WorldLink, request: camera.Request, arrival: float,
                        extensions: camera.Extensions) -> list[bytes]:
        begun, about, image, path = time.monotonic(), link.about, None, request.poses
        note = link.note
        if request.image is not None:
            session.begin_anew()
            image = await asyncio.to_thread(fit, request.image, about.image_size)
            note = json.dumps(request.image.shape[:2])  # (H, W) of the client's image, to which its intrinsics refer
        rows = poses.fitted(request.intrinsics, json.loads(note), about.image_size)
        try:
            answer, frames = await link.walk(request.event_id, image, path, rows, note)
        except WorldRefused as refused:
            raise Refusal(refused.kind, str(refused)) from refused
        except Unavailable as error:
            raise Refusal('engine', str(error)) from error
        if answer.repeated:
            session.counts['repeated'] += 1
        else:
            session.counts['imagined'] += answer.added
            session.seconds.append(time.monotonic() - begun)
        session.show(frames)
        timings = {'queue_ms': 1e3 * (begun - arrival + answer.queue), 'observe_ms': 1e3 * answer.observe,
                   'imagine_ms': 1e3 * answer.imagine, 'total_ms': 1e3 * (time.monotonic() - arrival)}
        first = answer.imagined - len(frames) + 1 + _FIRST_LACKS
        add = self._additions(extensions, rows, path, timings, first, about)
        messages = await asyncio.to_thread(camera.frame_messages, frames, request.together, extensions.frames,
                                           request.fps or 1.0 / about.step_period, add)
        if request.event_id:
            applied = max(0, answer.imagined - answer.added + _FIRST_LACKS) // about.chunk_frames
            messages.insert(0, encode({'type': 'receipt', 'event_id': request.event_id, 'applied_in_chunk': applied}))
        return messages

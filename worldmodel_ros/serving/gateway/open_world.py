"""
The dialect of camera-controlled worlds (``camera``), answered by an open world model in the gateway's own process.

Such a model follows any camera, so that poses are taken as they are: one for each image, sixteen images a second. There is one
thread for the networks; worlds take turns in it, chunk by chunk.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.inputs.images import fit
from . import camera, poses
from .msgpack import encode
from .sessions import Refusal, Session

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.session import WorldSession
    from worldmodel_ros.engine.open_world.world import OpenWorld

NAME = 'open world'
_FIRST_LACKS = 4   # images that the first chunk has less than the others
_KEPT = 16 << 20   # bytes of a reply that is kept for a client which asks again


@dataclass
class World:
    """What has become of a session's image, as ``camera.World``."""

    session: WorldSession
    left: np.ndarray             # (m, 4, 4), newest poses, too few for a chunk of the model
    size: tuple[int, int]        # (H, W) of the image that the client gave, which its intrinsics are of
    imagined: int = 0            # frames, those of ``left`` included
    answered: tuple[str, list[bytes]] = ('', [])  # the newest event and the messages that answered it


class Dialect(camera.Dialect):
    """As ``camera.Dialect``, with a model of its own."""

    name = NAME

    def __init__(self, world: OpenWorld) -> None:
        super().__init__((0.0,) * 6)
        self._mount = np.eye(4)  # poses are the camera's
        self._world = world
        self.about = world.spec, world.backend
        self._networks = ThreadPoolExecutor(1, 'open world')

    def refuses(self, spec: Any) -> str:
        """Return '': it follows any camera."""
        return ''

    def greeting(self, spec: Any, backend: str) -> bytes:
        """Return the first message to a client."""
        world, preset = self._world, self._world.preset
        height, width = spec.image_size
        return encode({
            'patch_size': [1, 2, 2], 'vae_stride': [world.frame_images, 8, 8], 'latent_frames_per_chunk': preset.chunk_frames,
            'max_area': height * width, 'model': spec.name, 'backend': backend, 'image_size': list(spec.image_size),
            'fps': 1.0 / spec.step_period, 'max_poses': poses.MOST, 'extensions': camera.Extensions.offered()})

    def close(self) -> None:
        """End the thread after the chunk that it is at."""
        self._networks.shutdown(cancel_futures=True)

    async def answer(self, session: Session, request: camera.Request, arrival: float, holder: Any
                     ) -> AsyncIterator[bytes | str]:
        """Yield the messages that answer a request which arrived at a steady time [s]. Raises Refusal."""
        if request.endpoint == 'reset':
            async with session.lock:
                _forget(session)
            yield 'reset successful'
            return
        extensions = holder.extensions = (holder.extensions or camera.Extensions()).taken(request.extensions)
        accepted = encode({'type': 'receipt', 'event_id': request.event_id, 'accepted': True})
        async with session.lock:
            world, begins = session.world, request.image is not None
            if not begins and world is None:
                raise Refusal('session', f'{session.name} has no world yet: send an image')
            if request.event_id:
                yield accepted
            if request.event_id and world is not None and world.answered[0] == request.event_id:
                session.counts['repeated'] += 1
                messages = camera.stored(*world.answered)
            else:
                messages = await self._imagined(session, request, begins, arrival, extensions)
        for message in messages:
            yield message

    async def _imagined(self, session: Session, request: camera.Request, begins: bool, arrival: float,
                        extensions: camera.Extensions) -> list[bytes]:
        begun, spec = time.monotonic(), self._world.spec
        if begins:
            _forget(session)
            image = await asyncio.to_thread(fit, request.image, spec.image_size)
            session.world = await self._begin(image, request)
        world = session.world
        intrinsics = poses.fitted(request.intrinsics, world.size, spec.image_size)
        observed, path = time.monotonic(), request.poses[1:] if begins else request.poses
        session.world = None  # if this fails, it is not known where it ends
        frames = [image[None]] if begins else []
        frames += await self._follow(world, path, intrinsics[-len(path):])
        session.world, now = world, time.monotonic()
        frames = np.concatenate(frames)
        session.newest, session.pictures = frames, session.pictures + 1
        session.counts['imagined'] += len(path)
        session.seconds.append(now - begun)
        timings = {'queue_ms': 1e3 * (begun - arrival), 'observe_ms': 1e3 * (observed - begun),
                   'imagine_ms': 1e3 * (now - observed), 'total_ms': 1e3 * (now - arrival)}
        first = world.imagined - len(frames) + 1
        add = self._additions(extensions, intrinsics, request.poses, timings, first + _FIRST_LACKS, spec)
        messages = await asyncio.to_thread(camera.frame_messages, frames, request.together, extensions.frames,
                                           request.fps or 1.0 / spec.step_period, add)
        if request.event_id:
            applied = max(0, world.imagined - len(path) + _FIRST_LACKS) // spec.chunk_frames
            messages.insert(0, encode({'type': 'receipt', 'event_id': request.event_id, 'applied_in_chunk': applied}))
            # Before they are sent: who loses the connection now can ask for them again.
            world.answered = request.event_id, messages if sum(map(len, messages)) <= _KEPT else []
        return messages

    async def _begin(self, image: np.ndarray, request: camera.Request) -> World:
        try:
            opened = await self._do(lambda: self._world.open(image, request.poses[0]))
        except OutOfPages as error:
            raise Refusal('sessions', 'all worlds that there is memory for are taken: try again later') from error
        return World(opened, np.zeros((0, 4, 4)), request.image.shape[:2])

    async def _follow(self, world: World, path: np.ndarray, intrinsics: np.ndarray) -> list[np.ndarray]:
        """The frames of poses (N, 4, 4), each uint8 (n, H, W, 3). Those that fill no chunk are imagined on a fork."""
        from worldmodel_ros.model.wan.camera import Intrinsics
        waiting, skipped, shown = np.concatenate([world.left, path]), len(world.left), []
        every, rows = self._world.frame_images, np.concatenate([np.repeat(intrinsics[:1], len(world.left), 0), intrinsics])
        while len(waiting):
            count = world.session.images_of_chunk
            whole = len(waiting) >= count
            part = np.concatenate([waiting[:count], np.repeat(waiting[-1:], count - len(waiting[:count]), 0)])
            pinhole = Intrinsics(*map(float, rows[0]))

            def imagine(part: np.ndarray = part, pinhole: Intrinsics = pinhole, whole: bool = whole) -> np.ndarray:
                session = world.session if whole else world.session.fork()
                try:
                    return session.imagine(part[every - 1::every], pinhole)
                finally:
                    if not whole:
                        session.close()
            try:
                frames = await self._do(imagine)
            except OutOfPages as error:
                raise Refusal('model', f'no memory is left to imagine in: {error}') from error
            shown.append(frames[skipped:len(waiting)])
            if not whole:
                break
            waiting, rows, skipped = waiting[count:], rows[count:], 0
        world.left, world.imagined = waiting, world.imagined + len(path)
        return shown

    async def _do(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._networks, call)


def _forget(session: Session) -> None:
    """Begin again from nothing, and give the pages back at once: others may wait for them."""
    if session.world is not None:
        session.world.session.close()
    session.begin_anew()

"""
The dialect of camera-controlled worlds: an image and camera poses in, video out, as in the realtime endpoint of vllm-omni's
pull request 3701.

The first message is the server's configuration. A request is answered by maps {type: frame, index, total, video}; a reset by
a text; a refused request by a map {type: error, message}, and the connection stays open. Extensions are used only if a client
asks for them.
"""
from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import cv2
import numpy as np

from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from . import poses
from .msgpack import WireError, decode, encode
from .sessions import Refusal, Session

NAME = 'camera'
PATH = '/v1/realtime/world/camera'
ENCODINGS = ('float32', 'uint8', 'jpeg', *(('mp4',) if find_spec('av') else ()))
_DEFAULT_SESSION = 'default'
_TOGETHER = 4             # frames per message, by default
_MOST_TOGETHER = 64
_LONGEST_TEXT = 4096      # characters of a prompt
_LONGEST_EVENT = 128      # characters of an event_id
_MAX_SIDE = 8192          # pixels
_OBSERVE = 10.0           # s for the engine to take in an image
_IMAGINE = 60.0           # s for the frames of one request
_KEPT = 16 << 20          # bytes, at most, of a reply that is kept to be repeated
_JPEG_QUALITY = 90


@dataclass(frozen=True)
class Extensions:
    """
    What a connection has asked for. ``frames``: one of ENCODINGS; ``timings``: these and ``chunk`` with each message of
    frames; ``rays``: 'origin' or 'moment', the Pluecker coordinates of the frames' pixels as the server interprets the
    camera; ``poses``: those that the camera really reached.
    """

    frames: str = 'float32'
    timings: bool = False
    rays: str = ''
    poses: bool = False

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Return the extensions for the server's configuration."""
        return {'frames': list(ENCODINGS), 'timings': True, 'rays': ['origin', 'moment'], 'poses': True, 'event_id': True,
                'intrinsics_per_frame': True}

    def taken(self, asked: Any) -> Extensions:
        """Return these, updated by a request. Raises Refusal."""
        if asked is None:
            return self
        known = isinstance(asked, Mapping) and not set(asked) - set(vars(self)) and all(
            type(value) is type(getattr(self, name)) for name, value in asked.items())
        taken = replace(self, **asked) if known else None
        if taken is None or taken.frames not in ENCODINGS or taken.rays not in ('', 'origin', 'moment'):
            raise Refusal('request', f'extensions are a map of {Extensions.offered()}')
        return taken


@dataclass(frozen=True)
class Request:
    """One message of a client."""

    session_id: str
    endpoint: str
    event_id: str = ''
    image: np.ndarray | None = None  # uint8 (H, W, 3)
    poses: np.ndarray | None = None  # (N, 4, 4)
    intrinsics: np.ndarray | None = None  # (N, 4)
    together: int = _TOGETHER
    fps: float | None = None
    extensions: Any = None

    @classmethod
    def of(cls, message: Any) -> Request:
        """Read a message. Raises Refusal."""
        if not isinstance(message, Mapping):
            raise Refusal('request', 'Invalid request payload: a request is a map')
        body = message.get('extra_body')
        body = {} if body is None else body
        if not isinstance(body, Mapping):
            raise Refusal('request', 'extra_body is a map')
        texts = [source.get(key) for source, key in (
            (message, 'session_id'), (body, 'session_id'), (message, 'endpoint'), (message, 'event_id'), (message, 'prompt'))]
        if not all(text is None or (isinstance(text, str) and len(text) <= _LONGEST_TEXT) for text in texts):
            raise Refusal('request', 'session_id, event_id and prompt are texts, endpoint is "infer" or "reset"')
        own, inner, endpoint, event, _ = (text or '' for text in texts)
        named = own or inner or _DEFAULT_SESSION
        if endpoint not in ('', 'infer', 'reset') or len(event) > _LONGEST_EVENT:
            raise Refusal('request', f'endpoint is "infer" or "reset", event_id has up to {_LONGEST_EVENT} characters')
        if endpoint == 'reset':
            return cls(named, endpoint, event, extensions=message.get('extensions'))
        together, fps = body.get('frames_per_chunk', _TOGETHER), body.get('fps')
        frames = body.get('num_frames')
        if not _whole(together) or not 0 < together <= _MOST_TOGETHER or not (
                frames is None or (_whole(frames) and frames > 0)) or not (fps is None or _is_rate(fps)):
            raise Refusal('request', f'extra_body: frames_per_chunk is 1 to {_MOST_TOGETHER}, num_frames above 0, fps 1 to 240')
        try:
            path, intrinsics = poses.read(message.get('camera', message.get('cameras')))
        except poses.PoseError as error:
            raise Refusal('camera', str(error)) from error
        if frames is not None and len(path) > frames:
            raise Refusal('camera', f'{len(path)} poses are more than num_frames, {frames}')
        return cls(named, 'infer', event, _image(message.get('image')), path, intrinsics, int(together), fps,
                   message.get('extensions'))


@dataclass
class World:
    """The state of a session's world since its image; it ends with the session."""

    base: np.ndarray             # (4, 4), pose of the robot
    left: np.ndarray             # (m, A), newest actions, too few for a chunk of the model
    size: tuple[int, int]        # (H, W) of the client's image, to which its intrinsics refer
    imagined: int = 0            # frames, those of ``left`` included
    kept: bool = False           # whether the engine has a branch to continue
    answered: tuple[str, list[bytes]] = ('', [])  # the newest event and the messages that answered it

    def values(self) -> dict[str, Any]:
        """Return the state as JSON values, without messages."""
        return {'base': self.base.tolist(), 'left': self.left.tolist(), 'columns': self.left.shape[1], 'size': self.size,
                'imagined': self.imagined, 'kept': self.kept, 'event': self.answered[0]}

    @classmethod
    def of(cls, values: Any) -> World | None:
        """Return the world of ``values``; None if they are invalid."""
        try:
            left = np.array(values['left'], np.float32).reshape(-1, values['columns'])
            return cls(np.array(values['base'], np.float64), left, tuple(values['size']), values['imagined'], values['kept'],
                       (values['event'], []))
        except (KeyError, TypeError, ValueError):
            return None


class Dialect:
    """As ``openpi.Dialect``. ``mount``: x, y, z [m], roll, pitch, yaw [rad] of the camera's body in the robot's base."""

    name = NAME

    def __init__(self, mount: tuple[float, ...]) -> None:
        self._mount = poses.mount_pose(mount)

    def refuses(self, spec: Preset) -> str:
        """Return a text for clients of a model that cannot follow a camera; empty: it can."""
        reason = poses.unsupported(spec)
        return json.dumps({'type': 'error', 'error': f'Camera realtime API is not supported: {reason}'}) if reason else ''

    def greeting(self, spec: Preset, backend: str) -> bytes:
        """Return the first message to a client."""
        return encode({
            'patch_size': [1, spec.patch, spec.patch], 'vae_stride': [1, spec.vae_downsample, spec.vae_downsample],
            'latent_frames_per_chunk': spec.chunk_frames, 'max_area': spec.image_size[0] * spec.image_size[1],
            'model': spec.name, 'backend': backend, 'image_size': list(spec.image_size), 'fps': 1.0 / spec.step_period,
            'max_poses': poses.MOST, 'camera_in_base': self._mount, 'action_names': list(spec.action_names),
            'action_low': list(spec.action_low), 'action_high': list(spec.action_high),
            'extensions': Extensions.offered()})

    def read(self, message: bytes | str) -> Request | None:
        """Return the request in a message; None: there is nothing to answer. Raises Refusal."""
        if isinstance(message, str):
            return None  # as in the pull request's server
        try:
            return Request.of(decode(message))
        except WireError as error:
            raise Refusal('malformed', f'Invalid request payload: {error}') from error

    def refusal(self, refusal: Refusal) -> bytes:
        """Return the message of a refusal."""
        return encode({'type': 'error', 'message': str(refusal)})

    async def answer(self, session: Session, request: Request, arrival: float, holder: Any) -> AsyncIterator[bytes | str]:
        """Yield the messages that answer a request which arrived at a steady time [s]. Raises Refusal."""
        if request.endpoint == 'reset':
            async with session.lock:
                session.begin_anew()
            yield 'reset successful'
            return
        extensions = holder.extensions = (holder.extensions or Extensions()).taken(request.extensions)
        accepted = encode({'type': 'receipt', 'event_id': request.event_id, 'accepted': True})
        async with session.lock:
            spec = (await session.engine()).spec
            if session.recovered:
                (note, answer), session.recovered = session.recovered, None
                # If the engine still has the answer, it also has its memory, with the branch that the world continues.
                session.world = World.of(note.facts.get('world')) if answer else None
            world = session.world
            known = request.event_id and world is not None and world.answered[0] == request.event_id
            begins = request.image is not None
            if not begins and world is None:
                raise Refusal('session', f'{session.name} has no world yet, or its engine was lost: send an image')
            if known:
                session.counts['repeated'] += 1
                messages = stored(*world.answered)
            else:
                path = request.poses
                start = poses.base_of(path[0], self._mount) if begins else world.base
                try:
                    actions, bases = poses.follow(start, path[1:] if begins else path, self._mount, spec)
                except poses.PoseError as error:
                    raise Refusal('camera', str(error)) from error
                if request.event_id:
                    yield accepted
                frames, timings = await self._frames(session, request, begins, start, actions, bases, arrival)
                world = session.world
                if begins:
                    bases = np.concatenate([start[None], bases])
                intrinsics = poses.fitted(request.intrinsics, world.size, spec.image_size)
                add = self._additions(extensions, intrinsics, bases, timings, world.imagined - len(frames) + 1, spec)
                fps = request.fps or 1.0 / spec.step_period
                messages = await asyncio.to_thread(frame_messages, frames, request.together, extensions.frames, fps, add)
                if request.event_id:
                    applied = (world.imagined - len(actions)) // spec.chunk_frames
                    messages.insert(0, encode({'type': 'receipt', 'event_id': request.event_id, 'applied_in_chunk': applied}))
                    # Before they are sent, so that a client that loses the connection now can ask for them again.
                    world.answered = request.event_id, messages if sum(map(len, messages)) <= _KEPT else []
                session.note(world=world.values())
        if known:
            yield accepted
        for message in messages:
            yield message

    async def _frames(self, session: Session, request: Request, begins: bool, start: np.ndarray, actions: np.ndarray,
                      bases: np.ndarray, arrival: float) -> tuple[np.ndarray, dict[str, float]]:
        """Return the frames of the request's poses, uint8 (N, H, W, 3), and the ms that they took."""
        begun, spec, shown = time.monotonic(), session.spec, []
        if begins:
            session.begin_anew()
            image = await asyncio.to_thread(fit, request.image, spec.image_size)
            await session.tick(image, '', np.zeros(spec.actions, np.float32), begun + _OBSERVE, arrival)
            session.world = World(start, np.zeros((0, spec.actions), np.float32), request.image.shape[:2])
            shown.append(image[None])
        world, observed = session.world, time.monotonic()
        if len(actions):
            waiting = np.concatenate([world.left, actions])
            whole = len(waiting) // spec.chunk_frames * spec.chunk_frames
            skipped = len(world.left)  # frames that were shown already
            session.world = None  # if this fails, the end of the engine's branch is unknown
            session.note()
            if whole:
                shown.append((await session.imagine(waiting[:whole], _IMAGINE, True, world.kept))[skipped:])
                world.kept, skipped = True, 0
            if len(waiting) > whole:
                shown.append((await session.imagine(waiting[whole:], _IMAGINE, False, world.kept))[skipped:])
            world.left, world.base = waiting[whole:], bases[-1]
            world.imagined += len(actions)
            session.world = world
        now = time.monotonic()
        return np.concatenate(shown), {'queue_ms': 1e3 * (begun - arrival), 'observe_ms': 1e3 * (observed - begun),
                                       'imagine_ms': 1e3 * (now - observed), 'total_ms': 1e3 * (now - arrival)}

    def _additions(self, extensions: Extensions, intrinsics: np.ndarray, bases: np.ndarray, timings: dict[str, float],
                   first: int, spec: Preset) -> Callable[[int, int], dict[str, Any]]:
        """Return the additions to the frames from ``begin`` to ``end`` of a reply, whose first frame has number ``first``."""
        reached = bases @ self._mount

        def add(begin: int, end: int) -> dict[str, Any]:
            said: dict[str, Any] = {}
            if extensions.timings:
                said |= {'timings': timings, 'chunk': max(0, first + begin - 1) // spec.chunk_frames}
            if extensions.poses:
                said['poses'] = reached[begin:end]
            if extensions.rays:
                size, part = spec.image_size, slice(begin, end)
                said['rays'] = poses.pluecker(reached[part], intrinsics[part], size, extensions.rays)
            return said
        return add


def stored(event: str, messages: list[bytes]) -> list[bytes]:
    """Return the messages that answered an event. Raises Refusal if they were too large to be kept, or another process sent
    them."""
    if not messages:
        raise Refusal('event', f'{event} was answered, and its frames are not kept: the world goes on after them')
    return messages


def frame_messages(frames: np.ndarray, together: int, encoding: str, fps: float, add: Callable[[int, int], dict[str, Any]]
              ) -> list[bytes]:
    """Return messages with frames, uint8 (N, H, W, 3). Call it in a thread: encoding would block an event loop for too long."""
    total, out = -(-len(frames) // together), []
    for index in range(total):
        begin, end = index * together, min((index + 1) * together, len(frames))
        video = _ENCODERS[encoding](frames[begin:end], fps)
        said = {} if encoding == 'float32' else {'encoding': encoding}
        out.append(encode({'type': 'frame', 'index': index, 'total': total, 'video': video, **said, **add(begin, end)}))
    return out


def _as_float32(frames: np.ndarray, _: float) -> np.ndarray:
    return frames * np.float32(1.0 / 255.0)


def _as_jpeg(frames: np.ndarray, _: float) -> list[bytes]:
    settings = cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY
    return [cv2.imencode('.jpg', frame[..., ::-1], settings)[1].tobytes() for frame in frames]


def _as_mp4(frames: np.ndarray, fps: float) -> bytes:
    """Return a self-contained fragmented MP4, H.264, that begins with a key frame."""
    import av  # optional
    out = io.BytesIO()
    with av.open(out, 'w', format='mp4', options={'movflags': 'frag_keyframe+empty_moov+default_base_moof'}) as container:
        stream = container.add_stream('libx264', rate=max(1, round(fps)),
                                      options={'preset': 'veryfast', 'tune': 'zerolatency', 'crf': '18'})
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], 'yuv420p'
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format='rgb24')))
        container.mux(stream.encode(None))
    return out.getvalue()


_ENCODERS: dict[str, Callable[[np.ndarray, float], Any]] = {
    'float32': _as_float32, 'uint8': lambda frames, _: frames, 'jpeg': _as_jpeg, 'mp4': _as_mp4}


def _image(image: Any) -> np.ndarray | None:
    if image is None:
        return None
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 \
            or not 0 < min(image.shape) or max(image.shape) > _MAX_SIDE:
        raise Refusal('request', f'image must be uint8 (H, W, 3), sides up to {_MAX_SIDE}')
    return image


def _whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and 1.0 <= value <= 240.0

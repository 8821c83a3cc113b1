"""One stream of an open world: starts from an image and continues by imagined or observed chunks; forks and files."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...model.wan import camera
from ...model.wan.sampler import finished
from ...model.wan.vae import ImageCondition, StreamState, WanVae
from ..session_folder import SessionFileError

if TYPE_CHECKING:
    from .world import OpenWorld

FORMAT = 'open world 1'
LATENT_PERIOD = 0.25  # s per latent frame of four images


class WorldSession:
    """What was observed and imagined since an image; not thread-safe.

    Poses are the camera's (4, 4), camera-to-world, optical frame, of the last image of each latent frame; the first latent
    frame is the image that the session began with. No call copies the history: keys and values are in shared pages, and the
    states of the VAE are never written to.
    """

    def __init__(self, world: OpenWorld, image: np.ndarray, pose: np.ndarray, seed: int = 0):
        self._world, self._seed, self._number = world, seed, world.next_number()
        world.tell('open', self._number, image, pose, seed)
        height, width = world.spec.image_size
        if image.shape != (height, width, 3) or image.dtype != np.uint8:
            raise ValueError(f'image must be uint8 {(height, width, 3)}, not {image.dtype} {image.shape}')
        self._condition = ImageCondition(world.vae, to_vae(image[None], world.device)[:, 0])
        self._decoded = world.vae.start()
        self._encoded = world.vae.start(encoder=True)
        self._pose = np.asarray(pose, np.float64)
        self._imagined = False
        self._sequence = world.pages_for(self)

    @property
    def frame(self) -> int:
        """Number of latent frames."""
        return self._sequence.frame

    @property
    def images_of_chunk(self) -> int:
        """Number of images of the next chunk, not counting the image that the session began with."""
        return self._world.frame_images * (self._world.preset.chunk_frames - (self.frame == 0))

    @property
    def pose(self) -> np.ndarray:
        """Pose of the newest latent frame, (4, 4)."""
        return self._pose

    def rebase(self, pose: np.ndarray) -> None:
        """Go on as if the camera's newest pose were ``pose`` (4, 4): those of a session from a file may have another origin."""
        self._world.tell('rebase', self._number, pose)
        self._pose = np.asarray(pose, np.float64)

    def fork(self) -> WorldSession:
        """Return a branch, which must be closed; copies neither keys and values nor the VAE's state."""
        other: WorldSession = object.__new__(WorldSession)
        other.__dict__.update(self.__dict__)
        other._number = self._world.next_number()
        self._world.tell('fork', self._number, other._number)
        other._sequence, other._condition = self._sequence.fork(), self._condition.fork()
        return other

    def close(self) -> None:
        """Release the pages."""
        self._world.tell('close', self._number)
        self._sequence.close()
        self._world.closed(self)

    def imagine(self, poses: np.ndarray, intrinsics: camera.Intrinsics, steps: int | None = None) -> np.ndarray:
        """Imagine the next chunk along ``poses``, one for each latent frame that it adds, excluding the session's first image:
        uint8 (images_of_chunk, H, W, 3). ``intrinsics``: of an image of the world's size. ``steps``: to take fewer than the
        model has. Raises ValueError and OutOfPages."""
        return finished(self.imagining(poses, intrinsics, steps))

    def imagining(self, poses: np.ndarray, intrinsics: camera.Intrinsics, steps: int | None = None
                  ) -> Generator[None, None, np.ndarray]:
        """``imagine`` as a generator that pauses between ``OpenWorld.units``. The session must not be used otherwise meanwhile;
        closing the generator before its end leaves the session unchanged."""
        self._world.tell('imagine', self._number, poses, intrinsics, steps)
        with self._world.jointly():
            return (yield from self._passes(poses, intrinsics, steps))

    def _passes(self, poses: np.ndarray, intrinsics: camera.Intrinsics, steps: int | None) -> Generator[None, None, np.ndarray]:
        frames, rays, poses = self._world.preset.chunk_frames, *self._rays(poses, intrinsics)
        shape, at = (16, frames, *self._world.latent_size), self.frame

        def noise(step: int) -> Tensor:
            # Seeded by its place in the sequence, so that branches and repetitions differ only by their inputs.
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + at) * 101 + step)
            return torch.randn(shape, generator=generator).to(self._world.device)
        condition = self._condition.fork()
        sampler = self._world.sampler if steps is None else self._world.sampler_of(steps)
        with torch.inference_mode():
            given = self._sequence, self._world.prompt, noise, condition.next(frames), rays
        if len(self._world.units(len(sampler.schedule.steps))) > 1:
            latents = yield from sampler.pass_by_pass(*given)
        else:
            latents = sampler.chunk(*given)
        with torch.inference_mode():
            images = self._decode(latents)
        self._condition, self._pose, self._imagined = condition, poses[-1], True
        return to_uint8(images[:, 1:] if at == 0 else images)

    def observe(self, images: np.ndarray, poses: np.ndarray, intrinsics: camera.Intrinsics) -> None:
        """Commit real images, uint8 (images_of_chunk, H, W, 3), as the next chunk, with poses as of ``imagine``, without
        denoising. Raises ValueError for another number, or after anything was imagined; OutOfPages.

        Self-Forcing extends videos this way; for LingBot-World it is not validated.
        """
        self._world.tell('observe', self._number, images, poses, intrinsics)
        with self._world.jointly():
            self._commit(images, poses, intrinsics)

    def _commit(self, images: np.ndarray, poses: np.ndarray, intrinsics: camera.Intrinsics) -> None:
        if self._imagined:
            raise ValueError('what follows an imagined chunk is no observation: fork before imagining')
        if images.shape[0] != self.images_of_chunk:
            raise ValueError(f'{len(images)} images: a chunk takes {self.images_of_chunk}')
        frames, rays, poses = self._world.preset.chunk_frames, *self._rays(poses, intrinsics)
        video = to_vae(images, self._world.device)
        if self.frame == 0:
            video = torch.cat([self._condition.image[:, None], video], 1)
        condition = self._condition.fork()
        with torch.inference_mode():
            latents, encoded = self._world.vae.encode(video, self._encoded)
            self._world.sampler.commit(self._sequence, self._world.prompt, latents, condition.next(frames), rays)
            self._decode(latents)  # advances the decoder, so that the next imagined chunk follows these images
        self._condition, self._encoded, self._pose = condition, encoded, poses[-1]

    def _decode(self, latents: Tensor) -> Tensor:
        """Return images (3, n, H, W) of latents, and advance the decoder's state."""
        if not self._world.decodes:
            return torch.zeros(3, 4 * latents.shape[1], *self._world.spec.image_size)
        images, self._decoded = self._world.vae.decode(latents, self._decoded)
        return images

    def _rays(self, poses: np.ndarray, intrinsics: camera.Intrinsics) -> tuple[Tensor, np.ndarray]:
        """Return the rays of a chunk's tokens, and the poses of its latent frames."""
        world, poses, first = self._world, np.asarray(poses, np.float64), self.frame == 0
        count = world.preset.chunk_frames - first
        if poses.shape != (count, 4, 4) or not np.isfinite(poses).all():
            raise ValueError(f'poses must be finite ({count}, 4, 4), and are {poses.shape}')
        every = np.concatenate([self._pose[None], poses]) if first else poses
        relative = camera.relative_poses(every, None if first else self._pose, LATENT_PERIOD * world.description.top_speed)
        rays = camera.rays(relative, intrinsics, world.spec.image_size, world.device)
        return camera.ray_tokens(rays), every

    def save(self) -> bytes:
        """Return the session as a safetensors file: pages, positions, and the streaming states of the VAE and the condition."""
        self._world.tell('save', self._number)
        with self._world.jointly():
            return self._content()

    def _content(self) -> bytes:
        tensors = {f'sequence.{name}': tensor for name, tensor in self._sequence.save().items()}
        for name, state in (('decoder', self._world.vae.whole(self._decoded)), ('encoder', self._encoded),
                            ('condition', self._condition.state)):
            tensors |= {f'{name}.{key}': tensor for key, tensor in state.tensors().items()}
        tensors['image'], tensors['pose'] = self._condition.image, torch.from_numpy(self._pose)
        if self._condition.newest is not None:
            tensors['newest'] = self._condition.newest
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        told = {'format': FORMAT, 'fingerprint': self._world.fingerprint, 'seed': str(self._seed),
                'imagined': str(int(self._imagined)), 'settled': str(int(self._condition.settled))}
        return save(tensors, told | {'sha256': _digest(tensors, told)})

    @classmethod
    def load(cls, world: OpenWorld, content: bytes) -> WorldSession:
        """Return a session from what ``save`` returned. Raises SessionFileError for a file that is damaged or of another world,
        and OutOfPages."""
        try:
            tensors, told = load(content), _metadata(content)
            digest = told.pop('sha256', '')
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise SessionFileError(f'this is no session of an open world: {error}') from error
        if told.get('format') != FORMAT or digest != _digest(tensors, told):
            raise SessionFileError('this is no session of an open world, or it is damaged')
        if told['fingerprint'] != world.fingerprint:
            raise SessionFileError('the session is of another world, size or precision')
        session: WorldSession = object.__new__(cls)
        session._world, session._seed, session._number = world, int(told['seed']), world.next_number()
        world.tell('load', session._number, content)
        session._imagined, session._pose = told['imagined'] == '1', tensors['pose'].numpy()
        session._decoded, session._encoded, seen = (
            _state(world, tensors, name) for name in ('decoder', 'encoder', 'condition'))
        session._decoded = world.vae.own(session._decoded)
        newest = tensors.get('newest')
        session._condition = ImageCondition.of(world.vae, tensors['image'].to(world.device), seen,
                                               None if newest is None else newest.to(world.device), told['settled'] == '1')
        session._sequence = world.pages_for(session)
        try:
            session._sequence.restore(_under('sequence', tensors))
        except ValueError as error:
            session.close()
            raise SessionFileError(str(error)) from error
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def read(cls, world: OpenWorld) -> Callable[[BinaryIO, int], WorldSession]:
        """Return the function with which ``SessionFolder.load`` reads a session."""
        return lambda file, size: cls.load(world, file.read(size))


def to_vae(images: np.ndarray, device: torch.device) -> Tensor:
    """Convert uint8 (n, H, W, 3) to float32 (3, n, H, W) in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(3, 0, 1, 2).float() / 127.5 - 1.0


def to_uint8(images: Tensor) -> np.ndarray:
    """Convert float32 (3, n, H, W) in [-1, 1] to uint8 (n, H, W, 3)."""
    return ((images + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()


def _state(world: OpenWorld, tensors: dict[str, Tensor], name: str) -> StreamState:
    held = {key: tensor.to(world.device) for key, tensor in _under(name, tensors).items()}
    return StreamState.of_tensors(held, len(world.vae.start(encoder=name != 'decoder').features), WanVae.MARK)


def _under(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[len(name) + 1:]: tensor for key, tensor in tensors.items() if key.startswith(f'{name}.')}


def _metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], 'little')
    return dict(json.loads(content[8:8 + length])['__metadata__'])


def _digest(tensors: dict[str, Tensor], told: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f'{name} {tensor.dtype} {tuple(tensor.shape)}'.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else b'')
    return digest.hexdigest()

"""Episodes simulated during training: worker processes simulate, the training device holds the newest episodes.

A GPU available for only minutes need not wait for its data. Runs that share data need a dataset on disk (``simulate``).
"""
from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from multiprocessing.pool import Pool

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.vae import VAE
from .episodes import ARRAYS, Episodes, to_network
from .recall import keyframes_of, moments_of

CHUNK = 8  # episodes that are handed over at a time
SAID_EVERY = 10.0  # s


class LiveEpisodes(Episodes):
    """At most ``capacity`` episodes on a device, in preallocated memory; once it is full, new ones replace the oldest. ``add``
    may be called while others read: an episode counts once it is complete, and none is replaced while one is ``reading``."""

    def __init__(self, capacity: int, frames: int, preset: Preset, device: torch.device):
        from worldmodel_ros.sim.rollout import array_shapes
        arrays = {name: torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, kind)).dtype, device=device)
                  for name, (shape, kind) in array_shapes(capacity, frames, preset.image_size).items() if name in ARRAYS}
        super().__init__(**arrays)
        self._preset, self._recalls = preset, np.zeros((capacity, frames), bool)
        self.count, self.added, self._vae = 0, 0, None
        self._adding, self._reading = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return self.count

    @property
    def frame_count(self) -> int:
        """Frames of the episodes held."""
        return self.count * self.frames.shape[1]

    def reading(self) -> AbstractContextManager:
        return self._reading

    @torch.no_grad()
    def encode(self, vae: VAE, images: int = 1024) -> None:
        """Fill ``latents`` of all episodes, one at a time, and of those added from now on."""
        shape = *self.frames.shape[:2], *vae.preset.latent_size, vae.preset.latent_channels
        latents = torch.zeros(shape, dtype=torch.bfloat16, device=self.frames.device)
        with self._adding:  # an episode added meanwhile would be left out
            self._vae = vae
            for number in range(self.count):
                latents[number] = self._encoded(self.frames[number])
            self.latents = latents

    @torch.no_grad()
    def add(self, episodes: list[Mapping[str, np.ndarray]]) -> None:
        """Add episodes, arrays as ``sim.rollout.collect`` returns them, without their first axis."""
        with self._adding:
            self._add(episodes)

    def _add(self, episodes: list[Mapping[str, np.ndarray]]) -> None:
        device, capacity = self.frames.device, self.frames.shape[0]
        held = [field.name for field in fields(Episodes) if isinstance(getattr(self, field.name), Tensor)]
        arrived = {name: torch.from_numpy(np.stack([each[name] for each in episodes])).to(device)
                   for name in held if name != 'latents'}
        if self._vae is not None:
            arrived['latents'] = torch.stack([self._encoded(frames) for frames in arrived['frames']])
        places = (self.added + np.arange(len(episodes))) % capacity
        recalls = np.stack([moments_of(self._preset, each['actions']) for each in episodes])
        keyframes = {place: keyframes_of(self._preset, each['actions']) for place, each in zip(places.tolist(), episodes)
                     } if self._preset.keyframe_slabs else {}
        place = torch.from_numpy(places).to(device)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        # Free places are not read yet, and a step that is being compiled takes minutes. On a device, what was read before comes
        # first in its queue.
        with self._reading if self.added + len(episodes) > capacity else nullcontext():
            for name, values in arrived.items():
                getattr(self, name)[place] = values
            self._recalls[places] = recalls
            self._keyframes |= keyframes
            self.added += len(episodes)
            self.count = min(self.added, capacity)

    def _encoded(self, frames: Tensor) -> Tensor:
        """Return the latents (T, h, w, Z) of an episode's frames (T, H, W, 3)."""
        return self._vae.encode_clips(to_network(frames[None]))[0].bfloat16()


class Simulation:
    """Simulates in ``workers`` processes until all is done or it is stopped: the seeds ``held_back``, whose episodes go to
    ``held``, and then ``seeds``, for ``episodes``. ``measured``: share whose actions are what wheel encoders measured."""

    def __init__(self, seeds: range, held_back: range, capacity: int, frames: int, preset: Preset,
                 mix: Mapping[str, float] | None, device: torch.device, workers: int, measured: float = 0.0):
        from worldmodel_ros.sim.behaviour import DEFAULT_MIX
        from worldmodel_ros.sim.rollout import check_mix, start_worker
        mix = dict(DEFAULT_MIX if mix is None else mix)
        check_mix(mix)
        self.episodes = LiveEpisodes(capacity, frames, preset, device)
        self.held = LiveEpisodes(len(held_back), frames, preset, device) if held_back else None
        self._held_back, self._failed = len(held_back), None
        self._pool = multiprocessing.get_context('spawn').Pool(workers, start_worker)
        jobs = [[(seed, frames, preset.image_size, mix, measured) for seed in part] for part in (held_back, seeds)]
        self._thread = threading.Thread(target=self._feed, args=(self._pool, *jobs), daemon=True)
        self._thread.start()

    def wait(self, count: int) -> None:
        """Wait for the held-back episodes and ``count`` others. Raises RuntimeError if the simulation ends before."""
        while True:
            ended = not self._thread.is_alive()  # asked first: its last episodes come as it ends
            if self.episodes.count >= count and (self.held is None or self.held.count == self._held_back):
                return
            if ended:
                raise RuntimeError(f'the simulation ended after {self.episodes.count} episodes: '
                                   f'{self._failed or "no seeds are left"}')
            time.sleep(0.05)

    def stop(self) -> None:
        """End its processes."""
        self._pool.terminate()
        self._thread.join(10.0)

    def _feed(self, pool: Pool, held_back: list[tuple], jobs: list[tuple]) -> None:
        from worldmodel_ros.sim.rollout import drive_alone  # its module can be imported without torch
        chunk, start = [], time.monotonic()
        told = start
        try:
            # Both are handed over now: the processes go on with ``jobs`` while the last ones held back are not done yet.
            first, others = pool.imap_unordered(drive_alone, held_back), pool.imap_unordered(drive_alone, jobs)
            for episode in first:
                self.held.add([episode])
            for episode in others:
                chunk.append(episode)
                if len(chunk) == CHUNK or self.episodes.count < CHUNK:
                    self.episodes.add(chunk)
                    chunk = []
                if time.monotonic() - told >= SAID_EVERY:
                    told = time.monotonic()
                    print(json.dumps({'simulated': self.episodes.added, 'seconds': round(told - start, 1)}), flush=True)
            if chunk:
                self.episodes.add(chunk)
            print(json.dumps({'simulated': self.episodes.added, 'seconds': round(time.monotonic() - start, 1), 'all': True}),
                  flush=True)
        except Exception as error:  # ``wait`` reports it
            self._failed = error

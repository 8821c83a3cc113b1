"""Episodes simulated during training: worker processes simulate, the training device holds the newest episodes.

A GPU available for only minutes need not wait for its data. Runs that share data need a dataset on disk (``simulate``).
"""
from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from multiprocessing.pool import Pool

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.vae import VAE
from .episodes import ARRAYS, Episodes
from .recall import keyframes_of, moments_of

CHUNK = 8  # episodes that are handed over at a time
SAID_EVERY = 10.0  # s


class LiveEpisodes(Episodes):
    """At most ``capacity`` episodes on a device, in preallocated memory; once it is full, new ones replace the oldest. ``add``
    may be called while others read: an episode counts once it is complete."""

    def __init__(self, capacity: int, frames: int, preset: Preset, device: torch.device):
        from worldmodel_ros.sim.rollout import array_shapes
        arrays = {name: torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, kind)).dtype, device=device)
                  for name, (shape, kind) in array_shapes(capacity, frames, preset.image_size).items() if name in ARRAYS}
        super().__init__(**arrays)
        self._preset, self._recalls = preset, np.zeros((capacity, frames), bool)
        self.count, self.added, self._vae, self._lock = 0, 0, None, threading.Lock()

    def __len__(self) -> int:
        return self.count

    @property
    def frame_count(self) -> int:
        """Frames of the episodes held."""
        return self.count * self.frames.shape[1]

    @torch.no_grad()
    def encode(self, vae: VAE, images: int = 1024) -> None:
        """Fill ``latents`` of all episodes, one at a time, and of those added from now on."""
        shape = *self.frames.shape[:2], *vae.preset.latent_size, vae.preset.latent_channels
        with self._lock:  # an episode added meanwhile would be left out
            self._vae, self.latents = vae, torch.zeros(shape, dtype=torch.bfloat16, device=self.frames.device)
            self._encode(torch.arange(self.count, device=self.frames.device))

    @torch.no_grad()
    def add(self, episodes: list[Mapping[str, np.ndarray]]) -> None:
        """Add episodes, arrays as ``sim.rollout.collect`` returns them, without their first axis."""
        with self._lock:
            self._add(episodes)

    def _add(self, episodes: list[Mapping[str, np.ndarray]]) -> None:
        capacity = self.frames.shape[0]
        place = (torch.arange(self.added, self.added + len(episodes)) % capacity).to(self.frames.device)
        for field in fields(Episodes):
            held = getattr(self, field.name)
            if isinstance(held, Tensor) and field.name != 'latents':
                held[place] = torch.from_numpy(np.stack([each[field.name] for each in episodes])).to(held.device)
        for number, each in enumerate(episodes):
            at = (self.added + number) % capacity
            self._recalls[at] = moments_of(self._preset, each['actions'])
            if self._preset.keyframe_slabs:
                self._keyframes[at] = keyframes_of(self._preset, each['actions'])
        if self._vae is not None:
            self._encode(place)
        if self.frames.is_cuda:
            torch.cuda.synchronize()
        self.added += len(episodes)
        self.count = min(self.added, capacity)

    def _encode(self, place: Tensor) -> None:
        frame = torch.arange(self.frames.shape[1], device=self.frames.device)[None]
        for one in place.split(1):
            self.latents[one] = self._vae.encode_clips(self.images(one[:, None], frame)).bfloat16()


class Simulation:
    """Simulates the seeds in ``workers`` processes until all are done or it is stopped; the first ``held_back`` episodes go to
    ``held``, the others to ``episodes``. ``measured``: share whose actions are what wheel encoders measured."""

    def __init__(self, seeds: range, held_back: int, capacity: int, frames: int, preset: Preset,
                 mix: Mapping[str, float] | None, device: torch.device, workers: int, measured: float = 0.0):
        from worldmodel_ros.sim.behaviour import DEFAULT_MIX
        from worldmodel_ros.sim.rollout import check_mix, start_worker
        mix = dict(DEFAULT_MIX if mix is None else mix)
        check_mix(mix)
        self.episodes = LiveEpisodes(capacity, frames, preset, device)
        self.held = LiveEpisodes(held_back, frames, preset, device) if held_back else None
        self._held_back, self._failed = held_back, None
        self._pool = multiprocessing.get_context('spawn').Pool(workers, start_worker)
        jobs = ((seed, frames, preset.image_size, mix, measured) for seed in seeds)
        self._thread = threading.Thread(target=self._feed, args=(self._pool, jobs), daemon=True)
        self._thread.start()

    def wait(self, count: int) -> None:
        """Wait for the held-back episodes and ``count`` others. Raises RuntimeError if the simulation ends before."""
        while self.episodes.count < count or (self.held is not None and self.held.count < self._held_back):
            if not self._thread.is_alive():
                raise RuntimeError(f'the simulation ended after {self.episodes.count} episodes: '
                                   f'{self._failed or "no seeds are left"}')
            time.sleep(0.05)

    def stop(self) -> None:
        """End its processes."""
        self._pool.terminate()
        self._thread.join(10.0)

    def _feed(self, pool: Pool, jobs: Iterator[tuple]) -> None:
        from worldmodel_ros.sim.rollout import drive_alone  # its module can be imported without torch
        chunk, held, start = [], 0, time.monotonic()
        told = start
        try:
            for episode in pool.imap_unordered(drive_alone, jobs):
                if self.held is not None and held < self._held_back:
                    self.held.add([episode])
                    held += 1
                    continue
                chunk.append(episode)
                if len(chunk) == CHUNK or self.episodes.count < CHUNK:
                    self.episodes.add(chunk)
                    chunk = []
                if time.monotonic() - told >= SAID_EVERY:
                    told = time.monotonic()
                    print(json.dumps({'simulated': self.episodes.added, 'seconds': round(told - start, 1)}), flush=True)
            print(json.dumps({'simulated': self.episodes.added, 'seconds': round(time.monotonic() - start, 1), 'all': True}),
                  flush=True)
        except Exception as error:  # ``wait`` reports it
            self._failed = error

"""Imagines one chunk: from what a cache holds, and actions, to latents, what they lead to, and images."""
from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from ..cache.sequence import SequenceCache
from ..model.sampling import FLOW, ROWS
from .backends.protocol import Backend
from .calls import Boundary, Call, Calls
from .futures import Future
from .memory import Memory
from .step_times import PartTimes


KEPT = 4  # drawn ahead: branches of one question start from the same moments
THREADS = 4


class Sampler:
    """A session's, for its own cache and for those of its branches. What its calls give may be the back end's own."""

    def __init__(self, backend: Backend, memory: Memory, times: PartTimes, seed: int):
        self._backend, self._memory, self._times = backend, memory, times
        self.spec = spec = backend.preset
        self._noise = Noise(seed, (spec.chunk_frames, *spec.latent_size, spec.latent_channels))

    def denoise(self, cache: SequenceCache, newest: int, actions: np.ndarray, steps: int) -> Calls[tuple]:
        """The chunk after frame ``newest`` under ``actions`` (chunk_frames, A): its latents, and its outcomes as the
        network gives them, logits of contact and progress. A unit for each step."""
        if steps < 1:
            raise ValueError(f'steps must be at least 1, not {steps}')
        count = self.spec.chunk_frames
        row = ROWS.get(steps, FLOW)
        for step in range(steps):
            yield Boundary('denoise', step)
            cache.require_pages()  # a tick may have come between
            tau = step / steps
            with self._times.measure('denoise'):
                if step == 0:
                    window = self._memory.window(cache, newest + 1 + np.arange(count), causal=False)
                    z = self._draw_noise(newest + 1)
                rate = 1.0 / (steps * (1.0 - tau)) if step + 1 < steps else 1.0
                z, features = yield Call('denoise', (z, tau, rate, row, actions, window))
                if step + 1 == steps:
                    outcomes = yield Call('outcomes', (features,))
        return z, outcomes

    def decode(self, latents: np.ndarray, before: np.ndarray) -> Calls[np.ndarray]:
        """Frames uint8 (T, H, W, 3) of latents (T, h, w, Z), of which the first follows ``before``; a unit."""
        yield Boundary('decode')
        with self._times.measure('decode'):
            return (yield Call('decode', (latents, before)))

    def stack(self, latents: Sequence[np.ndarray]) -> np.ndarray:
        """Latents (h, w, Z) of frames as what can be committed together."""
        return self._backend.stack(latents)

    def future(self, actions: np.ndarray, latents: np.ndarray, outcomes: tuple, before: np.ndarray) -> Future:
        """The Future of what `denoise` gave, with ``outcomes`` as numpy; `decode` makes its frames."""
        logits, progress = outcomes
        risk = 1.0 / (1.0 + np.exp(-logits))
        return Future(actions, latents, risk, dict(zip(self.spec.goals, progress[-1].tolist())), before)

    def _draw_noise(self, moment: int) -> np.ndarray:
        """Noise for a chunk that begins with frame ``moment``."""
        if self._backend.asynchronous:  # the host has time while the device computes: for the next tick's, too
            self._noise.draw_ahead(moment)
            self._noise.draw_ahead(moment + 1)
        return self._noise.draw(moment)


class Noise:
    """Standard normal float32 of a shape, by frame number. It belongs to the moment, not to the call: the same session
    predicts the same future twice. Drawing it for a large image takes as long as a large GPU takes for a small batch."""

    def __init__(self, seed: int, shape: tuple[int, ...]):
        self._seed, self._shape = seed, shape
        self._drawn: dict[int, Promise] = {}  # by moment

    def draw(self, moment: int) -> np.ndarray:
        """Noise of a chunk that begins with frame ``moment``; not to be written to."""
        if moment in self._drawn:
            return self._drawn[moment].result()
        return self._draw(moment)

    def draw_ahead(self, moment: int) -> None:
        """Begins to draw in another thread what `draw` will be asked for, maybe many times."""
        if moment not in self._drawn:
            self._drawn[moment] = _threads().submit(self._draw, moment)
            if len(self._drawn) > KEPT:
                del self._drawn[next(iter(self._drawn))]

    def _draw(self, moment: int) -> np.ndarray:
        bits = np.random.Philox(key=[self._seed, moment])
        return np.random.Generator(bits).standard_normal(self._shape, np.float32)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, 'noise')

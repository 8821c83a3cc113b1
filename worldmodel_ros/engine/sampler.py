"""Samples chunks of future frames, one or several in an autoregressive rollout on a fork of a session's cache."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.model.sampling import FLOW, ROWS, Steps, adain
from ..model.rotary import poses_along
from .anchors import nearest
from .backends.protocol import Backend
from .futures import Future, Moment
from .memory import Memory
from .network_calls import Boundary, Call, Calls, PartTimes

KEPT = 4  # noise tensors kept: branches of one question start from the same moments
THREADS = 4


class Sampler:
    """Samples chunks for a session's own cache and those of its branches. Results of its calls may be the back end's own."""

    def __init__(self, backend: Backend, memory: Memory, times: PartTimes, seed: int):
        self._backend, self._memory, self._times = backend, memory, times
        self.spec = spec = backend.preset
        self._noise = Noise(seed, (spec.chunk_frames, *spec.latent_size, spec.latent_channels))

    def denoise(self, cache: SequenceCache, newest: int, actions: np.ndarray, steps: int | Steps) -> Calls[tuple]:
        """Denoise the chunk after frame ``newest`` under ``actions`` (chunk_frames, A), one unit per step; return its latents
        and the network's raw outcomes, contact logits and progress. A number of steps stands for ``Steps.of`` it."""
        steps, row = (steps.count, steps.row) if isinstance(steps, Steps) else (steps, ROWS.get(steps, FLOW))
        count = self.spec.chunk_frames
        if steps < 1:
            raise ValueError(f'steps must be at least 1, not {steps}')
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
        if self._backend.asynchronous:  # all is queued: the host has time to draw the next tick's
            self._noise.draw_ahead(newest + 2)
        return z, outcomes

    def decode(self, latents: np.ndarray, before: np.ndarray) -> Calls[np.ndarray]:
        """Return frames uint8 (T, H, W, 3) of latents (T, h, w, Z), the first of which follows ``before``; one unit."""
        yield Boundary('decode')
        with self._times.measure('decode'):
            return (yield Call('decode', (latents, before)))

    def stack(self, latents: Sequence[np.ndarray]) -> np.ndarray:
        """Stack latents (h, w, Z) of frames to be committed together."""
        return self._backend.stack(latents)

    def future(self, actions: np.ndarray, latents: np.ndarray, outcomes: tuple, before: np.ndarray) -> Future:
        """Return the Future of ``denoise``'s results, with ``outcomes`` as numpy; ``decode`` makes its frames."""
        logits, progress = outcomes
        risk = 1.0 / (1.0 + np.exp(-logits))
        return Future(actions, latents, risk, dict(zip(self.spec.goals, progress[-1].tolist())), before)

    def _draw_noise(self, moment: int) -> np.ndarray:
        """Return noise for a chunk that begins with frame ``moment``."""
        if self._backend.asynchronous:
            self._noise.draw_ahead(moment)
        return self._noise.draw(moment)


class Noise:
    """Standard normal float32 noise of a shape, a function of the frame number, not of the call, so that predictions are
    reproducible. Drawing it for a large image takes as long as a small batch on a large GPU."""

    def __init__(self, seed: int, shape: tuple[int, ...]):
        self._seed, self._shape = seed, shape
        self._drawn: dict[int, Promise] = {}  # by moment

    def draw(self, moment: int) -> np.ndarray:
        """Return noise for a chunk that begins with frame ``moment``; do not write to it."""
        if moment in self._drawn:
            return self._drawn[moment].result()
        return self._draw(moment)

    def draw_ahead(self, moment: int) -> None:
        """Start drawing in another thread what ``draw`` will return, maybe many times."""
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


@dataclass(frozen=True, eq=False)
class Chunk:
    """One of a branch's chunks, see ``Sampler``; except ``actions``, the arrays may be the back end's own."""

    actions: np.ndarray
    latents: np.ndarray
    outcomes: tuple
    before: np.ndarray
    frames: np.ndarray


def branch(sampler: Sampler, commit: Callable[..., Calls], moment: Moment, actions: np.ndarray,
           steps: int | Steps, keep: bool = False, images: bool = True) -> Calls[tuple[list[Chunk], Moment]]:
    """Imagine ``actions`` (T, A) from a moment, in units; forks its cache before the first one.

    ``commit``, the session's, adds each imagined chunk to the fork, where the next chunk sees it; it also commits the sinks
    again for every chunk that sees some, as frames without predecessors. Far ahead, a chunk's statistics are matched to those
    of the ``Preset.kept_frames``. Returns the chunks for ``joined``, and the moment at the end, whose cache is the fork: the
    device may still be working on its pages. With ``keep``, the last chunk is committed too, so that a branch can continue
    from there. Without ``images``, frames are not decoded, and None.
    """
    spec, total = sampler.spec, len(actions)
    size = spec.chunk_frames
    cache, time, latent, features = moment.cache.fork(), moment.time, moment.latent, moment.features
    chunks = []
    for start in range(0, total, size):
        part = actions[start:start + size]
        # A short last chunk repeats its last action; ``joined`` cuts off the extra frames.
        part = np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
        imagined = moment.imagined + start
        if imagined >= spec.sinks_from:
            oldest = max(0, time + 1 - spec.window_frames)
            cache.evict(oldest + spec.sink_frames)
            for first in range(0, spec.sink_frames, size):
                yield Boundary('commit')
                latents, executed = zip(*moment.sinks[first:first + size])
                yield from commit(cache, sampler.stack(latents), oldest + first + np.arange(size), np.stack(executed),
                                  observed=False)
        z, outcomes = yield from sampler.denoise(cache, time, part, steps)
        if imagined >= spec.anchor_statistics_from:
            z = adain(z, sampler.stack([latent for latent, _ in moment.sinks]), spec.sink_statistics)
        frames = (yield from sampler.decode(z, latent)) if images else None
        chunks.append(Chunk(part, z, outcomes, latent, frames))
        if start + size < total or keep:
            yield Boundary('commit')
            features = (yield from commit(cache, z, time + 1 + np.arange(size), part, observed=False))[-1]
            time, latent = time + size, z[-1]
    end = replace(moment, cache=cache, time=time, latent=latent, features=features, imagined=moment.imagined + total)
    return chunks, end


def branch_from_anchors(sampler: Sampler, commit: Callable[..., Calls], moment: Moment, actions: np.ndarray,
                        steps: int | Steps, keep: bool = False) -> Calls[tuple[list[Chunk], Moment]]:
    """As ``branch``, for a moment with anchors: before each chunk, the way from the nearest anchor is imagined again if it is
    shorter than what was imagined since the last observed frame."""
    spec, total, chunks = sampler.spec, len(actions), []
    for start in range(0, total, spec.chunk_frames):
        part = actions[start:start + spec.chunk_frames]
        if found := nearest(moment.anchors, moment.pose, spec, moment.imagined):
            anchor, way = found
            if len(way):
                _, anchor = yield from branch(sampler, commit, anchor, way, steps, keep=True, images=False)
            moment = replace(anchor, anchors=moment.anchors, pose=moment.pose)
        pose = tuple(poses_along(spec, part, moment.pose)[-1].tolist())
        added, moment = yield from branch(sampler, commit, moment, part, steps, keep or start + len(part) < total)
        chunks, moment = chunks + added, replace(moment, pose=pose)
    return chunks, moment


def joined(sampler: Sampler, chunks: list[Chunk], total: int, host: Callable[..., np.ndarray]) -> Future:
    """Return the Future of a branch of ``total`` frames; ``host`` waits for the back end's arrays and returns numpy ones."""
    futures = []
    for chunk in chunks:
        futures.append(sampler.future(chunk.actions, host(chunk.latents), tuple(map(host, chunk.outcomes)),
                                      host(chunk.before)))
        futures[-1].frames = host(chunk.frames)

    def along(name: str) -> np.ndarray:
        return np.concatenate([getattr(future, name) for future in futures])[:total]
    return Future(along('actions'), along('latents'), along('collision_risk'),
                  {goal: sum(future.progress[goal] for future in futures) for goal in sampler.spec.goals},
                  futures[0].before, along('frames'))

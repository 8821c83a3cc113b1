"""Autoregressive rollout on a forked cache: predicts a branch chunk after chunk, on a fork of what a session has seen."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from worldmodel_ros.model.sampling import adain
from .calls import Boundary, Calls
from .futures import Future, Moment
from .sampler import Sampler


@dataclass(frozen=True, eq=False)
class Chunk:
    """One of a branch's chunks, see `Sampler`; but for ``actions``, the arrays may be the back end's own."""

    actions: np.ndarray
    latents: np.ndarray
    outcomes: tuple
    before: np.ndarray
    frames: np.ndarray


def branch(sampler: Sampler, commit: Callable[..., Calls], moment: Moment, actions: np.ndarray, steps: int,
           keep: bool = False) -> Calls[tuple[list[Chunk], Moment]]:
    """Imagines ``actions`` (T, A) from a moment, in units; forks its cache before the first one.

    ``commit``, the session's, makes what was imagined a part of the fork, where the next chunk sees it; so it does with
    the sinks, again for every chunk that sees some, as frames that nothing came before. Far ahead it matches a chunk's
    statistics to theirs. Returns the chunks for `joined`, and the moment at the end: its cache is the fork, on whose pages
    the work of the device may still be. Where ``keep``, the last chunk is committed too, and a branch can go on from there.
    """
    spec, total = sampler.spec, len(actions)
    size = spec.chunk_frames
    cache, time, latent, features = moment.cache.fork(), moment.time, moment.latent, moment.features
    chunks = []
    for start in range(0, total, size):
        part = actions[start:start + size]
        # A last chunk that is short goes on with its last action; what it adds is cut off by `joined`.
        part = np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
        imagined = moment.imagined + start
        if spec.sees_sinks(imagined):
            oldest = max(0, time + 1 - spec.window_frames)
            cache.evict(oldest + spec.sink_frames)
            for first in range(0, spec.sink_frames, size):
                yield Boundary('commit')
                latents, executed = zip(*moment.sinks[first:first + size])
                yield from commit(cache, sampler.stack(latents), oldest + first + np.arange(size), np.stack(executed),
                                  observed=False)
        z, outcomes = yield from sampler.denoise(cache, time, part, steps)
        if spec.matches_anchor_statistics(imagined):
            z = adain(z, sampler.stack([latent for latent, _ in moment.sinks]), spec.sink_statistics)
        frames = yield from sampler.decode(z, latent)
        chunks.append(Chunk(part, z, outcomes, latent, frames))
        if start + size < total or keep:
            yield Boundary('commit')
            features = (yield from commit(cache, z, time + 1 + np.arange(size), part, observed=False))[-1]
            time, latent = time + size, z[-1]
    end = replace(moment, cache=cache, time=time, latent=latent, features=features, imagined=moment.imagined + total)
    return chunks, end


def joined(sampler: Sampler, chunks: list[Chunk], total: int, host: Callable[..., np.ndarray]) -> Future:
    """The future of a branch of ``total`` frames; ``host`` makes numpy of the back end's arrays, and waits for them."""
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

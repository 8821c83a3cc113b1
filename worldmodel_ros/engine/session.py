"""One robot's stream: what it has seen, what it plans and what it imagines."""
from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cache.sequence import SequenceCache
from ..model.steps import FLOW, HALF, WHOLE
from . import session_file
from .calls import Boundary, Call, Calls, Work, run, run_unit
from .memory import Memory
from .noise import Noise
from .step_times import BEFORE_DENOISING, StepTimes


@dataclass
class Future:
    """An imagined chunk of T frames under ``actions`` (T, A), SI units.

    latents (T, h, w, Z); collision_risk (T,) in [0, 1], probability of a contact within each step; progress, per goal,
    the expected decrease (m) of the distance to it over the whole chunk; frames uint8 (T, H, W, 3) once decoded.
    """

    actions: np.ndarray
    latents: np.ndarray
    collision_risk: np.ndarray
    progress: dict[str, float]
    before: np.ndarray  # (h, w, Z), the latent that the first frame follows
    frames: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Moment:
    """What a session had seen by frame ``time``, whose latent is ``latent``."""

    cache: SequenceCache
    time: int
    latent: np.ndarray


class Session:
    """Frames come in by `observe`; `plan`, `imagine` and `what_if` look ahead from the newest one.

    A call that raises leaves the session as it was. Not safe for use from two threads at once. The methods in -ing are
    the same work as calls, for whoever runs many sessions' together; arrays may then be the back end's own.
    """

    def __init__(self, backend, memory: Memory, step_times: StepTimes, seed: int = 0):
        self._backend, self._memory, self._step_times = backend, memory, step_times
        self.spec = backend.preset
        self._noise = Noise(seed, (self.spec.chunk_frames, *self.spec.latent_size, self.spec.latent_channels))
        self.timings: dict[str, float] = {}
        self._cache = memory.open()
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was seen."""
        self._cache.clear()
        self._time = -1  # frame number of the newest observation
        self._encoder_state: np.ndarray | None = None
        self._latent: np.ndarray | None = None
        self._features: np.ndarray | None = None

    @property
    def frames_seen(self) -> int:
        return self._time + 1

    def observe(self, frame: np.ndarray, executed: np.ndarray) -> None:
        """Encodes a frame, uint8 (H, W, 3) RGB, and commits it; ``executed`` (A,), SI units, is the action that was
        executed over the step period before it."""
        run(self.observing(frame, executed), self._backend)

    def observing(self, frame: np.ndarray, executed: np.ndarray) -> Calls[None]:
        """`observe`, as a part of a unit."""
        spec = self.spec
        if frame.shape != (*spec.image_size, 3) or frame.dtype != np.uint8:
            raise ValueError(f'frame must be uint8 {(*spec.image_size, 3)} (height, width, RGB), '
                             f'not {frame.dtype} {frame.shape}')
        executed = self._actions(np.asarray(executed)[None], 1)
        with self._measure('encode'):
            latent, state = yield Call('encode', (frame, self._encoder_state))
        with self._measure('commit'):
            features = yield from self._commit(self._cache, latent[None], np.array([self._time + 1]), executed)
        self._time += 1
        self._encoder_state, self._latent, self._features = state, latent, features[-1]

    def plan(self, goal: str, prefix: np.ndarray | None = None) -> np.ndarray:
        """Command chunk (chunk_frames, A) in SI units that drives towards ``goal``, from the newest observation.

        ``prefix`` (n, A): actions that will be executed before the plan can take over; the plan begins with them, and
        goes on smoothly (real-time chunking, Black et al. 2025) if the model's policy was trained to.
        """
        return run(self.planning(goal, prefix), self._backend)

    def planning(self, goal: str, prefix: np.ndarray | None = None) -> Calls[np.ndarray]:
        """`plan`, as a part of a unit."""
        spec = self.spec
        if goal not in spec.goals:
            raise ValueError(f'unknown goal {goal!r}; this model knows {", ".join(spec.goals)}')
        self._require_observation()
        given = np.zeros((spec.chunk_frames, spec.actions), np.float32)
        delay = 0 if prefix is None else len(prefix)
        if delay:
            if delay >= spec.chunk_frames:
                raise ValueError(f'prefix has {delay} actions: it must leave some of the {spec.chunk_frames} to plan')
            given[:delay] = self._actions(prefix, delay)
        with self._measure('policy'):
            # From no noise comes the most typical plan: successive ones differ by what was seen alone.
            noise = np.zeros((len(spec.goals), *given.shape), np.float32)
            plans = yield Call('policy', (self._features, noise, given, np.int64(delay)))
        return plans[spec.goals.index(goal)]

    def imagine(self, actions: np.ndarray, steps: int = 2) -> Future:
        """The next chunk under ``actions`` (chunk_frames, A), denoised in ``steps`` steps: 2 and 1 are what the model
        was distilled for, more integrate the teacher's flow. `decode` makes the pictures."""
        before = sum(self.timings.get(part, 0.0) for part in BEFORE_DENOISING)
        start = time.perf_counter()
        future = run(self.imagining(actions, steps), self._backend)
        future.latents, future.before = map(self._backend.host, (future.latents, future.before))
        self._step_times.record_tick(before + time.perf_counter() - start, steps)
        return future

    def imagining(self, actions: np.ndarray, steps: int = 2) -> Calls[Future]:
        """`imagine`, a unit for each step."""
        self._require_observation()
        actions = self._actions(actions, self.spec.chunk_frames)
        return (yield from self._denoise(self._cache, self._time, actions, steps, self._latent))

    def decode(self, future: Future) -> np.ndarray:
        """Frames uint8 (T, H, W, 3) of an imagined future; also kept in ``future.frames``."""
        return run(self.decoding(future), self._backend)

    def decoding(self, future: Future) -> Calls[np.ndarray]:
        """`decode`, a unit."""
        yield Boundary('decode')
        with self._measure('decode'):
            future.frames = yield Call('decode', (future.latents, future.before))
        return future.frames

    def what_if(self, actions: np.ndarray, steps: int = 2) -> Generator[None, None, Future]:
        """Imagines ``actions`` (T, A), any T >= 1, on a fork; the session stays as it is.

        A generator: every `next` is one network call, so that a tick can go first between any two. Ends with the
        decoded Future of T frames. It sees the session as it was when the first `next` ran. Raises OutOfPages when too
        many branches are open; they end with their generators.
        """
        work = Work(self.branching(actions, steps))
        yield
        while work.boundary:
            error, = run_unit([work], self._backend)
            if error:
                raise error
            yield
        return work.result

    def moment(self) -> Moment:
        """What `branching` can begin from later, when the session has gone on."""
        self._require_observation()
        return Moment(self._cache.fork(), self._time, self._latent)

    def branching(self, actions: np.ndarray, steps: int = 2, moment: Moment | None = None) -> Calls[Future]:
        """`what_if` from now or from a moment, in units; forks before the first one."""
        self._require_observation()
        total, size = len(actions), self.spec.chunk_frames
        actions = self._actions(actions, total)
        moment = moment or Moment(self._cache, self._time, self._latent)
        cache, time_, latent = moment.cache.fork(), moment.time, moment.latent
        parts: list[Future] = []
        for start in range(0, total, size):
            chunk = actions[start:start + size]
            # A last chunk that is short goes on with its last action; what it adds is cut off below.
            chunk = np.concatenate([chunk, np.repeat(chunk[-1:], size - len(chunk), 0)])
            part = yield from self._denoise(cache, time_, chunk, steps, latent)
            parts.append(part)
            yield from self.decoding(part)
            if start + size < total:
                yield Boundary('commit')
                yield from self._commit(cache, part.latents, time_ + 1 + np.arange(size), chunk, observed=False)
                time_, latent = time_ + size, part.latents[-1]
        return Future(actions, np.concatenate([self._backend.host(p.latents) for p in parts])[:total],
                      np.concatenate([p.collision_risk for p in parts])[:total],
                      {goal: sum(p.progress[goal] for p in parts) for goal in self.spec.goals},
                      self._backend.host(parts[0].before), np.concatenate([p.frames for p in parts])[:total])

    def save(self, path: str | Path) -> None:
        """Writes the session to a safetensors file."""
        self._require_observation()
        state = {'encoder_state': self._encoder_state, 'latent': self._latent, 'features': self._features}
        state = {name: self._backend.host(array) for name, array in state.items()}
        session_file.write(path, self.spec, {'time': np.array([self._time]), **state}, self._cache)

    def load(self, path: str | Path) -> None:
        """Takes up a session that `save` wrote; raises ValueError, and changes nothing, when it does not fit."""
        state = session_file.read(path, self.spec, self._cache)
        self._time = int(state['time'][0])
        self._encoder_state, self._latent, self._features = state['encoder_state'], state['latent'], state['features']

    def _denoise(self, cache: SequenceCache, newest: int, actions: np.ndarray, steps: int,
                 before: np.ndarray) -> Calls[Future]:
        """Denoises the chunk after frame ``newest``, whose latent is ``before``; a unit for each step."""
        if steps < 1:
            raise ValueError(f'steps must be at least 1, not {steps}')
        spec, count = self.spec, self.spec.chunk_frames
        row = {1: WHOLE, 2: HALF}.get(steps, FLOW)
        for step in range(steps):
            yield Boundary('denoise', step)
            cache.require_pages()  # a tick may have come between
            tau = step / steps
            with self._measure('denoise'):
                if step == 0:
                    window = self._memory.window(cache, newest + 1 + np.arange(count), causal=False)
                    z = self._draw_noise(newest + 1)
                rate = 1.0 / (steps * (1.0 - tau)) if step + 1 < steps else 1.0
                z, features = yield Call('denoise', (z, tau, rate, row, actions, window))
                if step + 1 == steps:
                    logits, progress = yield Call('outcomes', (features,))
        return Future(actions, z, 1.0 / (1.0 + np.exp(-logits)), dict(zip(spec.goals, progress[-1].tolist())), before)

    def _commit(self, cache: SequenceCache, latents: np.ndarray, times: np.ndarray, actions: np.ndarray,
                observed: bool = True) -> Calls[np.ndarray]:
        """The pass of clean frames (T, h, w, Z), which makes them a part of the cache; returns their features."""
        window = self._memory.window(cache, times, causal=True)
        with cache.stage() as staged:
            places = staged.places(int(times[0]), len(times), observed)
            features = yield Call('commit', (latents, actions, window, places))
        self._memory.roll(cache, int(times[-1]))
        return features

    def _draw_noise(self, moment: int) -> np.ndarray:
        """Noise for a chunk that begins with frame ``moment``."""
        if self._backend.asynchronous:  # the host has time while the device computes: for the next tick's, too
            self._noise.draw_ahead(moment)
            self._noise.draw_ahead(moment + 1)
        return self._noise.draw(moment)

    def _actions(self, actions: np.ndarray, count: int) -> np.ndarray:
        actions = np.asarray(actions, np.float32)
        if actions.shape != (count, self.spec.actions):
            raise ValueError(f'actions must be ({count}, {self.spec.actions}): one row a step, '
                             f'{", ".join(self.spec.action_names)}; not {actions.shape}')
        if count == 0 or not np.isfinite(actions).all():
            raise ValueError('actions must be finite and at least one step long')
        return actions

    def _require_observation(self) -> None:
        if self._latent is None:
            raise ValueError('the session has seen no frame yet: call observe first')

    def _measure(self, part: str) -> _Measure:
        return _Measure(self, part)


class _Measure:
    """Times a block of work into the session's timings and the engine's step times; a failed one is not recorded."""

    def __init__(self, session: Session, part: str):
        self._session, self._part = session, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            seconds = time.perf_counter() - self._start
            self._session.timings[self._part] = seconds
            self._session._step_times.record(self._part, seconds)

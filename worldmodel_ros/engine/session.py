"""One robot's stream: what it has seen, what it plans and what it imagines."""
from __future__ import annotations

import functools
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ..cache.sequence import SequenceCache
from ..model.steps import FLOW, HALF, WHOLE
from . import session_file
from .calls import Boundary, Call, Calls, Result, Work, run, run_ahead, run_unit
from .futures import Future, LookAhead, Moment
from .memory import Memory
from .noise import Noise
from .part_times import PartTimes
from .step_times import BEFORE_DENOISING, StepTimes


class Session:
    """Frames come in by `observe`; `plan`, `imagine` and `what_if` look ahead from the newest one.

    A call that raises leaves the session as it was. Not safe for use from two threads at once. The methods in -ing are
    the same work as calls, for whoever runs many sessions' together; arrays may then be the back end's own.
    """

    def __init__(self, backend, memory: Memory, step_times: StepTimes, seed: int = 0):
        self._backend, self._memory, self._step_times = backend, memory, step_times
        self.spec = backend.preset
        self._noise = Noise(seed, (self.spec.chunk_frames, *self.spec.latent_size, self.spec.latent_channels))
        self._times = PartTimes(step_times)
        self._observing_took = 0.0  # s, of the host
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

    @property
    def timings(self) -> dict[str, float]:
        """The last time of each part of the work, s."""
        return self._times.last

    def observe(self, frame: np.ndarray, executed: np.ndarray) -> None:
        """Encodes a frame, uint8 (H, W, 3) RGB, and commits it; ``executed`` (A,), SI units, is the action that was
        executed over the step period before it. Where the device works beside the host, it has only been queued."""
        start = time.perf_counter()
        if self._backend.asynchronous:
            self._times.forget()
            self._queue(self.observing(frame, executed))
        else:
            run(self.observing(frame, executed), self._backend)
        self._observing_took = time.perf_counter() - start

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

    def look_ahead(self, goal: str, steps: int = 2) -> LookAhead:
        """`plan` and, of that plan, `imagine`. Where the device works beside the host, everything has been queued when
        this returns: between frame and command it never waits for the host."""
        if not self._backend.asynchronous:
            plan = functools.cache(lambda: self.plan(goal))
            return LookAhead(plan, lambda: self.imagine(plan(), steps))
        start, before = time.perf_counter(), self._latent
        plan = self._queue(self.planning(goal))
        fetched = self._backend.fetch(plan)
        z, outcomes = self._queue(self._denoised(self._cache, self._time, plan, steps))
        outcomes = [self._backend.fetch(part) for part in outcomes]

        def future() -> Future:
            logits, progress = (part.result() for part in outcomes)
            self._times.read()
            self._step_times.record_tick(self._observing_took + time.perf_counter() - start, steps)
            return self._future(fetched.result(), z, logits, progress, before)
        return LookAhead(fetched.result, future)

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
        future.frames = yield from self._decoded(future.latents, future.before)
        return future.frames

    def _decoded(self, latents: np.ndarray, before: np.ndarray) -> Calls[np.ndarray]:
        yield Boundary('decode')
        with self._measure('decode'):
            return (yield Call('decode', (latents, before)))

    def what_if(self, actions: np.ndarray, steps: int = 2) -> Generator[None, None, Future]:
        """Imagines ``actions`` (T, A), any T >= 1, on a fork; the session stays as it is.

        A generator: every `next` is one network call, so that a tick can go first between any two. Ends with the
        decoded Future of T frames. It sees the session as it was when the first `next` ran. Raises OutOfPages when too
        many branches are open; they end with their generators.
        """
        work = Work(self._branching(actions, steps))
        yield
        while work.boundary:
            self._run_unit(work)
            yield
        cache, parts = work.result
        if self.busy:
            self._backend.settle_beside()
        cache.require_pages()  # a tick may have come between
        return self._joined(parts, len(actions))

    @property
    def overlaps(self) -> bool:
        """Whether the device does the units of `what_if` beside ticks."""
        return self._backend.asynchronous and self._backend.overlaps

    @property
    def busy(self) -> bool:
        """Whether the device still works on a unit of `what_if`; the next one waits for it."""
        return self._backend.asynchronous and self._backend.busy

    def moment(self) -> Moment:
        """What `branching` can begin from later, when the session has gone on."""
        self._require_observation()
        return Moment(self._cache.fork(), self._time, self._latent)

    def branching(self, actions: np.ndarray, steps: int = 2, moment: Moment | None = None) -> Calls[Future]:
        """`what_if` from now or from a moment, in units; forks before the first one."""
        _, parts = yield from self._branching(actions, steps, moment)
        return self._joined(parts, len(actions))

    def _branching(self, actions: np.ndarray, steps: int, moment: Moment | None = None
                   ) -> Calls[tuple[SequenceCache, list[tuple]]]:
        """The branch's cache and, for `_joined`, its chunks, which may be the back end's own."""
        self._require_observation()
        total, size = len(actions), self.spec.chunk_frames
        actions = self._actions(actions, total)
        moment = moment or Moment(self._cache, self._time, self._latent)
        cache, time_, latent = moment.cache.fork(), moment.time, moment.latent
        parts = []
        for start in range(0, total, size):
            chunk = actions[start:start + size]
            # A last chunk that is short goes on with its last action; what it adds is cut off below.
            chunk = np.concatenate([chunk, np.repeat(chunk[-1:], size - len(chunk), 0)])
            z, outcomes = yield from self._denoised(cache, time_, chunk, steps)
            frames = yield from self._decoded(z, latent)
            parts.append((chunk, z, outcomes, latent, frames))
            if start + size < total:
                yield Boundary('commit')
                yield from self._commit(cache, z, time_ + 1 + np.arange(size), chunk, observed=False)
                time_, latent = time_ + size, z[-1]
        return cache, parts

    def _joined(self, parts: list[tuple], total: int) -> Future:
        """The future of a branch of ``total`` frames, from its chunks."""
        host, futures = self._backend.host, []
        for chunk, z, outcomes, before, frames in parts:
            futures.append(self._future(chunk, host(z), *map(host, outcomes), host(before)))
            futures[-1].frames = host(frames)
        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(future, name) for future in futures])[:total]
        return Future(joined('actions'), joined('latents'), joined('collision_risk'),
                      {goal: sum(future.progress[goal] for future in futures) for goal in self.spec.goals},
                      futures[0].before, joined('frames'))

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
        z, (logits, progress) = yield from self._denoised(cache, newest, actions, steps)
        return self._future(actions, z, logits, progress, before)

    def _denoised(self, cache: SequenceCache, newest: int, actions: np.ndarray, steps: int) -> Calls[tuple]:
        """Latents and what the outcomes' network says of them, which may be the back end's own, as may ``actions``."""
        if steps < 1:
            raise ValueError(f'steps must be at least 1, not {steps}')
        count = self.spec.chunk_frames
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
                    outcomes = yield Call('outcomes', (features,))
        return z, outcomes

    def _future(self, actions: np.ndarray, z: np.ndarray, logits: np.ndarray, progress: np.ndarray,
                before: np.ndarray) -> Future:
        risk = 1.0 / (1.0 + np.exp(-logits))
        return Future(actions, z, risk, dict(zip(self.spec.goals, progress[-1].tolist())), before)

    def _commit(self, cache: SequenceCache, latents: np.ndarray, times: np.ndarray, actions: np.ndarray,
                observed: bool = True) -> Calls[np.ndarray]:
        """The pass of clean frames (T, h, w, Z), which makes them a part of the cache; returns their features."""
        window = self._memory.window(cache, times, causal=True)
        if self._backend.asynchronous:
            self._backend.before_writing()
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

    def _queue(self, calls: Calls[Result]) -> Result:
        """Has the device do a call's work when its turn comes; the results are the back end's own."""
        with self._times.queued(self._backend.mark):
            return run_ahead(calls, self._backend)

    def _run_unit(self, work: Work) -> None:
        """Runs the next unit: beside what ticks do, if the device can; else it is waited for, so that there is one at
        most that a tick has to wait for."""
        backend = self._backend
        if self.overlaps:
            with self._times.ignored(), backend.beside():  # how long it takes beside a tick says nothing of a tick
                error, = run_unit([work], SimpleNamespace(run=backend.launch))
        else:
            with self._times.queued(backend.mark) if backend.asynchronous else nullcontext():
                error, = run_unit([work], backend)
            backend.settle()
            self._times.read()
        if error:
            raise error

    def _measure(self, part: str) -> AbstractContextManager[None]:
        return self._times.measure(part)

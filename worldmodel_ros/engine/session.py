"""One robot's stream: what it has seen, what it plans and what it imagines."""
from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cache import snapshot
from ..cache.sequence import SequenceCache
from ..model.rotary import rotary_angles
from ..model.steps import FLOW, HALF, WHOLE
from .memory import Memory
from .step_times import BEFORE_DENOISING, StepTimes

FILE_FORMAT = '2'  # of saved sessions


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


class Session:
    """Frames come in by `observe`; `plan`, `imagine` and `what_if` look ahead from the newest one.

    A call that raises leaves the session as it was. Not safe for use from two threads at once.
    """

    def __init__(self, backend, memory: Memory, step_times: StepTimes, seed: int = 0):
        self._backend, self._memory, self._step_times, self._seed = backend, memory, step_times, seed
        self.spec = backend.preset
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
        spec = self.spec
        if frame.shape != (*spec.image_size, 3) or frame.dtype != np.uint8:
            raise ValueError(f'frame must be uint8 {(*spec.image_size, 3)} (height, width, RGB), '
                             f'not {frame.dtype} {frame.shape}')
        executed = self._actions(np.asarray(executed)[None], 1)
        with self._measure('encode'):
            image = np.ascontiguousarray(frame.transpose(2, 0, 1), np.float32) / np.float32(127.5) - np.float32(1.0)
            latent, state = self._backend.encode(image, self._encoder_state)
        with self._measure('commit'):
            features = self._commit(self._cache, latent[None], np.array([self._time + 1]), executed)
        self._time += 1
        self._encoder_state, self._latent, self._features = state, latent, features[-1]

    def plan(self, goal: str) -> np.ndarray:
        """Command chunk (chunk_frames, A) in SI units that drives towards ``goal``, from the newest observation."""
        if goal not in self.spec.goals:
            raise ValueError(f'unknown goal {goal!r}; this model knows {", ".join(self.spec.goals)}')
        self._require_observation()
        with self._measure('policy'):
            return self._backend.policy(self._features)[self.spec.goals.index(goal)]

    def imagine(self, actions: np.ndarray, steps: int = 2) -> Future:
        """The next chunk under ``actions`` (chunk_frames, A), denoised in ``steps`` steps: 2 and 1 are what the model
        was distilled for, more integrate the teacher's flow. `decode` makes the pictures."""
        self._require_observation()
        actions = self._actions(actions, self.spec.chunk_frames)
        before = sum(self.timings.get(part, 0.0) for part in BEFORE_DENOISING)
        start = time.perf_counter()
        future = _run_to_end(self._denoise(self._cache, self._time, actions, steps))
        self._step_times.record_tick(before + time.perf_counter() - start, steps)
        return future

    def decode(self, future: Future) -> np.ndarray:
        """Frames uint8 (T, H, W, 3) of an imagined future; also kept in ``future.frames``."""
        with self._measure('decode'):
            images = self._backend.decode(future.latents, future.before)
            future.frames = np.clip(np.rint((images + 1.0) * 127.5), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
        return future.frames

    def what_if(self, actions: np.ndarray, steps: int = 2) -> Generator[None, None, Future]:
        """Imagines ``actions`` (T, A), any T >= 1, on a fork; the session stays as it is.

        A generator: every `next` is one network call, so that a tick can go first between any two. Ends with the
        decoded Future of T frames. It sees the session as it was when the first `next` ran. Raises OutOfPages when too
        many branches are open; they end with their generators.
        """
        self._require_observation()
        total, size = len(actions), self.spec.chunk_frames
        actions = self._actions(actions, total)
        cache, time_, latent = self._cache.fork(), self._time, self._latent
        parts: list[Future] = []
        yield
        for start in range(0, total, size):
            chunk = actions[start:start + size]
            # A last chunk that is short goes on with its last action; what it adds is cut off below.
            chunk = np.concatenate([chunk, np.repeat(chunk[-1:], size - len(chunk), 0)])
            part = yield from self._denoise(cache, time_, chunk, steps, latent)
            yield
            parts.append(part)
            self.decode(part)
            yield
            if start + size < total:
                self._commit(cache, part.latents, time_ + 1 + np.arange(size), chunk, observed=False)
                time_, latent = time_ + size, part.latents[-1]
                yield
        return Future(actions, np.concatenate([p.latents for p in parts])[:total],
                      np.concatenate([p.collision_risk for p in parts])[:total],
                      {goal: sum(p.progress[goal] for p in parts) for goal in self.spec.goals},
                      parts[0].before, np.concatenate([p.frames for p in parts])[:total])

    def save(self, path: str | Path) -> None:
        """Writes the session to a safetensors file."""
        self._require_observation()
        from safetensors.numpy import save_file
        state = {'time': np.array([self._time]), 'encoder_state': np.ascontiguousarray(self._encoder_state),
                 'latent': np.ascontiguousarray(self._latent), 'features': np.ascontiguousarray(self._features)}
        save_file(state | snapshot.save(self._cache), str(path),
                  metadata={'format': FILE_FORMAT, 'model': self.spec.name})

    def load(self, path: str | Path) -> None:
        """Takes up a session that `save` wrote; raises ValueError, and changes nothing, when it does not fit."""
        from safetensors import SafetensorError, safe_open
        try:
            with safe_open(str(path), framework='numpy') as file:
                state = {name: file.get_tensor(name) for name in file.keys()}
                about = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ValueError(f'{path} is not a saved session: {error}') from error
        if about.get('format') != FILE_FORMAT:
            raise ValueError(f'{path} holds a session in format {about.get("format", "1")}, and this version reads '
                             f'format {FILE_FORMAT}: load it with the version that saved it, or save a new one')
        expected = {'time': (1,), 'features': (self.spec.tokens, self.spec.width),
                    'latent': (*self.spec.latent_size, self.spec.latent_channels),
                    'encoder_state': (1, 4 * self.spec.vae_width, *self.spec.latent_size)}
        found = {name: state.pop(name) for name in expected if name in state}
        try:
            if {name: tensor.shape for name, tensor in found.items()} != expected:
                raise ValueError('its tensors have other shapes')
            snapshot.restore(self._cache, state)
        except ValueError as error:
            raise ValueError(f'{path} holds a session of model {about.get("model")!r}, which does not fit '
                             f'{self.spec.name!r}: {error}') from error
        self._time = int(found['time'][0])
        self._encoder_state, self._latent, self._features = found['encoder_state'], found['latent'], found['features']

    def _denoise(self, cache: SequenceCache, newest: int, actions: np.ndarray, steps: int,
                 before: np.ndarray | None = None) -> Generator[None, None, Future]:
        """Denoises the chunk after frame ``newest``; yields between steps."""
        if steps < 1:
            raise ValueError(f'steps must be at least 1, not {steps}')
        spec, count = self.spec, self.spec.chunk_frames
        times = newest + 1 + np.arange(count)
        rotary = rotary_angles(spec, times)
        pages, bias = self._memory.window(cache, times, causal=False)
        # The noise belongs to the moment, not to the call: the same session sees the same future twice.
        noise = np.random.Generator(np.random.Philox(key=[self._seed, newest + 1]))
        storage = self._memory.pool.storage
        z = noise.standard_normal((count, *spec.latent_size, spec.latent_channels), np.float32)
        row = np.full(count, {1: WHOLE, 2: HALF}.get(steps, FLOW), np.int64)
        for step in range(steps):
            tau = step / steps
            with self._measure('denoise'):
                level = np.full(count, tau, np.float32)
                x, features, _, _ = self._backend.block(z, level, row, actions, rotary, bias, storage, pages)
                if step + 1 == steps:
                    logits, progress = self._backend.outcomes(features)
            if step + 1 < steps:
                z = z + (x - z) * np.float32(1.0 / (steps * (1.0 - tau)))
                yield
                cache.require_pages()  # a tick may have come between
        return Future(actions, x, 1.0 / (1.0 + np.exp(-logits)), dict(zip(spec.goals, progress[-1].tolist())),
                      self._latent if before is None else before)

    def _commit(self, cache: SequenceCache, latents: np.ndarray, times: np.ndarray, actions: np.ndarray,
                observed: bool = True) -> np.ndarray:
        """The pass of clean frames (T, h, w, Z), which makes them a part of the cache; returns their features."""
        count = len(times)
        pages, bias = self._memory.window(cache, times, causal=True)
        with cache.stage() as staged:
            _, features, k, v = self._backend.block(
                latents, np.ones(count, np.float32), np.full(count, FLOW, np.int64), actions,
                rotary_angles(self.spec, times), bias, self._memory.pool.storage, pages)
            staged.write(int(times[0]), k, v, observed)
        self._memory.roll(cache, int(times[-1]))
        return features

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


def _run_to_end(work: Generator[None, None, Future]) -> Future:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value

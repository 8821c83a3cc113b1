"""One robot's session: observations, plans, predictions and what-if branches."""
from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..cache.sequence import SequenceCache
from ..model.rotary import heading_after, poses_along
from ..model.sampling import Steps
from .anchors import add_anchor
from .backends.protocol import Backend
from .network_calls import BEFORE_DENOISING, Boundary, Call, Calls, NetworkCalls, PartTimes, StepTimes, run
from .futures import Future, LookAhead, Moment, OwnPlan
from .memory import Memory
from .sampler import Chunk, Sampler, branch, branch_from_anchors, joined
from .session_file import Capture, Loaded, most_slabs, read
from .session_folder import SessionFileError


class NothingObserved(ValueError):
    """A session that has seen no frame was asked for something that needs one."""


class Session:
    """A session takes frames by ``observe``; ``plan``, ``imagine`` and ``what_if`` look ahead from the newest one.

    A call that raises leaves the session unchanged. Not thread-safe; on a GPU, where the sessions of an engine share its
    captured graphs, two sessions must not be used concurrently either. The methods in -ing do the same work as generators of
    network calls, to be batched over many sessions; their arrays may then be the back end's own.
    """

    def __init__(self, backend: Backend, memory: Memory, step_times: StepTimes, seed: int = 0,
                 fingerprint: Callable[[], str] = str, anchors: int = 0):
        """``fingerprint`` returns ``Engine.fingerprint``, which identifies the model in files; ``anchors`` as of ``Engine``."""
        self._backend, self._memory, self._step_times = backend, memory, step_times
        self._fingerprint, self._most_anchors = fingerprint, anchors
        self.spec = backend.preset
        self._times = PartTimes(step_times)
        self._network_calls = NetworkCalls(backend, self._times)
        self._sampler = Sampler(backend, memory, self._times, seed)
        self._observing_took = 0.0  # s, on the host
        self._cache = memory.open()
        self.reset()

    def reset(self) -> None:
        """Forget all observations."""
        self._cache.clear()
        self._time = -1  # frame number of the newest observation
        self._encoder_state: np.ndarray | None = None
        self._latent: np.ndarray | None = None
        self._features: np.ndarray | None = None
        self._sinks: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # for a branch that starts here
        self._anchors: tuple[Moment, ...] = ()
        self._pose = (0.0, 0.0, 0.0)  # of the robot at the newest frame, only for anchors

    @property
    def frames_seen(self) -> int:
        return self._time + 1

    @property
    def timings(self) -> dict[str, float]:
        """Latest time of each part of the work, s."""
        return self._times.last

    def observe(self, frame: np.ndarray, executed: np.ndarray) -> None:
        """Encode a frame, uint8 (H, W, 3) RGB, and commit it; ``executed`` (A,), SI units, is the action that was
        executed over the step period before it. On an asynchronous device this only queues the work."""
        start = time.perf_counter()
        if self._backend.asynchronous:
            self._times.forget()
            self._network_calls.queue(self.observing(frame, executed))
        else:
            run(self.observing(frame, executed), self._backend)
        self._observing_took = time.perf_counter() - start

    def observing(self, frame: np.ndarray, executed: np.ndarray) -> Calls[None]:
        """``observe`` as network calls, within a unit."""
        spec = self.spec
        if frame.shape != (*spec.image_size, 3) or frame.dtype != np.uint8:
            raise ValueError(f'frame must be uint8 {(*spec.image_size, 3)} (height, width, RGB), '
                             f'not {frame.dtype} {frame.shape}')
        executed = self._actions(np.asarray(executed)[None], 1)
        with self._times.measure('encode'):
            latent, state = yield Call('encode', (frame, self._encoder_state))
        with self._times.measure('commit'):
            features = yield from self._commit(self._cache, latent[None], np.array([self._time + 1]), executed)
        self._time += 1
        self._encoder_state, self._latent, self._features = state, latent, features[-1]
        if spec.kept_frames:
            newest = latent, executed[0].copy()
            self._sinks = *(self._sinks[1:] or (newest,) * (spec.kept_frames - 1)), newest
        if self._most_anchors:
            self._pose = tuple(poses_along(spec, executed, self._pose)[-1].tolist())
            # Between whole slabs, whose pages anchors and session share; not before there is a window to go back to.
            if self.frames_seen >= spec.window_frames and self.frames_seen % self._memory.layout.frames == 0:
                self._anchors = add_anchor(self._anchors, replace(self.moment(), anchors=()), self._most_anchors, spec)

    def plan(self, goal: str, prefix: np.ndarray | None = None) -> np.ndarray:
        """Return a command chunk (chunk_frames, A) in SI units that drives towards ``goal`` from the newest observation.

        ``prefix`` (n, A): actions that will be executed before the plan can take over; the plan begins with them, and
        continues smoothly (real-time chunking, Black et al. 2025) if the model's policy was trained to.
        """
        return run(self.planning(goal, prefix), self._backend)

    def planning(self, goal: str, prefix: np.ndarray | None = None, moment: Moment | None = None) -> Calls[np.ndarray]:
        """``plan`` from now or from ``moment`` as network calls, within a unit."""
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
        with self._times.measure('policy'):
            # Zero noise gives the most typical plan: successive plans then differ only by what was observed.
            noise = np.zeros((len(spec.goals), *given.shape), np.float32)
            features = moment.features if moment else self._features
            plans = yield Call('policy', (features, noise, given, np.int64(delay)))
        return plans[spec.goals.index(goal)]

    def imagine(self, actions: np.ndarray, steps: int = 2) -> Future:
        """Predict the next chunk under ``actions`` (chunk_frames, A), denoised in ``steps`` steps: the model was distilled
        for 2 and 1, more integrate the teacher's flow. ``decode`` makes the images."""
        before = sum(self.timings.get(part, 0.0) for part in BEFORE_DENOISING)
        start = time.perf_counter()
        future = run(self.imagining(actions, steps), self._backend)
        future.latents, future.before = map(self._backend.host, (future.latents, future.before))
        self._step_times.record_tick(before + time.perf_counter() - start, steps)
        return future

    def look_ahead(self, goal: str, steps: int = 2) -> LookAhead:
        """``plan``, then ``imagine`` that plan. On an asynchronous device all of it has been queued when this returns, so
        the device never waits for the host between frame and command."""
        if not self._backend.asynchronous:
            plan = functools.cache(lambda: self.plan(goal))
            return LookAhead(plan, lambda: self.imagine(plan(), steps))
        start, before = time.perf_counter(), self._latent
        plan = self._network_calls.queue(self.planning(goal))
        fetched_plan = self._backend.fetch(plan)
        z, queued = self._network_calls.queue(self._sampler.denoise(self._cache, self._time, plan, steps))
        fetched_outcomes = [self._backend.fetch(part) for part in queued]

        def future() -> Future:
            outcomes = tuple(part.result() for part in fetched_outcomes)
            self._times.read()
            self._step_times.record_tick(self._observing_took + time.perf_counter() - start, steps)
            return self._sampler.future(fetched_plan.result(), z, outcomes, before)
        return LookAhead(fetched_plan.result, future)

    def imagining(self, actions: np.ndarray, steps: int = 2) -> Calls[Future]:
        """``imagine`` as network calls, one unit per step."""
        self._require_observation()
        actions = self._actions(actions, self.spec.chunk_frames)
        before = self._latent
        z, outcomes = yield from self._sampler.denoise(self._cache, self._time, actions, steps)
        return self._sampler.future(actions, z, outcomes, before)

    def decode(self, future: Future) -> np.ndarray:
        """Return the frames, uint8 (T, H, W, 3), of an imagined future; also set ``future.frames``."""
        return run(self.decoding(future), self._backend)

    def decoding(self, future: Future) -> Calls[np.ndarray]:
        """``decode`` as network calls, one unit."""
        future.frames = yield from self._sampler.decode(future.latents, future.before)
        return future.frames

    def what_if(self, actions: np.ndarray | OwnPlan, steps: int = 2, moment: Moment | None = None
                ) -> Generator[None, None, Future]:
        """Imagine ``actions`` (T, A), any T >= 1, on a fork; the session stays as it is.

        A generator: every ``next`` is one network call, so that a tick can go first between any two. Returns the decoded
        Future of T frames. It sees the session as it was at ``moment``, or when the first ``next`` ran. Raises OutOfPages
        when too many branches are open; a branch ends with its generator.
        """
        chunks, end = yield from self._network_calls.units(self._branching(actions, steps, moment))
        end.cache.require_pages()  # a tick may have come between
        return joined(self._sampler, chunks, len(actions), self._backend.host)

    @property
    def overlaps(self) -> bool:
        """Whether the device runs the units of ``what_if`` in the background of ticks."""
        return self._backend.overlaps

    @property
    def busy(self) -> bool:
        """Whether the device is still running a unit of ``what_if``; the next unit waits for it."""
        return self._backend.busy

    def moment(self) -> Moment:
        """Return a snapshot that ``branching`` can start from later, when the session has moved on."""
        self._require_observation()
        return replace(self._now(), cache=self._cache.fork())

    def _now(self) -> Moment:
        return Moment(self._cache, self._time, self._latent, self._sinks, self._features, pose=self._pose,
                      anchors=self._anchors)

    def branching(self, actions: np.ndarray | OwnPlan, steps: int | Steps = 2, moment: Moment | None = None) -> Calls[Future]:
        """``what_if`` from now or from ``moment`` as network calls, in units; forks before the first one."""
        chunks, _ = yield from self._branching(actions, steps, moment)
        return joined(self._sampler, chunks, len(actions), self._backend.host)

    def extending(self, actions: np.ndarray, steps: int | Steps = 2, moment: Moment | None = None
                  ) -> Calls[tuple[Future, Moment]]:
        """``branching`` over whole chunks; also returns the moment at its end, from which another branch continues as if both
        were one. Sinks stay the observed frames; the returned moment holds the pages of its window."""
        if len(actions) % self.spec.chunk_frames:
            raise ValueError(f'{len(actions)} actions are no whole chunks of {self.spec.chunk_frames}')
        chunks, end = yield from self._branching(actions, steps, moment or self.moment(), keep=True)
        return joined(self._sampler, chunks, len(actions), self._backend.host), end

    def _branching(self, actions: np.ndarray | OwnPlan, steps: int | Steps, moment: Moment | None = None, keep: bool = False
                   ) -> Calls[tuple[list[Chunk], Moment]]:
        """Return the branch's chunks and the moment at its end. An ``OwnPlan`` is planned in the first unit."""
        self._require_observation()
        if isinstance(actions, OwnPlan):
            moment = moment or self.moment()  # a tick may come between the plan and its rollout
            yield Boundary('policy')
            actions = actions.actions(self._backend.host((yield from self.planning(actions.goal, moment=moment))))
        actions = self._actions(actions, len(actions))
        moment = moment or self._now()
        run_branch = branch_from_anchors if moment.anchors else branch
        return (yield from run_branch(self._sampler, self._commit, moment, actions, steps, keep))

    def capture(self) -> Capture:
        """Return the session as it is now, for a file: a fork, whose pages are copied later. Raises ValueError before the
        first frame."""
        self._require_observation()
        state = {'encoder_state': self._encoder_state, 'latent': self._latent, 'features': self._features}
        state = {name: self._backend.host(array) for name, array in state.items()}
        if self._sinks:
            latents, actions = zip(*self._sinks)
            state |= {'sink_latents': np.stack([self._backend.host(latent) for latent in latents]),
                      'sink_actions': np.stack(actions)}
        if self.spec.heading_pairs:
            state['heading'] = np.array([self._cache.heading], np.float32)
        if self.spec.keyframe_slabs:
            poses = np.array([self._cache.poses[slab] for slab in self._cache.table.slabs.tolist()], np.float32)
            state['poses'] = np.zeros((most_slabs(self.spec, self._memory), 3), np.float32)
            state['poses'][:len(poses)] = poses
        return Capture(self.spec, self._fingerprint, {'time': np.array([self._time]), **state}, self._cache.fork())

    def restore(self, loaded: Loaded) -> None:
        """Continue as a session that was read from a file and whose pages are filled. Raises SessionFileError, and
        changes nothing, if ``loaded`` was closed."""
        cache, state = loaded.take(), loaded.state
        self._cache.adopt(cache)
        cache.close()
        self._time = int(state['time'][0])
        self._cache.heading = float(state['heading'][0]) if self.spec.heading_pairs else 0.0
        self._cache.poses = dict(zip(self._cache.table.slabs.tolist(), map(tuple, state.get('poses', np.zeros(0)).tolist())))
        self._encoder_state, self._latent, self._features = state['encoder_state'], state['latent'], state['features']
        self._sinks = tuple(zip(state.get('sink_latents', ()), state.get('sink_actions', ())))
        self._anchors, self._pose = (), (0.0, 0.0, 0.0)  # anchors are not in files

    def close(self) -> None:
        """Release its pages; the session cannot be used afterwards."""
        self._cache.close()

    def save(self, path: str | Path) -> None:
        """Write the session to a safetensors file in one go; ``session_transfer`` does so between ticks. Raises OSError."""
        capture = self.capture()
        for _ in capture.pieces():
            pass
        with open(path, 'wb') as file:
            capture.write(file)

    def load(self, path: str | Path) -> None:
        """Load, in one go, a session that ``save`` wrote; raise SessionFileError, and change nothing, when it does not fit
        or is damaged."""
        try:
            with open(path, 'rb') as file:
                loaded = read(file, os.fstat(file.fileno()).st_size, self.spec, self._fingerprint(), self._memory)
        except OSError as error:
            raise SessionFileError(f'{path} cannot be read: {error}') from error
        try:
            for _ in loaded.pieces():
                pass
            self.restore(loaded)
        finally:
            loaded.close()

    def _commit(self, cache: SequenceCache, latents: np.ndarray, times: np.ndarray, actions: np.ndarray,
                observed: bool = True) -> Calls[np.ndarray]:
        """Run clean frames (T, h, w, Z) through the network to add them to the cache; return their features."""
        window = self._memory.window(cache, times, causal=True)
        if self._backend.asynchronous:
            self._backend.before_writing()
        with cache.stage() as staged:
            places = staged.places(int(times[0]), len(times), observed)
            features = yield Call('commit', (latents, actions, window, places))
        if self.spec.keyframe_slabs:
            frames = self._memory.layout.frames
            poses = poses_along(self.spec, actions, cache.poses.get((int(times[0]) - 1) // frames, (0.0, 0.0, 0.0)))
            cache.poses |= zip((times // frames).tolist(), map(tuple, poses.astype(np.float32).tolist()))
        self._memory.roll(cache, int(times[-1]))
        if self.spec.heading_pairs:
            cache.heading = heading_after(self.spec, cache.heading, actions)
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
            raise NothingObserved('the session has seen no frame yet: call observe first')

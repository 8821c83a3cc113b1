"""The thread that owns a session: takes in observations, answers them, and uses the time that is left."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.session import LookAhead
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.session_transfer import PATIENCE, Transfer
from worldmodel_ros.engine.what_if import Question
from .background_work import BackgroundWork
from .ladder import STEPS, Decision, Tier
from .responder import Listener, Observation, Prediction, Responder, require_finite
from .work_thread import WorkThread

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.session import Session


_ARRIVALS = 4     # of the newest observations, which tell how fast the camera is
_CLEARLY = 1.2    # periods between observations; what is less is jitter


class Worker:
    """
    One observation waits at most, the newest. The public methods may be called from any thread.

    `executed(start, end)` returns the mean action, float32 (A,), that was executed between two stamps [ns];
    `start` is None for the first observation of an episode.
    """

    def __init__(self, engine: Engine, executed: Callable[[int | None, int], np.ndarray],
                 responder: Responder, listener: Listener,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._executed, self._responder = engine, executed, responder
        self._listener, self._clock = listener, clock
        self._session: Session = engine.open_session()
        self._background = BackgroundWork(engine.step_times, engine.spec.step_period, listener, clock)
        self._thread = WorkThread('engine')
        self._slot: Observation | None = None
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)  # steady times in s
        self._expected: float | None = None  # when the next observation comes, steady time in s
        self._episode: int | None = None
        self._starts_over = False  # the session is to begin again, though the episode goes on
        self._committed: int | None = None  # stamp of the session's newest observation, ns

    @property
    def backend(self) -> str:
        """What runs the networks."""
        return self._engine.backend.name

    @property
    def image_size(self) -> tuple[int, int]:
        """Size (H, W) that observations must have [pixels]."""
        return self._engine.spec.image_size

    @property
    def degraded_reason(self) -> str:
        """Why another engine drives than was wanted; there is no other one here."""
        return ''

    def start(self) -> None:
        """Start the thread."""
        backend = self._engine.backend
        self._thread.start(self.step, lambda error: self._listener.failed(_reason(error), error, False),
                           backend.urgent if backend.asynchronous else nullcontext)

    def stop(self) -> None:
        """
        End the thread after the network call in progress; what was asked and is not answered is given up.
        """
        with self._thread.wake:
            self._slot = None
        self._thread.stop()
        self._responder.close()
        self._background.cancel()

    def submit(self, observation: Observation) -> bool:
        """Hand over an observation; return whether one that had not been begun was dropped for it."""
        self._responder.open(observation)
        with self._thread.wake:
            dropped, self._slot = self._slot is not None, observation
            self._arrivals.append(observation.received)
            self._expected = observation.received + self._interval()
            self._thread.stir()
        return dropped

    def _interval(self) -> float:
        """Return after how long the next observation is expected [s]; a camera slower than the model leaves spare time."""
        period = self._engine.spec.step_period
        least = min((later - earlier for earlier, later in pairwise(self._arrivals)), default=0.0)
        return least if least > _CLEARLY * period else period

    def forget(self) -> None:
        """Begin again with the next observation: what came before it was seen by somebody else."""
        with self._thread.wake:
            self._starts_over = True

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; the promise holds a what_if.Answer, or raises QuestionError."""
        return self._hand_in(self._background.ask, question)

    def save(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """
        Write the session to a file, in the calling thread; return what it took, in words. `patience`: for each part
        of the engine's thread [s].

        Raises SessionFileError, and CancelledError where the worker is stopped.
        """
        return Transfer(self._engine, self._call, patience).save(folder, name)

    def load(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """Replace the session by one from a file; as `save`. Where it raises, nothing was changed."""
        def adopt(restore: Callable[[Session], None]) -> Promise:
            def and_forget_plan(session: Session) -> None:
                restore(session)
                self._responder.forget_plan()
            return self._call(and_forget_plan)
        return Transfer(self._engine, self._call, patience).load(folder, name, adopt)

    def step(self) -> float | None:
        """Do the most urgent piece of work; return how long there is none [s], None for until woken."""
        with self._thread.wake:
            observation, self._slot = self._slot, None
        self._background.expire(self._committed)
        self._thread.urgent(observation is not None)
        if observation is None:
            return self._background.step(self._session, self._committed, self._expected)
        try:
            self._tick(observation)
        except Exception as error:
            self._fail(observation, error)
        return 0.0

    def _tick(self, observation: Observation) -> None:
        """Answer an observation: choose a tier, commit the image, plan, and imagine what the plan leads to."""
        begun = self._clock()
        self._begin(observation)
        decision = self._responder.decide(observation, begun, self._engine.step_times.predict)
        self._session.observe(observation.image, self._executed(self._committed, observation.stamp))
        self._committed = observation.stamp
        if decision is None or self._slot is not None:
            return
        start = self._clock()
        # Below the one-step tier the command leaves before its future is imagined, which is shown when it is ready.
        # Measured it must be in any case: the tier could not be found fast enough again otherwise.
        tier = decision.tier if decision.tier in STEPS else Tier.ONE_STEP
        ahead = self._look_ahead(observation.goal, STEPS[tier])
        plan = require_finite(ahead.plan(), 'the plan')
        planned = self._clock()
        if observation.goal:
            self._responder.planned(observation, decision, plan)
        if self._has_no_time_to_imagine(decision):
            return
        future = ahead.future()
        require_finite(future.collision_risk, 'the collision risk')
        imagined = self._clock()
        if observation.goal:
            self._responder.finished(observation, decision, plan)
        measured = self._session.timings
        self._background.show(Prediction(observation, tier, self._responder.served(observation) or Tier.NONE, future, {
            'queue': begun - observation.received, 'encode': measured.get('encode', 0.0),
            'commit': measured.get('commit', 0.0), 'policy': planned - start, 'denoise': imagined - planned,
            'total': imagined - observation.received, 'predicted': decision.finish - observation.received}))

    def _begin(self, observation: Observation) -> None:
        """Let the session begin again where the episode does, or where it was told to."""
        with self._thread.wake:
            again, self._starts_over = self._starts_over or observation.episode != self._episode, False
        if again:
            self._background.show(None)
            self._session.reset()
            self._episode, self._committed = observation.episode, None

    def _look_ahead(self, goal: str, steps: int) -> LookAhead:
        """What is planned, and imagined of it; without a goal, of standing still."""
        if goal:
            return self._session.look_ahead(goal, steps)
        spec = self._engine.spec
        still = np.zeros((spec.chunk_frames, len(spec.action_names)), np.float32)
        return LookAhead(lambda: still, lambda: self._session.imagine(still, steps))

    def _has_no_time_to_imagine(self, decision: Decision) -> bool:
        if self._slot is not None:
            return not self._background.starved
        # The command is out. Where images still wait from the tick before, the time that is left is theirs: a host on
        # which it does not suffice for both shows every other future, and not none.
        return decision.tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN) and self._background.undecoded

    def _fail(self, observation: Observation, error: Exception) -> None:
        reason = _reason(error)
        self._responder.fault(observation, reason)
        restarted = not isinstance(error, RankFailure)  # which its session outlives
        if restarted:
            # Not a reset: whatever is broken in the old session is to be gone.
            self._session = self._engine.open_session()
            self._episode = self._committed = None
        self._listener.failed(reason, error, restarted)

    def _call(self, function: Callable[[Session], Any]) -> Promise:
        return self._hand_in(self._background.call, function)

    def _hand_in(self, take: Callable[[Any], Promise], what: Any) -> Promise:
        with self._thread.wake:
            if self._thread.running:
                promise = take(what)
                self._thread.stir()
                return promise
        promise = Promise()
        promise.cancel()
        return promise


def _reason(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'

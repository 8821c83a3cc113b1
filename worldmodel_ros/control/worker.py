"""The thread that owns a session: takes in observations, answers them, and uses the time that is left."""
from __future__ import annotations

import threading
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
from worldmodel_ros.realtime import Urgency
from .background_work import SpareTime
from .ladder import STEPS, Decision, Tier
from .responder import Responder
from .types import Listener, Observation, Prediction

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.session import Session


_ARRIVALS = 4     # of the newest observations, which tell how fast the camera is
_CLEARLY = 1.2    # periods between observations; what is less is jitter


class OutputError(RuntimeError):
    """The model gave something that cannot be used."""


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
        self._spare_time = SpareTime(engine.step_times, engine.spec.step_period, listener, clock)
        self._wake = threading.Condition()
        self._slot: Observation | None = None
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)  # steady times in s
        self._urgency: Urgency | None = None  # of the thread
        self._expected: float | None = None  # when the next observation comes, steady time in s
        self._news = False  # something was handed in since the last look
        self._running = False
        self._thread: threading.Thread | None = None
        self._episode: int | None = None
        self._anew = False  # the session is to begin anew, though the episode goes on
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
    def trouble(self) -> str:
        """Why another engine drives than was wanted; there is no other one here."""
        return ''

    def start(self) -> None:
        """Start the thread."""
        self._running = True
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """
        End the thread after the network call in progress; what was asked and is not answered is given up.
        """
        with self._wake:
            self._running = False
            self._slot = None
            self._stir()
        if self._thread:
            self._thread.join()
        self._responder.close()
        self._spare_time.cancel()

    def submit(self, observation: Observation) -> bool:
        """Hand over an observation; return whether one that had not been begun was dropped for it."""
        self._responder.open(observation)
        with self._wake:
            dropped, self._slot = self._slot is not None, observation
            self._arrivals.append(observation.received)
            self._expected = observation.received + self._interval()
            self._stir()
        return dropped

    def _interval(self) -> float:
        """Return after how long the next observation is expected [s]; a camera slower than the model leaves spare time."""
        period = self._engine.spec.step_period
        least = min((later - earlier for earlier, later in pairwise(self._arrivals)), default=0.0)
        return least if least > _CLEARLY * period else period

    def forget(self) -> None:
        """Begin anew with the next observation: what came before it was seen by somebody else."""
        with self._wake:
            self._anew = True

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; the promise holds a what_if.Answer, or raises QuestionError."""
        return self._enqueue(lambda: self._spare_time.ask(question))

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
        with self._wake:
            observation, self._slot, self._news = self._slot, None, False
        self._spare_time.expire(self._committed)
        self._is_urgent(observation is not None)
        if observation is None:
            return self._spare_time.step(self._session, self._committed, self._expected)
        self._tick(observation)
        return 0.0

    def _is_urgent(self, urgent: bool) -> None:
        if self._urgency:
            self._urgency.urgent = urgent

    def _run(self) -> None:
        backend = self._engine.backend
        with backend.urgent() if backend.asynchronous else nullcontext():
            self._work()

    def _work(self) -> None:
        self._urgency = Urgency()
        while self._running:
            try:
                patience = self.step()
            except Exception as error:  # whatever it is, the robot needs its next answer
                self._listener.failed(f'{type(error).__name__}: {error}', error, False)
                continue
            self._is_urgent(True)  # to be woken at once
            with self._wake:
                if self._running and not self._news and patience != 0.0:
                    self._wake.wait(patience)

    def _stir(self) -> None:
        self._news = True
        self._wake.notify()

    def _call(self, function: Callable[[Session], Any]) -> Promise:
        return self._enqueue(lambda: self._spare_time.call(function))

    def _enqueue(self, hand_in: Callable[[], Promise]) -> Promise:
        with self._wake:
            if self._running:
                promise = hand_in()
                self._stir()
                return promise
        promise = Promise()
        promise.cancel()
        return promise

    def _tick(self, observation: Observation) -> None:
        begun = self._clock()
        try:
            self._begin(observation)
            decision = self._responder.decide(observation, begun, self._engine.step_times.predict)
            self._session.observe(observation.image, self._executed(self._committed, observation.stamp))
            self._committed = observation.stamp
            if decision and self._slot is None:
                self._look_ahead(observation, decision, begun)
        except Exception as error:
            self._fail(observation, error)

    def _begin(self, observation: Observation) -> None:
        with self._wake:
            anew, self._anew = self._anew or observation.episode != self._episode, False
        if anew:
            self._spare_time.show(None)
            self._session.reset()
            self._episode, self._committed = observation.episode, None

    def _look_ahead(self, observation: Observation, decision: Decision, begun: float) -> None:
        start = self._clock()
        # Below the one-step tier the command leaves before its future is imagined, which is shown when it is ready.
        # Measured it must be in any case: the tier could not be found fast enough again otherwise.
        tier = decision.tier if decision.tier in STEPS else Tier.ONE_STEP
        ahead = self._ahead(observation.goal, STEPS[tier])
        plan = ahead.plan()
        _require_finite(plan, 'the plan')
        planned = self._clock()
        if observation.goal:
            self._responder.planned(observation, decision, plan)
        if self._has_no_time_to_imagine(decision):
            return
        future = ahead.future()
        _require_finite(future.collision_risk, 'the collision risk')
        imagined = self._clock()
        if observation.goal:
            self._responder.finished(observation, decision, plan)
        measured = self._session.timings
        command_tier = self._responder.served(observation) or Tier.NONE
        self._spare_time.show(Prediction(observation, tier, command_tier, future, {
            'queue': begun - observation.received, 'encode': measured.get('encode', 0.0),
            'commit': measured.get('commit', 0.0), 'policy': planned - start,
            'denoise': imagined - planned, 'total': imagined - observation.received,
            'predicted': decision.finish - observation.received}))

    def _has_no_time_to_imagine(self, decision: Decision) -> bool:
        if self._slot is not None:
            return not self._spare_time.starved
        # The command is out. Where pictures still wait from the tick before, the time that is left is theirs: a host on
        # which it does not suffice for both shows every other future, and not none.
        return decision.tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN) and self._spare_time.undecoded

    def _ahead(self, goal: str, steps: int) -> LookAhead:
        """What is planned, and imagined of it; without a goal, of standing still."""
        if goal:
            return self._session.look_ahead(goal, steps)
        spec = self._engine.spec
        still = np.zeros((spec.chunk_frames, len(spec.action_names)), np.float32)
        return LookAhead(lambda: still, lambda: self._session.imagine(still, steps))

    def _fail(self, observation: Observation, error: Exception) -> None:
        reason = f'{type(error).__name__}: {error}'
        self._responder.fault(observation, reason)
        anew = not isinstance(error, RankFailure)  # which its session outlives
        if anew:
            # Not a reset: whatever is broken in the old session is to be gone.
            self._session = self._engine.open_session()
            self._episode = self._committed = None
        self._listener.failed(reason, error, anew)


def _require_finite(values: np.ndarray, what: str) -> None:
    if not np.isfinite(values).all():
        raise OutputError(f'{what} is not finite')

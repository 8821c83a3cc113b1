"""The thread that owns a session: takes observations, answers them, and uses the remaining time for background work."""
from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros import realtime
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.network_calls import SESSION
from worldmodel_ros.engine.session import LookAhead
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.session_transfer import PATIENCE, Transfer
from worldmodel_ros.engine.what_if import Answer, Inquiry, Question, QuestionError
from .ladder import STEPS, Decision, Tier
from .responder import Listener, Observation, Prediction, Responder, require_finite

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.network_calls import StepTimes
    from worldmodel_ros.engine.session import Session

_PERIODS = 9  # of a robot's observations; if the shortest is longer than the model's, its camera is slower
_MARGIN = 0.002  # s before the next observation is expected, in case it arrives early
_POLL = 0.0005  # s between checks whether the device has finished
_STARVED = 1.0  # s without images, after which they need not fit before the next observation; likewise for a question
_JOB_EXCESS = 2.0  # time allowed for a job, in medians; not the high quantile, which a single interruption may set

Job = Callable[['Session'], Any]
_NICENESS = -10


class Cadence:
    """How often a robot's observations come, and how soon the next one may.

    A camera may be slower than the model, which leaves spare time. Hence the shortest of the last periods: that images were
    missing says nothing about the next one.
    """

    def __init__(self, period: float) -> None:
        """``period`` [s]: the model's, assumed until the observations turn out to come more slowly."""
        self._period = period
        self._last: float | None = None
        self._took: deque[float] = deque(maxlen=_PERIODS)

    def arrived(self, now: float) -> float:
        """Record an observation at ``now`` (steady, s); return the time [s] until the next one at the earliest."""
        if self._last is not None:
            self._took.append(now - self._last)
        self._last = now
        return max(self._period, min(self._took)) if len(self._took) == _PERIODS else self._period


class Worker:
    """
    At most one observation waits, the newest. The public methods are thread-safe.

    ``executed(start, end)`` returns the mean action, float32 (A,), executed between two stamps [ns]; ``start`` is None
    for the first observation of an episode.
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
        self._cadence = Cadence(engine.spec.step_period)
        self._expected: float | None = None  # when the next observation comes, steady time in s
        self._episode: int | None = None
        self._starts_over = False  # the session must start over although the episode continues
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
        """Why a different engine than the requested one is in use; always empty here."""
        return ''

    def start(self) -> None:
        """Start the thread."""
        backend = self._engine.backend
        self._thread.start(self.step, lambda error: self._listener.failed(reason_of(error), error, False),
                           backend.urgent if backend.asynchronous else nullcontext)

    def stop(self) -> None:
        """End the thread after the network call in progress; unanswered requests are given up."""
        with self._thread.wake:
            self._slot = None
        self._thread.stop()
        self._responder.close()
        self._background.cancel()

    def submit(self, observation: Observation) -> bool:
        """Hand over an observation; return whether one that was still waiting was dropped for it."""
        self._responder.open(observation)
        with self._thread.wake:
            dropped, self._slot = self._slot is not None, observation
            self._expected = observation.received + self._cadence.arrived(observation.received)
            self._thread.stir()
        return dropped

    def forget(self) -> None:
        """Start over with the next observation: those before it were seen by another engine."""
        with self._thread.wake:
            self._starts_over = True

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; the future holds an Answer, or raises QuestionError or the model's error."""
        return self._hand_in(self._background.ask, question)

    def save(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """
        Write the session to a file, in the calling thread; return what it took, in words. ``patience``: how long to
        wait for each part done by the engine's thread [s].

        Raises SessionFileError, and CancelledError if the worker is stopped.
        """
        return Transfer(self._engine, self._call, patience).save(folder, name)

    def load(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """Replace the session by one from a file; otherwise as ``save``. If it raises, nothing was changed."""
        def adopt(restore: Callable[[Session], None]) -> Promise:
            def and_forget_plan(session: Session) -> None:
                restore(session)
                self._responder.forget_plan()
            return self._call(and_forget_plan)
        return Transfer(self._engine, self._call, patience).load(folder, name, adopt)

    def step(self) -> float | None:
        """Do the most urgent piece of work; return how long there is none [s], None for until woken up."""
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
        # Below the one-step tier the command leaves before its future is imagined and shown. The future is imagined all
        # the same: without measuring it, the tier could never be found fast enough again.
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
        """Start the session over for a new episode, or if told to."""
        with self._thread.wake:
            again, self._starts_over = self._starts_over or observation.episode != self._episode, False
        if again:
            self._start_over()
            self._episode, self._committed = observation.episode, None

    def _start_over(self) -> None:
        """Forget what was seen."""
        self._background.show(None)
        self._session.reset()

    def _look_ahead(self, goal: str, steps: int) -> LookAhead:
        """Return a plan and its imagined future; without a goal, of standing still."""
        if goal:
            return self._session.look_ahead(goal, steps)
        spec = self._engine.spec
        still = np.zeros((spec.chunk_frames, len(spec.action_names)), np.float32)
        return LookAhead(lambda: still, lambda: self._session.imagine(still, steps))

    def _has_no_time_to_imagine(self, decision: Decision) -> bool:
        if self._slot is not None:
            return not self._background.starved
        # The command is out. If images of the previous tick still wait, they get the remaining time: a host that is too
        # slow for both then shows every other future instead of none.
        return decision.tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN) and self._background.undecoded

    def _fail(self, observation: Observation, error: Exception) -> None:
        reason = reason_of(error)
        self._responder.fault(observation, reason)
        restarted = self._replaces_session(error)
        if restarted:
            self._episode = self._committed = None
        self._listener.failed(reason, error, restarted)

    def _replaces_session(self, error: Exception) -> bool:
        """Open a new session after an error, unless the session survives it; return whether one was opened."""
        if isinstance(error, RankFailure):
            return False
        # Not a reset, which could keep whatever is broken in the old session.
        self._session = self._engine.open_session()
        return True

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


def reason_of(error: Exception) -> str:
    """Return an error as a reason in one line of text."""
    return f'{type(error).__name__}: {error}'


class BackgroundWork:
    """
    Work that can wait, most urgent first: images, sessions, questions.

    A piece is started only if, by the high quantile of measured times, it ends before the next observation comes. What
    never fits is never done, except one prediction's images per second, without which people and recordings see nothing.
    One unit of a question per second is started if only the median fits: on a busy machine the high quantile may never fit.
    If the device answers questions concurrently with ticks, they need not fit. Call ``expire`` between any two pieces of
    work, ticks too: questions expire even when no time is left for them.

    Jobs and questions may be handed in from any thread; everything else belongs to the thread that owns the session.
    """

    def __init__(self, step_times: StepTimes, step_period: float, listener: Listener,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._step_times, self._period, self._listener, self._clock = step_times, step_period, listener, clock
        self._undecoded: Prediction | None = None
        self._decoded_at = clock()  # s, when the last images were decoded
        self._jobs: deque[tuple[Job, Promise]] = deque()
        self._questions: deque[tuple[Question, Promise]] = deque()
        self._asking = threading.Lock()  # held while adding a question or iterating over them
        self._inquiry: tuple[Inquiry, Promise] | None = None
        self._inquired_at = clock()  # s, when a question's newest unit was started, or the first question came

    @property
    def undecoded(self) -> bool:
        """Whether images are waiting to be decoded."""
        return self._undecoded is not None

    @property
    def starved(self) -> bool:
        """Whether the last images are so long ago that the next ones take precedence."""
        return self._clock() - self._decoded_at > _STARVED

    def show(self, prediction: Prediction | None) -> None:
        """Set the newest prediction to be decoded, replacing an older one; None drops that."""
        self._undecoded = prediction

    def call(self, job: Job) -> Promise:
        """Schedule ``job`` to be called with the session; the future holds its result."""
        promise: Promise = Promise()
        self._jobs.append((job, promise))
        return promise

    def ask(self, question: Question) -> Promise:
        """Ask a question; the future holds a ``what_if.Answer``."""
        promise: Promise = Promise()
        with self._asking:
            if not self._questions and not self._inquiry:
                self._inquired_at = self._clock()
            self._questions.append((question, promise))
        return promise

    def cancel(self) -> None:
        """Give up everything; pending futures are cancelled."""
        self._undecoded = None
        for promise in [promise for _, promise in (*self._jobs, *self._questions)]:
            promise.cancel()
        self._jobs.clear()
        self._questions.clear()
        if self._inquiry:
            self._inquiry[1].set_exception(QuestionError('the node was deactivated'))
            self._inquiry = None

    def expire(self, observed: int | None) -> None:
        """Answer the questions that are due, with what there is; ``observed`` as for ``step``."""
        now = self._clock()
        if self._inquiry and now >= self._inquiry[0].question.due:
            inquiry, promise = self._inquiry
            self._inquiry = None
            promise.set_result(inquiry.answer)
        with self._asking:
            over = [each for each in self._questions if now >= each[0].due]
            if over:
                self._questions = deque(each for each in self._questions if now < each[0].due)
        for _, promise in over:
            _fulfil(promise, lambda: Answer(observed or 0))

    def step(self, session: Session, observed: int | None, expected: float | None) -> float | None:
        """
        Do one piece of work; return how long there is none to do [s], 0.0 if not known, None for until more comes.

        ``observed``: stamp of the session's newest observation [ns]. ``expected``: when the next one comes
        (steady, s).
        """
        if self._undecoded and (self.starved or self.fits(self._step_times.quantile('decode'), expected)):
            self._decode(session)
        elif self._jobs and self.fits(_JOB_EXCESS * self._step_times.typical(SESSION), expected):
            job, promise = self._jobs.popleft()
            start = self._clock()
            if _fulfil(promise, lambda: job(session)):
                self._step_times.record(SESSION, self._clock() - start)
        elif self._inquiry and session.busy:
            return _POLL
        elif (self._questions or self._inquiry) and (
                session.overlaps or self.fits(self._unit_time(), expected)):
            self._inquired_at = self._clock()
            self._inquire(session, observed)
        else:
            return self._patience(expected)
        return 0.0

    def _unit_time(self) -> float:
        """Return the time allowed for a unit of a question [s]."""
        starved = self._clock() - self._inquired_at > _STARVED
        return self._step_times.typical_unit() if starved else self._step_times.unit()

    def _inquire(self, session: Session, observed: int | None) -> None:
        """Start the next question, or do one unit of the one in progress."""
        if self._inquiry is None:
            question, promise = self._questions.popleft()
            if not promise.set_running_or_notify_cancel():
                return
        else:
            inquiry, promise = self._inquiry
        try:
            if self._inquiry is None:
                if observed is None:
                    raise QuestionError('nothing has been observed yet: ask when the camera publishes')
                self._inquiry = Inquiry(question, session, observed), promise
            elif inquiry.advance():
                self._inquiry = None
                promise.set_result(inquiry.answer)
        except Exception as error:
            self._inquiry = None
            promise.set_exception(error)

    def _decode(self, session: Session) -> None:
        prediction, self._undecoded = self._undecoded, None
        start = self._decoded_at = self._clock()
        try:
            session.decode(prediction.future)
        except Exception as error:
            self._listener.failed(f'decoding: {type(error).__name__}: {error}', error, False)
            return
        prediction.timings['decode'] = self._clock() - start
        self._listener.predicted(prediction)

    def fits(self, duration: float, expected: float | None) -> bool:
        """Return whether work of ``duration`` s ends before the next observation, ``expected`` at that time (steady, s)."""
        now = self._clock()
        # Do not wait for an observation that is late by a whole period.
        return expected is None or now + duration + _MARGIN <= expected or now > expected + self._period

    def _patience(self, expected: float | None) -> float | None:
        with self._asking:
            waiting = [question.due for question, _ in self._questions]
        if self._inquiry:
            waiting.append(self._inquiry[0].question.due)
        if expected is not None and (waiting or self._jobs or self._undecoded):
            waiting.append(expected + self._period)
        return max(_MARGIN, min(waiting) - self._clock()) if waiting else None


def _fulfil(promise: Promise, function: Callable[[], Any]) -> bool:
    """Return whether the function was called at all."""
    if not promise.set_running_or_notify_cancel():
        return False
    try:
        promise.set_result(function())
    except Exception as error:
        promise.set_exception(error)
    return True


class WorkThread:
    """
    A thread that does one step after another. Hold ``wake`` while handing something in.

    It keeps no reference to what it runs, so that its owner and the owner's device memory can be freed once it is stopped.
    """

    def __init__(self, name: str) -> None:
        self.wake = threading.Condition()
        self.running = False
        self._name = name
        self._news = False  # something was handed in since the last look
        self._thread: threading.Thread | None = None
        self._urgency: Urgency | None = None

    def start(self, step: Callable[[], float | None], failed: Callable[[Exception], None],
              surroundings: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """
        Start the thread, which enters ``surroundings`` and then calls ``step`` until it is stopped.

        A step returns how long there is nothing to do [s], None for until more comes. What it raises is passed to
        ``failed``, and the thread continues. Returns once ``surroundings`` is entered, and raises what that raises.
        """
        entered: Promise = Promise()
        self.running = True
        self._thread = threading.Thread(
            target=self._run, args=(step, failed, surroundings, entered), name=self._name, daemon=True)
        self._thread.start()
        entered.result()

    def stop(self) -> None:
        """End the thread after the step in progress."""
        with self.wake:
            self.running = False
            self.stir()
        if self._thread:
            self._thread.join()
        self._thread = None

    def stir(self) -> None:
        """Signal that something was handed in. Call with ``wake`` held."""
        self._news = True
        self.wake.notify()

    def urgent(self, urgent: bool) -> None:
        """
        Run the rest of this step under SCHED_FIFO if urgent (and the thread started under it), else in the ordinary class.

        Call it in the thread. The next step starts urgent again.
        """
        if self._urgency:
            self._urgency.urgent = urgent

    def _run(self, step: Callable[[], float | None], failed: Callable[[Exception], None],
             surroundings: Callable[[], AbstractContextManager], entered: Promise) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(surroundings())
            except Exception as error:
                entered.set_exception(error)
                return
            self._urgency = Urgency()
            entered.set_result(None)
            while self.running:
                self._news = False  # before the step: what comes during it needs another step
                try:
                    patience = step()
                except Exception as error:  # keep going: the robots need their next answers
                    failed(error)
                    patience = 0.0
                self.urgent(True)  # to wake up without delay
                with self.wake:
                    if self.running and not self._news and patience != 0.0:
                        self.wake.wait(patience)


class Urgency:
    """
    Keeps the calling thread under SCHED_FIFO, if it was when this was created, only while its work is ``urgent``.

    Linux gives real-time threads 95 % of a processor (sched(7), ``sched_rt_runtime_us``) and then stops all of them there
    for up to 50 ms, however urgent: a thread that fills a processor with work that can wait would get the watchdogs
    throttled as well. Such work runs in the ordinary class, with a niceness that other programs do not have.
    """

    def __init__(self) -> None:
        self._priority, self._urgent = realtime.priority_of(0), True
        if self._priority:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # counts in the ordinary class only
            except PermissionError:
                pass

    @property
    def urgent(self) -> bool:
        """Whether the thread runs under SCHED_FIFO, where that is permitted."""
        return self._urgent

    @urgent.setter
    def urgent(self, urgent: bool) -> None:
        if self._priority and urgent is not self._urgent:
            policy, priority = (os.SCHED_FIFO, self._priority) if urgent else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        self._urgent = urgent


def uncancellable_future() -> Promise:
    """Return a future already marked as running, which cannot be cancelled; a caller may simply ignore its result."""
    promise: Promise = Promise()
    promise.set_running_or_notify_cancel()
    return promise

"""What an engine does between two observations: images, sessions to and from files, what-if questions."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from typing import TYPE_CHECKING, Any

from worldmodel_ros.engine.step_times import SESSION
from worldmodel_ros.engine.what_if import Answer, Inquiry, Question, QuestionError
from .responder import Listener, Prediction

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Session
    from worldmodel_ros.engine.step_times import StepTimes

_MARGIN = 0.002  # s, before the next observation is expected, for its early arrival
_POLL = 0.0005  # s, after which a device is asked again whether it has done what was asked of it
_STARVED = 1.0  # s without images, after which they need not fit before the next observation any more
_JOB_EXCESS = 2.0  # times the median, which a job is given; not the high quantile, which one interruption may decide

Job = Callable[['Session'], Any]


class BackgroundWork:
    """
    Work that can wait, most urgent first: images, sessions, questions.

    A piece of it is begun only if, by the high quantile of what such pieces took, it is over when the next observation
    comes; what never fits is never done, but for one prediction's images a second, since people and recordings are blind
    without. Where the device answers questions next to ticks, these need not fit. `expire` is to be called between any
    two pieces of work, ticks too: a question's time passes also where there is none to spare.

    Jobs and questions may be handed in from any thread; everything else belongs to the thread that owns the session.
    """

    def __init__(self, step_times: StepTimes, step_period: float, listener: Listener,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._step_times, self._period, self._listener, self._clock = step_times, step_period, listener, clock
        self._undecoded: Prediction | None = None
        self._decoded_at = clock()  # s, when the last images were
        self._jobs: deque[tuple[Job, Promise]] = deque()
        self._questions: deque[tuple[Question, Promise]] = deque()
        self._asking = threading.Lock()  # held by who adds a question or looks through them
        self._inquiry: tuple[Inquiry, Promise] | None = None

    @property
    def undecoded(self) -> bool:
        """Whether images wait to be decoded."""
        return self._undecoded is not None

    @property
    def starved(self) -> bool:
        """Whether it is so long since the last images that the next ones go first."""
        return self._clock() - self._decoded_at > _STARVED

    def show(self, prediction: Prediction | None) -> None:
        """Take the newest prediction to be decoded, in place of an older one; None: forget that."""
        self._undecoded = prediction

    def call(self, job: Job) -> Promise:
        """Have `job` called with the session; the promise holds its result."""
        promise: Promise = Promise()
        self._jobs.append((job, promise))
        return promise

    def ask(self, question: Question) -> Promise:
        """Ask a question; the promise holds a what_if.Answer."""
        promise: Promise = Promise()
        with self._asking:
            self._questions.append((question, promise))
        return promise

    def cancel(self) -> None:
        """Give up everything; the promises are cancelled."""
        self._undecoded = None
        for promise in [promise for _, promise in (*self._jobs, *self._questions)]:
            promise.cancel()
        self._jobs.clear()
        self._questions.clear()
        if self._inquiry:
            self._inquiry[1].set_exception(QuestionError('the node was deactivated'))
            self._inquiry = None

    def expire(self, observed: int | None) -> None:
        """Answer the questions whose time is over, with what there is; `observed` as for `step`."""
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
        Do one piece of work; return how long there is none to be done [s], 0.0 for not known, None for until
        more comes.

        `observed`: stamp of the session's newest observation [ns]. `expected`: when the next one comes
        (steady, s).
        """
        if self._undecoded and (self.starved or self._fits(self._step_times.quantile('decode'), expected)):
            self._decode(session)
        elif self._jobs and self._fits(_JOB_EXCESS * self._step_times.typical(SESSION), expected):
            job, promise = self._jobs.popleft()
            start = self._clock()
            if _fulfil(promise, lambda: job(session)):
                self._step_times.record(SESSION, self._clock() - start)
        elif self._inquiry and session.busy:
            return _POLL
        elif (self._questions or self._inquiry) and (
                session.overlaps or self._fits(self._step_times.unit(), expected)):
            self._inquire(session, observed)
        else:
            return self._patience(expected)
        return 0.0

    def _inquire(self, session: Session, observed: int | None) -> None:
        """Begin the next question, or do one unit of the one in progress."""
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

    def _fits(self, duration: float, expected: float | None) -> bool:
        now = self._clock()
        # An observation that is late by a whole period is not being waited for.
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
    """Whether the function was called at all."""
    if not promise.set_running_or_notify_cancel():
        return False
    try:
        promise.set_result(function())
    except Exception as error:
        promise.set_exception(error)
    return True

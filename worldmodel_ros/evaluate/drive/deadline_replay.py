"""Would the deadline have held? The worker of the node answers the bag's frames, in virtual time.

Frames arrive when the bag says that they did. ``control.worker.Worker``, ``Responder`` and ``Ladder`` decide as on the
robot, by their own code; only the networks are replaced by their measured times, and the clock by one that those times
advance. Not in a bag, and so not in these numbers: transport to the gate and the gate itself, for which ``reserve_s``
is kept.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from worldmodel_ros.control.ladder import Tier, Verdict
from worldmodel_ros.control.responder import Answer, Observation, Prediction, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.inputs.ticks import NS
from worldmodel_ros.model.presets import Preset
from .deadline import Arrival, Budget, Deadline
from .step_times import MeasuredTimes
from .virtual_time import TimedEngine, VirtualClock

# Log times that equal the stamps, or are this far from them, were not taken on receipt: a converted bag.
_PLAUSIBLE_DELAY = 1.0  # s
_PAUSE = 10.0           # s between two ticks; after a longer one nothing is in progress any more


def replay(spec: Preset, arrivals: Sequence[Arrival], measured: MeasuredTimes, budget: Budget) -> Deadline:
    """Answer the ticks of a recording; the result depends only on the arrivals, the times and the budget."""
    delay = float(np.median([a.log_ns - a.stamp_ns for a in arrivals])) / NS if arrivals else 0.0
    result = Deadline(budget, measured, delay if 0.0 < delay < _PLAUSIBLE_DELAY else None, len(arrivals))
    clock, listener = VirtualClock(), _Counting(result)
    responder = Responder(listener, budget.ladder, spec.step_period, clock)
    worker = Worker(TimedEngine(spec, measured, clock), lambda start, end: np.zeros(spec.actions, np.float32),
                    responder, listener, clock)
    _Camera(_observations(spec, arrivals, budget.deadline, result.delay is not None), worker, responder, clock).next()
    _run(worker, clock)
    result.tiers[Tier.NONE] = result.ticks - sum(count for tier, count in result.tiers.items() if tier is not Tier.NONE)
    return result


def _run(worker: Worker, clock: VirtualClock) -> None:
    """The loop of the worker's thread, until nothing more comes."""
    while True:
        if worker.step() == 0.0:
            continue
        coming = clock.next_event()
        if coming is None:
            return
        clock.advance(max(0.0, coming - clock()))


def _observations(spec: Preset, arrivals: Sequence[Arrival], deadline: float, delay_known: bool
                  ) -> Iterator[Observation]:
    """Yield what the node would have made of the ticks, on a steady clock that begins with the first one."""
    received, last = 0.0, None
    for number, arrival in enumerate(arrivals):
        now = arrival.log_ns if delay_known else arrival.stamp_ns
        if last is not None:
            # If the time was set, the robot's steady clock still advanced by a step or so, which is all that matters here.
            received += (now - last) / NS if 0 <= now - last < _PAUSE * NS else spec.step_period
        last = now
        age = max(0.0, (arrival.log_ns - arrival.stamp_ns) / NS) if delay_known else 0.0
        stale = f'the image was {age * 1e3:.0f} ms old on receipt' if age > deadline else ''
        yield Observation(np.empty(0, np.uint8), arrival.stamp_ns, received, received + deadline - age, arrival.episode,
                          number, spec.goals[0], stale)


class _Camera:
    """The node's two callbacks: an image has come, and the newest one must be answered now."""

    def __init__(self, observations: Iterator[Observation], worker: Worker, responder: Responder, clock: VirtualClock
                 ) -> None:
        self._observations, self._worker, self._responder, self._clock = observations, worker, responder, clock
        self._newest: Observation | None = None

    def next(self) -> None:
        """Schedule the next image at its time."""
        observation = next(self._observations, None)
        if observation:
            self._clock.at(observation.received, partial(self._show, observation))

    def _show(self, observation: Observation) -> None:
        self._newest = observation
        self._clock.at(observation.due - self._responder.settings.reserve, partial(self._answer_due, observation))
        self._worker.submit(observation)
        self.next()

    def _answer_due(self, observation: Observation) -> None:
        # Every image resets the node's timer.
        if observation is self._newest:
            self._responder.overdue()


class _Counting:
    """Records the worker's answers in the result."""

    def __init__(self, result: Deadline) -> None:
        self._result = result

    def answered(self, answer: Answer) -> None:
        result = self._result
        result.tiers[answer.tier] += 1
        result.late += answer.verdict is Verdict.LATE
        result.stale += answer.verdict is Verdict.STALE_INPUT
        if answer.tier not in (Tier.NONE, Tier.STOP):
            age_on_receipt = result.budget.deadline - answer.budget
            result.latency.append(age_on_receipt + answer.latency)
            result.served.append(int(answer.tier))
        if answer.tier is not Tier.TWO_STEP:
            # Without its numbers, so that equal ones can be counted.
            result.reasons[re.sub(r'-?[\d.]*\d', '#', answer.reason.split(';')[0])] += 1

    def predicted(self, prediction: Prediction) -> None:
        """Images come after the command, and delay nothing."""

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        raise error

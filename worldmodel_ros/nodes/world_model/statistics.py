"""What the world model node measures of itself and its camera, and how it is doing, as it reports it on /diagnostics."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.control.ladder import Counts, Tier
from worldmodel_ros.control.responder import Answer, Observation
from worldmodel_ros.inputs.ticks import NS, misfit
from worldmodel_ros.nodes.common.diagnostics import ERROR, OK, WARN
from worldmodel_ros.safety.gate import Policy

if TYPE_CHECKING:
    from worldmodel_ros.nodes.world_model.activation import Activation

_RATE_WINDOW = 30  # images
_FEW_PREDICTIONS = 0.5  # of the ticks, below which a person is told
_PREDICTIONS_SETTLED = 3.0  # s of ticks, before which their rate tells nothing
_LATENCY_WINDOW = 1000  # ticks
_RATE_TOLERANCE = 0.1  # of the expected frequency, relative


class Statistics:
    """
    Since the activation: warm-up is not in it. Images come from one thread and answers from several.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._stamps: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._steps: deque[float] = deque(maxlen=_RATE_WINDOW)  # s, between ticks of one episode
        self._newest = 0, 0  # episode and stamp [ns] of the newest tick
        self._latencies: deque[float] = deque(maxlen=_LATENCY_WINDOW)
        self._delay = 0.0
        self._age = self._oldest = 0.0
        self._predicted: deque[float] = deque()  # s, of the last _PREDICTIONS_SETTLED
        self._first: float | None = None  # s, receipt of the first tick
        self.predictions = 0
        self.counts = Counts()
        self.dropped = 0

    def image(self, observation: Observation, delay: float) -> None:
        """Count a tick; `delay`: its age on receipt by ROS time [s]."""
        with self._lock:
            self._first = observation.received if self._first is None else self._first
            self._received.append(observation.received)
            self._stamps.append(observation.stamp * 1e-9)
            self._delay = delay
            (episode, stamp), self._newest = self._newest, (observation.episode, observation.stamp)
            if episode == observation.episode:
                self._steps.append((observation.stamp - stamp) / NS)

    def misfit(self, step_period: float) -> str:
        """Say why the camera's rate of the last seconds does not go with the model, and what to do; '' if it does."""
        with self._lock:
            steps = list(self._steps)
        return misfit(steps, step_period, Policy().command_timeout)

    def answered(self, answer: Answer, age: float) -> None:
        """Count an answer to an observation that was `age` s old by ROS time when it went out."""
        with self._lock:
            self.counts = answer.counts
            if answer.tier is not Tier.NONE and answer.latency:
                self._latencies.append(answer.latency)
                self._age, self._oldest = age, max(self._oldest, age)

    def predicted(self, now: float) -> None:
        """Count a prediction that is published at the steady time `now` [s]."""
        with self._lock:
            self.predictions += 1
            self._predicted.append(now)
            while now - self._predicted[0] >= _PREDICTIONS_SETTLED:
                self._predicted.popleft()

    def few_predictions(self, now: float, fastest: float) -> str:
        """
        Say at which rate predictions come, where that is far below the ticks'; '' if it is not.

        `fastest`: the rate that the machine could keep up with, by its measured times [Hz].
        """
        with self._lock:
            ticks, predictions = _rate([*self._received, now]), self._prediction_rate(now)
            settled = self._first is not None and now - self._first > _PREDICTIONS_SETTLED
        if not settled or predictions >= _FEW_PREDICTIONS * ticks:
            return ''
        return (f'predictions come at {predictions:.1f} Hz, ticks at {ticks:.1f} Hz: this machine has time for '
                f'{fastest:.1f} Hz by its measured step times; take a faster one, a smaller model or a lower load')

    def _prediction_rate(self, now: float) -> float:
        recent = [at for at in self._predicted if now - at < _PREDICTIONS_SETTLED]
        since = now - _PREDICTIONS_SETTLED if self._first is None else max(self._first, now - _PREDICTIONS_SETTLED)
        return len(recent) / (now - since) if now > since else 0.0

    def values(self, now: float, step_period: float) -> dict[str, Any]:
        """
        Return the key-value pairs of a report at the steady time `now` [s]; the largest age begins anew.
        """
        with self._lock:
            counts = self.counts
            p50, p99, largest = (np.percentile(self._latencies, (50, 99, 100)) * 1e3 if self._latencies
                                 else (0.0, 0.0, 0.0))
            values = {
                'frame_rate_node': _rate([*self._received, now]), 'frame_rate_msg': _rate(self._stamps),
                'current_delay_from_realtime_ms': self._delay * 1e3, 'expected_frequency': 1.0 / step_period,
                'tolerance': _RATE_TOLERANCE, 'deadline_miss_count': counts.late,
                'latency_p50_ms': float(p50), 'latency_p99_ms': float(p99), 'latency_max_ms': float(largest),
                'observation_age_ms': self._age * 1e3,
                'observation_age_max_ms': self._oldest * 1e3, 'two_step': counts.two_step,
                'one_step': counts.one_step, 'smaller': counts.smaller, 'plan_only': counts.plan_only,
                'last_plan': counts.last_plan, 'stop': counts.stop, 'predictions': self.predictions,
                'predictions_rate': self._prediction_rate(now),
                'dropped_images': self.dropped}
            self._oldest = 0.0
            return values


def _rate(times: Sequence[float]) -> float:
    """Return the mean rate of events [Hz] at `times` [s]."""
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0.0 else 0.0


def judge(engine: Any, activation: 'Activation') -> tuple[bytes, str]:
    """Return level and message of a diagnostic_msgs/DiagnosticStatus: what stops the robot, else all that is amiss."""
    if activation.missing_input:
        return ERROR, activation.missing_input
    warnings = []
    if activation.worker.degraded_reason:
        warnings.append(f'driving with the own model: {activation.worker.degraded_reason}')
    if engine.degraded_reason:
        warnings.append(f'the model is being restored: {engine.degraded_reason}')
    if unheard := activation.executed.degraded_reason(time.monotonic()):
        warnings.append(unheard)
    if misfit := activation.statistics.misfit(engine.spec.step_period):
        warnings.append(misfit)
    if few := activation.statistics.few_predictions(
            time.monotonic(), engine.step_times.prediction_rate(engine.spec.step_period)):
        warnings.append(few)
    if activation.responder.best is not Tier.TWO_STEP:
        warnings.append(f'degraded to {activation.responder.best.name.lower()}')
    if warnings:
        return WARN, '; '.join(warnings)
    return OK, f'driving to {activation.intake.goal}' if activation.intake.goal else 'no goal'

"""What the world model node measures of itself and its camera, as it reports it on /diagnostics."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel_ros.engine.answers import Answer, Observation
from worldmodel_ros.engine.ladder import Counts, Tier
from worldmodel_ros.inputs.ticks import NS, misfit
from worldmodel_ros.safety.gate import Policy

_RATE_WINDOW = 30  # images
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
        self.counts = Counts()
        self.dropped = 0

    def image(self, observation: Observation, delay: float) -> None:
        """Count a tick; `delay`: its age on receipt by ROS time [s]."""
        with self._lock:
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
                'one_step': counts.one_step, 'smaller': counts.smaller, 'replan': counts.replan, 'stop': counts.stop,
                'dropped_images': self.dropped}
            self._oldest = 0.0
            return values


def _rate(times: Sequence[float]) -> float:
    """Return the mean rate of events [Hz] at `times` [s]."""
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0.0 else 0.0

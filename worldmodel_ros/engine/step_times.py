"""Measured times of the work of a tick, and the finish they predict."""
from __future__ import annotations

from collections import deque

import numpy as np

# What is promised must hold nearly always, so a prediction is a high quantile of what was measured.
QUANTILE = 0.95
HISTORY = 200


class StepTimes:
    """Last durations (s) of each part: encode, commit, policy, denoise (one step), decode."""

    def __init__(self):
        self._times: dict[str, deque[float]] = {}
        self._quantiles: dict[str, float] = {}

    def record(self, part: str, seconds: float) -> None:
        self._times.setdefault(part, deque(maxlen=HISTORY)).append(seconds)
        self._quantiles.pop(part, None)

    def quantile(self, part: str) -> float:
        """High quantile (s) of a part; 0.0 when it was never measured."""
        if part not in self._quantiles:
            times = self._times.get(part)
            self._quantiles[part] = float(np.quantile(times, QUANTILE)) if times else 0.0
        return self._quantiles[part]

    def predict(self, steps: int) -> float:
        """Time (s) from a frame at hand to its plan, checked by an imagined chunk of ``steps`` steps."""
        return (self.quantile('encode') + self.quantile('commit') + self.quantile('policy')
                + steps * self.quantile('denoise'))

    def unit(self) -> float:
        """Time (s) of the longest single network call: the quantum that cannot be interrupted."""
        return max((self.quantile(part) for part in self._times), default=0.0)

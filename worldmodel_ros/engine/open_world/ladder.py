"""Chooses a prediction's quality by its deadline: all steps, fewer steps, a smaller model; below that, older predictions."""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

_RECENT = 8  # measured times kept per rung
_AGAIN = 32  # predictions after which the times of a rung that was not taken are dropped, so that it is tried again


@dataclass(frozen=True)
class Rung:
    """Denoising ``steps`` of the model or of the ``smaller`` one; ``whole``: as many as it is published with."""

    steps: int
    whole: bool
    smaller: bool = False


class Ladder:
    """The rungs, best first, and how long a chunk takes on each. ``steps``: of the model; ``smaller_steps``: of the smaller
    one, if any."""

    def __init__(self, steps: int, smaller_steps: int | None = None):
        self.rungs = [rung for count, smaller in ((steps, False), (smaller_steps, True)) if count
                      for rung in (Rung(count, True, smaller), *([Rung(count // 2, False, smaller)] if count > 1 else []))]
        self._times: dict[Rung, deque[float]] = {rung: deque(maxlen=_RECENT) for rung in self.rungs}
        self._passed_over = dict.fromkeys(self.rungs, 0)
        self._ran: set[Rung] = set()

    def expected(self, rung: Rung) -> float:
        """Return the expected time of a chunk [s]: a high percentile of the measured ones, or an estimate from another number
        of steps of the same model; 0 where nothing is known."""
        if self._times[rung]:
            return float(np.percentile(self._times[rung], 90))
        same = [other for other in self.rungs if other.smaller == rung.smaller and self._times[other]]
        # Plus one for the pass that commits.
        return max((self.expected(other) * (rung.steps + 1) / (other.steps + 1) for other in same), default=0.0)

    def choose(self, seconds: float, chunks: int, smaller: bool | None = None) -> tuple[Rung, float]:
        """Return the best rung on which ``chunks`` are expected to take at most ``seconds``, or else the last one, and their
        expected time [s]. ``smaller``: restricts to rungs of one model."""
        rungs = [rung for rung in self.rungs if smaller in (None, rung.smaller)]
        chosen = next((rung for rung in rungs if chunks * self.expected(rung) <= seconds), rungs[-1])
        for rung in rungs[:rungs.index(chosen)]:
            self._passed_over[rung] += 1
            if self._passed_over[rung] >= _AGAIN:
                self._passed_over[rung] = 0
                self._times[rung].clear()
        return chosen, chunks * self.expected(chosen)

    def took(self, rung: Rung, seconds: float, chunks: int) -> None:
        """Record how long chunks took; not those that a rung took first, which include compilation and a graph's capture."""
        if rung not in self._ran:
            self._ran.add(rung)
        elif chunks > 0 and math.isfinite(seconds):
            self._times[rung].append(seconds / chunks)
            self._passed_over[rung] = 0

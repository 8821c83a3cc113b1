"""Which quality a prediction can have by its deadline: all steps, fewer steps, a smaller model; below that, older ones."""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

_RECENT = 8  # measured times of a rung that count
_AGAIN = 32  # predictions after which the times of a rung that was not taken are forgotten, so that it is tried again


@dataclass(frozen=True)
class Rung:
    """So many denoising ``steps`` of the model or of the ``smaller`` one; ``whole``: as many as it is published with."""

    steps: int
    whole: bool
    smaller: bool = False


class Ladder:
    """The rungs from the best on, and how long a chunk takes on each. ``steps``: of the model, and of the smaller one, if
    there is one."""

    def __init__(self, steps: int, smaller_steps: int | None = None):
        self.rungs = [rung for count, smaller in ((steps, False), (smaller_steps, True)) if count
                      for rung in (Rung(count, True, smaller), *([Rung(count // 2, False, smaller)] if count > 1 else []))]
        self._times: dict[Rung, deque[float]] = {rung: deque(maxlen=_RECENT) for rung in self.rungs}
        self._passed_over = dict.fromkeys(self.rungs, 0)

    def expected(self, rung: Rung) -> float:
        """Seconds of a chunk: the larger ones of those measured, or what another number of steps of the same model makes
        likely; 0 where nothing is known."""
        if self._times[rung]:
            return float(np.percentile(self._times[rung], 90))
        same = [other for other in self.rungs if other.smaller == rung.smaller and self._times[other]]
        # The pass that commits is one more.
        return max((self.expected(other) * (rung.steps + 1) / (other.steps + 1) for other in same), default=0.0)

    def choose(self, seconds: float, chunks: int, smaller: bool | None = None) -> tuple[Rung, float]:
        """The best rung by which so many chunks are expected to be done in time, or else the last one; and how long they are
        expected to take. ``smaller``: of this model alone."""
        rungs = [rung for rung in self.rungs if smaller in (None, rung.smaller)]
        chosen = next((rung for rung in rungs if chunks * self.expected(rung) <= seconds), rungs[-1])
        for rung in rungs[:rungs.index(chosen)]:
            self._passed_over[rung] += 1
            if self._passed_over[rung] >= _AGAIN:
                self._passed_over[rung] = 0
                self._times[rung].clear()
        return chosen, chunks * self.expected(chosen)

    def took(self, rung: Rung, seconds: float, chunks: int) -> None:
        """Note how long chunks took."""
        if chunks > 0 and math.isfinite(seconds):
            self._times[rung].append(seconds / chunks)
            self._passed_over[rung] = 0

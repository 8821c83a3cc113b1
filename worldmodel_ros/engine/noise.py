"""The noise that a session's imagined chunks start from."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

KEPT = 4  # branches of one question start from the same moments
THREADS = 4


class Noise:
    """Standard normal float32 of a shape, by frame number. It belongs to the moment, not to the call: the same session
    sees the same future twice. Drawing it for a large picture takes as long as a large GPU takes for a small batch."""

    def __init__(self, seed: int, shape: tuple[int, ...]):
        self._seed, self._shape = seed, shape
        self._drawn: dict = {}  # promise by moment

    def draw(self, moment: int) -> np.ndarray:
        """Noise of a chunk that begins with frame ``moment``; not to be written to."""
        if moment in self._drawn:
            return self._drawn[moment].result()
        return self._draw(moment)

    def draw_ahead(self, moment: int) -> None:
        """Begins to draw in another thread what `draw` will be asked for, maybe many times."""
        if moment not in self._drawn:
            self._drawn[moment] = _threads().submit(self._draw, moment)
            if len(self._drawn) > KEPT:
                del self._drawn[next(iter(self._drawn))]

    def _draw(self, moment: int) -> np.ndarray:
        bits = np.random.Philox(key=[self._seed, moment])
        return np.random.Generator(bits).standard_normal(self._shape, np.float32)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, 'noise')

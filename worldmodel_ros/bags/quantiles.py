"""Quantiles of any number of values in constant memory."""
from __future__ import annotations

import math

import numpy as np

_RESOLUTION = 0.01           # relative width of a bin
_SMALLEST, _LARGEST = 1e-6, 1e10


class Quantiles:
    """A histogram with logarithmic bins of 1 %, for both signs; values nearer to 0 than 1e-6 count as 0."""

    def __init__(self) -> None:
        bins = math.ceil(math.log(_LARGEST / _SMALLEST) / _RESOLUTION) + 1
        self._positive, self._negative = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
        self._zeros = 0

    def __len__(self) -> int:
        return int(self._positive.sum() + self._negative.sum()) + self._zeros

    def add(self, value: float) -> None:
        """Count a value."""
        if abs(value) < _SMALLEST:
            self._zeros += 1
            return
        side = self._positive if value > 0.0 else self._negative
        side[min(len(side) - 1, int(math.log(abs(value) / _SMALLEST) / _RESOLUTION))] += 1

    def quantile(self, share: float) -> float:
        """Return the quantile ``share``, to 1 %; NaN if there are no values."""
        counts = np.concatenate([self._negative[::-1], [self._zeros], self._positive])
        total = counts.sum()
        if not total:
            return math.nan
        place = int(np.searchsorted(np.cumsum(counts), max(1, math.ceil(share * total))))
        bins = len(self._positive)
        if place == bins:
            return 0.0
        number = place - bins - 1 if place > bins else bins - 1 - place
        size = _SMALLEST * math.exp((number + 0.5) * _RESOLUTION)
        return size if place > bins else -size

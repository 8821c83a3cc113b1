"""Confidence intervals of means over a recording, whose neighbouring windows are much alike.

Windows a tick apart share most of what they saw: taking them for independent would make every interval several
times too narrow. So whole blocks of BLOCK_S are drawn, with replacement, and what is inside a block stays together
(the block bootstrap: Kuensch, "The jackknife and the bootstrap for general stationary observations", Annals of
Statistics 17(3), 1989).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK_S = 2.0      # s; longer than the model's window, and than most of what happens on a recording
LEVEL = 0.95       # probability that an interval holds
RESAMPLES = 2000
DRAWN_AT_ONCE = 2**18  # blocks, whatever the length of the recording
MIN_BLOCKS = 6     # with fewer, there are too few distinct resamples


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` windows in ``blocks`` blocks, with bounds that hold it with probability LEVEL.

    ``low`` and ``high`` are None with fewer than MIN_BLOCKS blocks, ``mean`` too without any value.
    """

    mean: float | None
    low: float | None
    high: float | None
    count: int
    blocks: int

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low is not None and self.low > 0.0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.high is not None and self.high < 0.0

    def to_dict(self) -> dict[str, float | int | None]:
        return {'mean': _rounded(self.mean), 'low': _rounded(self.low), 'high': _rounded(self.high),
                'count': self.count, 'blocks': self.blocks}


def block_labels(episodes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the number of each window's block (by episode, time in s), int (N,); no block spans two episodes."""
    keys = np.stack([np.asarray(episodes, np.int64), np.floor(np.asarray(times) / BLOCK_S).astype(np.int64)], 1)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def mean_interval(values: np.ndarray, blocks: np.ndarray, seed: int = 0) -> Interval:
    """Return the mean of ``values`` (N,) and its interval; ``blocks`` (N,) as from ``block_labels``. NaN: no value there.

    For paired differences, this is the interval of a comparison on the same windows.
    """
    sums, counts = _block_sums(values, blocks)
    total = int(counts.sum())
    if not total:
        return Interval(None, None, None, 0, 0)
    mean = float(sums.sum() / total)
    if len(sums) < MIN_BLOCKS:
        return Interval(mean, None, None, total, len(sums))
    low, high = _bounds(_resampled_means(sums, counts, np.random.default_rng(seed)))
    return Interval(mean, low, high, total, len(sums))


def difference_interval(a: np.ndarray, blocks_a: np.ndarray, b: np.ndarray, blocks_b: np.ndarray,
                        seed: int = 0) -> Interval:
    """Return the mean of ``b`` minus that of ``a``, of two independent recordings, and its interval; arrays as above."""
    (sums_a, counts_a), (sums_b, counts_b) = _block_sums(a, blocks_a), _block_sums(b, blocks_b)
    total, fewest = int(counts_a.sum() + counts_b.sum()), min(len(sums_a), len(sums_b))
    if not fewest:
        return Interval(None, None, None, 0, 0)
    mean = float(sums_b.sum() / counts_b.sum() - sums_a.sum() / counts_a.sum())
    if fewest < MIN_BLOCKS:
        return Interval(mean, None, None, total, fewest)
    rng = np.random.default_rng(seed)
    low, high = _bounds(_resampled_means(sums_b, counts_b, rng) - _resampled_means(sums_a, counts_a, rng))
    return Interval(mean, low, high, total, fewest)


def _block_sums(values: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the values in each block that has any."""
    values, blocks = np.asarray(values, np.float64), np.asarray(blocks)
    there = np.isfinite(values)
    sums = np.bincount(blocks[there], values[there])
    counts = np.bincount(blocks[there])
    return sums[counts > 0], counts[counts > 0]


def _resampled_means(sums: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means (RESAMPLES,) over as many blocks as there are, drawn with replacement."""
    n = len(sums)
    means, at_once = np.empty(RESAMPLES), max(1, DRAWN_AT_ONCE // n)
    for first in range(0, RESAMPLES, at_once):
        drawn = rng.integers(n, size=(min(at_once, RESAMPLES - first), n))
        means[first:first + at_once] = sums[drawn].sum(1) / counts[drawn].sum(1)
    return means


def _bounds(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    return float(low), float(high)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

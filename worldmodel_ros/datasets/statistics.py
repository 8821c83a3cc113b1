"""The statistics of a LeRobot dataset, accumulated frame by frame."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_QUANTILES = {'q01': 0.01, 'q10': 0.10, 'q50': 0.50, 'q90': 0.90, 'q99': 0.99}


class Statistics:
    """
    Minimum, maximum, mean, standard deviation and quantiles of each feature, in LeRobot's shapes.

    Those of images are exact, too, from a histogram of the 256 values of each channel; in [0, 1], (3, 1, 1).
    """

    def __init__(self, camera: str) -> None:
        """``camera``: feature name of the images."""
        self._camera = camera
        self._images = 0
        self._histogram = np.zeros((3, 256), np.int64)
        self._vectors: dict[str, list[np.ndarray]] = {}

    def add(self, image: np.ndarray, values: Mapping[str, Any]) -> None:
        """Add a frame: its image, uint8 (H, W, 3), and its other features."""
        self._images += 1
        self._histogram += [np.bincount(image[..., c].ravel(), minlength=256) for c in range(3)]
        for name, value in values.items():
            self._vectors.setdefault(name, []).append(np.atleast_2d(np.float64(value)))

    def merge(self, other: Statistics) -> None:
        """Add all frames of ``other``."""
        self._images += other._images
        self._histogram += other._histogram
        for name, rows in other._vectors.items():
            self._vectors.setdefault(name, []).append(np.concatenate(rows))

    def values(self) -> dict[str, dict[str, list]]:
        """Return the statistics by feature and name, ready for JSON."""
        result = {self._camera: self._of_images()}
        for name, rows in self._vectors.items():
            x = np.concatenate(rows)
            result[name] = {
                'min': x.min(0).tolist(), 'max': x.max(0).tolist(), 'mean': x.mean(0).tolist(),
                'std': x.std(0).tolist(), 'count': [len(x)],
                **{key: np.quantile(x, q, axis=0).tolist() for key, q in _QUANTILES.items()}}
        return result

    def _of_images(self) -> dict[str, list]:
        levels = np.arange(256) / 255.0
        share = self._histogram / self._histogram.sum(1, keepdims=True)
        mean = share @ levels
        cumulative = share.cumsum(1)
        found = {'min': [levels[h > 0][0] for h in self._histogram],
                 'max': [levels[h > 0][-1] for h in self._histogram], 'mean': mean,
                 'std': np.sqrt((share * (levels - mean[:, None]) ** 2).sum(1)),
                 **{key: [levels[min(255, np.searchsorted(c, q))] for c in cumulative]
                    for key, q in _QUANTILES.items()}}
        return {**{key: np.reshape(value, (3, 1, 1)).tolist() for key, value in found.items()},
                'count': [self._images]}

"""Batch durations, drawn from measured quantiles."""
from __future__ import annotations

import json
import random
from bisect import bisect_left
from pathlib import Path

import numpy as np

LEVELS = (0.0, 0.5, 0.95, 0.99, 1.0)

# Placeholder, not measured: affine in the batch size, like a network that fills the GPU.
PLACEHOLDER = {
    'machine': 'NOT MEASURED', 'preset': 'base and small', 'padded': True, 'measured': False,
    'rows': [{'network': network, 'batch': batch, 'samples': 0, 'p50_ms': fixed + each * batch,
              'p95_ms': 1.03 * (fixed + each * batch), 'p99_ms': 1.08 * (fixed + each * batch)}
             for network, fixed, each in (
                 ('base/observe', 1.0, 0.7), ('base/denoise', 1.0, 1.1), ('base/decode', 0.6, 0.9),
                 ('small/observe', 0.5, 0.06), ('small/denoise', 0.5, 0.09), ('small/decode', 0.3, 0.12))
             for batch in (1, 2, 4, 8, 16, 32)]}


def read_tables(paths: list[Path]) -> list[dict]:
    """Read step tables; the placeholder if there are none. Raises ValueError if a network is missing."""
    tables = [json.loads(path.read_text()) for path in paths] or [PLACEHOLDER]
    networks = {row['network'] for table in tables for row in table['rows']}
    missing = {'base/observe', 'base/denoise'} - networks
    if missing:
        raise ValueError(f'{", ".join(map(str, paths))}: no rows of {", ".join(sorted(missing))}; a step table of the '
                         f'base preset is needed, and one of the small preset for the tier of the smaller model')
    return tables


class Durations:
    """
    Durations [s] by network and batch size: piecewise linear between the measured quantiles, from as far below the
    median as the 95 % quantile is above it, to as far above the 99 % quantile as that is above the median.
    """

    def __init__(self, tables: list[dict], rng: random.Random) -> None:
        self._rng = rng
        self._padded = any(table.get('padded', False) for table in tables)
        self._rows: dict[str, dict[int, np.ndarray]] = {}
        for row in (row for table in tables for row in table['rows']):
            p50, p95, p99 = (row[name] / 1e3 for name in ('p50_ms', 'p95_ms', 'p99_ms'))
            times = np.array([max(0.5 * p50, 2.0 * p50 - p95), p50, p95, p99, 2.0 * p99 - p50])
            self._rows.setdefault(row['network'], {})[row['batch']] = times
        self._cached: dict[tuple[str, int], list[float]] = {}

    def draw(self, network: str, batch: int) -> float:
        """Return the duration of one batch [s]."""
        times = self._cached.get((network, batch))
        if times is None:
            times = self._cached[network, batch] = self._times(network, batch).tolist()
        u = self._rng.random()
        k = bisect_left(LEVELS, u, 1, len(LEVELS) - 1)
        share = (u - LEVELS[k - 1]) / (LEVELS[k] - LEVELS[k - 1])
        return times[k - 1] + share * (times[k] - times[k - 1])

    def _times(self, network: str, batch: int) -> np.ndarray:
        rows = self._rows[network]
        sizes = sorted(rows)
        index = bisect_left(sizes, batch)
        after = sizes[index]
        if after == batch or self._padded or index == 0:
            return rows[after]
        before = sizes[index - 1]
        share = (batch - before) / (after - before)
        return (1.0 - share) * rows[before] + share * rows[after]

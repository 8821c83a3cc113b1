"""Counts of the ticks of one GPU, or of a fleet, by outcome."""
from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

BIN = 0.25  # s, for outcomes over time


@dataclass
class Tally:
    """
    Ticks by outcome: met, late, given_up, superseded, lost, refused. ``tiers``: of those met or late. ``latencies`` [s]:
    from the camera's stamp to the command, of those. ``promised`` [s]: by how much ticks ended after the time expected
    at admission. ``bad`` and ``all``: ticks over time, by bins of BIN. ``busy``: seconds of device time by kind.
    ``warm`` [s]: from a move to a full window. ``device_seconds``: total available.
    """

    outcomes: Counter = field(default_factory=Counter)
    tiers: Counter = field(default_factory=Counter)
    latencies: array = field(default_factory=lambda: array('f'))
    promised: array = field(default_factory=lambda: array('f'))
    bad: Counter = field(default_factory=Counter)
    all: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    batches: Counter = field(default_factory=Counter)
    pictures: int = 0
    warm: list[float] = field(default_factory=list)
    device_seconds: float = 0.0

    def tick(self, outcome: str, stamp: float) -> None:
        """Count a tick by its outcome."""
        self.outcomes[outcome] += 1
        self.all[int(stamp / BIN)] += 1
        self.bad[int(stamp / BIN)] += outcome != 'met'

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name in ('outcomes', 'tiers', 'bad', 'all', 'busy', 'batches'):
            getattr(self, name).update(getattr(other, name))
        self.latencies.extend(other.latencies)
        self.promised.extend(other.promised)
        self.warm.extend(other.warm)
        self.pictures += other.pictures
        self.device_seconds += other.device_seconds

    def row(self) -> dict:
        """Return the numbers as JSON values."""
        ticks = max(1, self.outcomes.total())
        late = sum(self.outcomes[name] for name in ('late', 'given_up', 'superseded', 'lost'))
        answered = max(1, self.tiers.total())
        ms = np.asarray(self.latencies) * 1e3
        quantiles = {f'p{q}_ms': round(float(np.percentile(ms, q)), 2) if len(ms) else None for q in (50, 99)}
        batches = max(1, self.batches.total())
        row = {'ticks': self.outcomes.total(), 'late_ratio': late / ticks,
               'refused_ratio': self.outcomes['refused'] / ticks,
               'outcomes': dict(sorted(self.outcomes.items())),
               'tiers': {name: round(count / answered, 5) for name, count in sorted(self.tiers.items())}, **quantiles,
               'utilisation': round(self.busy.total() / self.device_seconds, 4),
               'utilisation_ticks': round(self.busy['TICK'] / self.device_seconds, 4),
               'mean_batch': round(sum(size * count for size, count in self.batches.items()) / batches, 2),
               'pictures_ratio': round(self.pictures / answered, 4)}
        if self.promised:
            error = np.asarray(self.promised) * 1e3
            row['after_expected_ms'] = {f'p{q}': round(float(np.percentile(error, q)), 2) for q in (5, 50, 95)}
        if self.warm:
            row['warm_again_s'] = {f'p{q}': round(float(np.percentile(self.warm, q)), 3) for q in (50, 99)}
        return row

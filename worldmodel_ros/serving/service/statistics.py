"""Counters of the service."""
from __future__ import annotations

from collections import Counter, deque

import numpy as np

from worldmodel_ros.control.ladder import MODEL_TIERS, Tier

HISTORY = 10_000  # ticks whose prediction errors are kept


class Statistics:
    """Counts since the start. Used by the service under its lock."""

    def __init__(self) -> None:
        self.counts = Counter()
        self._tiers = Counter()
        self._errors: deque[float] = deque(maxlen=HISTORY)
        self._batch_errors: deque[float] = deque(maxlen=HISTORY)

    def replied(self, tier: Tier) -> None:
        self.counts['ticks'] += 1
        self._tiers[tier] += 1

    def predicted(self, arrival: float, predicted: float, finish: float) -> None:
        """Compare the finish of a tick with the one predicted at its arrival."""
        self._errors.append(abs(finish - predicted) / max(predicted - arrival, 1e-6))

    def batch_took(self, seconds: float, expected: float) -> None:
        """Compare the duration of a batch with the step table's."""
        self._batch_errors.append(abs(seconds - expected) / expected)

    def summary(self) -> dict:
        """Return everything as JSON values. Errors are relative to the predicted time: ``prediction_error`` at a tick's
        arrival, for ticks that kept their tier (the others are ``lowered``, mostly to let another robot in, and are done
        sooner), ``step_time_error`` at the beginning of a batch."""
        counts = {name: self.counts[name] for name in (
            'ticks', 'late', 'attempted', 'attempted_late', 'failed', 'refused_at_arrival', 'over_rate', 'due_too_soon',
            'given_up', 'stale_dropped', 'frames_taken_in_later', 'lowered', 'phase_shifts_offered',
            'phase_shifts_taken')}
        tiers = {tier.name: self._tiers[tier] for tier in MODEL_TIERS} | {'REFUSED': self._tiers[Tier.NONE]}
        return {**counts, 'tiers': tiers,
                'prediction_error': _quantiles(self._errors), 'step_time_error': _quantiles(self._batch_errors),
                'what_if': {name: self.counts[f'what_if_{name}']
                            for name in ('complete', 'incomplete', 'failed', 'over_rate')}}


def _quantiles(errors: deque[float]) -> dict[str, float] | None:
    return {f'p{level}': round(float(np.quantile(errors, level / 100)), 4) for level in (50, 95)} if errors else None

"""Where the model was wrong: moments of a recording at which it had predicted something else.

The surprise of an image is how much worse it was predicted, one step before, than the autoencoder alone reconstructs
it [dB]. What the autoencoder cannot reconstruct is no surprise, and neither is a robot that stands still.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

THRESHOLD = 3.5   # "modified z-score" above which a value is an outlier (Iglewicz and Hoaglin, 1993)
GAP_S = 1.0       # windows closer together are one moment
FEWEST = 3        # moments that are shown of every recording
MIN_SCALE_DB = 0.25  # keeps noise from looking like surprise on a recording with hardly any


@dataclass(frozen=True)
class Moment:
    """From ``start_s`` to ``end_s`` of the recording, worst at ``time_s``; ``peak`` is that window's number, ``score`` its
    z-score.

    ``outlier``: beyond THRESHOLD; else it is only among the worst of a recording without many such.
    """

    start_s: float
    end_s: float
    time_s: float
    peak: int
    score: float
    surprise_db: float
    outlier: bool

    def to_dict(self) -> dict[str, float | int]:
        return {'time_s': round(self.time_s, 3), 'start_s': round(self.start_s, 3), 'end_s': round(self.end_s, 3),
                'window': self.peak, 'z': round(self.score, 2), 'surprise_db': round(self.surprise_db, 2),
                'outlier': self.outlier}


def limit(surprise_db: np.ndarray) -> float:
    """Return the surprise [dB] beyond which a window is an outlier of this recording; needs at least one value."""
    median, scale = _location(surprise_db)
    return median + THRESHOLD * scale


def scores(surprise_db: np.ndarray) -> np.ndarray:
    """Return robust z-scores (N,): distance from the median in scaled median absolute deviations; NaN stays."""
    if not np.isfinite(surprise_db).any():
        return np.full(len(surprise_db), np.nan)
    median, scale = _location(surprise_db)
    return (surprise_db - median) / scale


def _location(surprise_db: np.ndarray) -> tuple[float, float]:
    there = surprise_db[np.isfinite(surprise_db)]
    median = float(np.median(there))
    # 1.4826 scales the deviation to the standard deviation of a normal distribution.
    return median, max(MIN_SCALE_DB, 1.4826 * float(np.median(np.abs(there - median))))


def moments(time_s: np.ndarray, episodes: np.ndarray, surprise_db: np.ndarray, count: int) -> list[Moment]:
    """Return at most ``count`` moments in the order of time: the worst outliers, filled up to FEWEST with the next worst
    windows."""
    z = scores(surprise_db)
    high = np.flatnonzero(z > THRESHOLD)
    apart = (np.diff(time_s[high]) > GAP_S) | (np.diff(episodes[high]) != 0)
    groups = [group for group in np.split(high, np.flatnonzero(apart) + 1) if len(group)]
    found = sorted((_moment(group, time_s, z, surprise_db) for group in groups), key=lambda m: -m.score)[:count]
    for window in np.argsort(-np.where(np.isfinite(z), z, -np.inf), kind='stable'):
        if len(found) >= min(count, FEWEST) or not z[window] > 0.0:
            break
        if all(not m.start_s - GAP_S <= time_s[window] <= m.end_s + GAP_S for m in found):
            found.append(_moment(np.array([window]), time_s, z, surprise_db))
    return sorted(found, key=lambda m: m.time_s)


def _moment(group: np.ndarray, time_s: np.ndarray, z: np.ndarray, surprise_db: np.ndarray) -> Moment:
    peak = int(group[np.argmax(z[group])])
    return Moment(float(time_s[group[0]]), float(time_s[group[-1]]), float(time_s[peak]), peak, float(z[peak]),
                  float(surprise_db[peak]), bool(z[peak] > THRESHOLD))

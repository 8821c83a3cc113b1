"""Bounds on a command and on its rate of change, axis by axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Limits:
    """
    Closed intervals [low, high] for every axis, and how fast each may change.

    `rate` is per second: m/s^2 for a speed in m/s, rad/s for a joint position in rad. `math.inf` leaves an
    axis free.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    rate: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.rate):
            raise ValueError(
                f'limits need one low, high and rate for each axis, got {len(self.low)}, {len(self.high)} '
                f'and {len(self.rate)}')
        for axis, (low, high, rate) in enumerate(zip(self.low, self.high, self.rate)):
            # Written so that a NaN, for which every comparison is false, is refused too.
            if not low <= high:
                raise ValueError(f'axis {axis}: the low limit {low} must not be above the high limit {high}')
            if not rate > 0.0:
                raise ValueError(f'axis {axis}: the rate limit must be above 0, got {rate}')

    def apply(
        self, target: Sequence[float], previous: Sequence[float] | None, dt: float
    ) -> tuple[tuple[float, ...], bool]:
        """
        Return the admissible command nearest to `target`, and whether it differs from `target`.

        `previous` is the command in force for the last `dt` seconds; None lifts the rate limit. The bounds
        hold always; the rate holds as long as `previous` is within the bounds (it is not after the bounds
        were tightened, and then returning into them goes first). Raises ValueError where `target` or `dt` is
        not finite.
        """
        if not (math.isfinite(dt) and all(map(math.isfinite, target))):
            raise ValueError(f'only finite commands can be limited, got {tuple(target)} with dt {dt}')
        dt = max(dt, 0.0)
        row = []
        for axis, value in enumerate(target):
            if previous is not None:
                reach = self.rate[axis] * dt
                value = min(max(value, previous[axis] - reach), previous[axis] + reach)
            row.append(min(max(value, self.low[axis]), self.high[axis]))
        return tuple(row), any(a != b for a, b in zip(row, target))


@dataclass(frozen=True)
class TwistLimits:
    """Limits of a planar base: m/s, m/s, rad/s (both ways), m/s^2 and rad/s^2 (both ways)."""

    v_min: float
    v_max: float
    w_max: float
    a_max: float
    alpha_max: float

    def __post_init__(self) -> None:
        # A stop must always be an admissible command.
        if not self.v_min <= 0.0 <= self.v_max:
            raise ValueError(f'v_min <= 0 <= v_max must hold, got v_min {self.v_min} and v_max {self.v_max}')
        if not self.w_max >= 0.0:
            raise ValueError(f'w_max must not be negative, got {self.w_max}')
        if not (self.a_max > 0.0 and self.alpha_max > 0.0):
            raise ValueError(f'a_max and alpha_max must be above 0, got {self.a_max} and {self.alpha_max}')

    def axes(self) -> Limits:
        """Return the same limits for the axes (linear.x, angular.z)."""
        return Limits((self.v_min, -self.w_max), (self.v_max, self.w_max), (self.a_max, self.alpha_max))


class LimitedTwist(NamedTuple):
    """An admissible (v, w) in m/s and rad/s, and whether it differs from what was asked for."""

    twist: tuple[float, float]
    limited: bool


class TwistLimiter:
    """Clamps (v, w) to speed limits, and its change to acceleration limits."""

    def __init__(self, limits: TwistLimits) -> None:
        self._axes = limits.axes()

    def limit(
        self, target: Sequence[float], previous: Sequence[float] | None, dt: float
    ) -> LimitedTwist:
        """
        Return the admissible (v, w) nearest to `target`, both in m/s and rad/s.

        `previous` is the (v, w) commanded `dt` seconds ago; see `Limits.apply` for None, precedence and
        errors.
        """
        if len(target) != 2:
            raise ValueError(f'a twist has 2 values (v, w), got {len(target)}')
        row, limited = self._axes.apply(target, previous, dt)
        return LimitedTwist((row[0], row[1]), limited)

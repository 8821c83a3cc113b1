"""What is in force at the robot, and how it is brought to rest, by the kind of command interface."""

import math
from collections.abc import Sequence
from typing import Protocol

from worldmodel_ros.safety.limits import Limits

Row = tuple[float, ...]


class Motion(Protocol):
    """
    The command in force. Times are in seconds on the steady clock.

    `row` is the last command, or None while it is not known. `whole_chunk` tells whether all rows of a chunk
    are sent at once, to be followed in time, or only the first.
    """

    whole_chunk: bool
    row: Row | None
    limits: Limits

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        """Put `rows` in force as far as the limits allow; return what to send, and whether it was limited."""

    def brake(self, now: float, elapsed: float) -> bool:
        """Move `row` towards rest by what the limits allow in `elapsed` s; return whether it is at rest."""

    def halt(self, now: float) -> None:
        """Put `row` at rest at once."""

    def forget(self) -> None:
        """Expect that something else moves the robot from now on."""


class VelocityMotion:
    """Speeds: rest is zero, reached within the acceleration limits. Only the first row of a chunk is sent."""

    whole_chunk = False

    def __init__(self, limits: Limits) -> None:
        if not all(low <= 0.0 <= high for low, high in zip(limits.low, limits.high)):
            raise ValueError(f'speed limits must admit 0, got low {limits.low} and high {limits.high}')
        self.limits = limits
        self._zero: Row = (0.0,) * len(limits.low)
        self.row = self._zero
        self._sent_at = -math.inf

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        # The command will be in force for a step. A longer pause before it does not entitle it to a larger
        # jump.
        row, limited = self.limits.apply(rows[0], self.row, min(now - self._sent_at, step_period))
        self.row, self._sent_at = row, now
        return (row,), limited

    def brake(self, now: float, elapsed: float) -> bool:
        self.row, _ = self.limits.apply(self._zero, self.row, min(elapsed, now - self._sent_at))
        self._sent_at = now
        return not any(self.row)

    def halt(self, now: float) -> None:
        self.row, self._sent_at = self._zero, now

    def forget(self) -> None:
        self.row = self._zero


class PositionMotion:
    """
    Joint positions: rest is to stay where the last command has brought the joint; zero would be a slam.

    With `whole_chunk` (a trajectory that a controller interpolates) that is the point reached by now,
    otherwise the last row. The rate limit counts from there; it cannot hold for the first command after the
    position was unknown.
    """

    def __init__(self, limits: Limits, *, whole_chunk: bool) -> None:
        self.limits = limits
        self.whole_chunk = whole_chunk
        self.row: Row | None = None
        self._plan: tuple[Row, ...] = ()
        self._step_period = 0.0
        self._sent_at = -math.inf

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        start = previous = self._reached(now)
        # A point of a trajectory is reached one step after the one before; a lone row is taken at once.
        elapsed = step_period if self.whole_chunk else min(now - self._sent_at, step_period)
        plan, limited = [], False
        for row in rows:
            previous, changed = self.limits.apply(row, previous, elapsed)
            plan.append(previous)
            limited = limited or changed
        self.row = start if self.whole_chunk and start is not None else plan[0]
        self._plan, self._step_period, self._sent_at = tuple(plan), step_period, now
        return self._plan, limited

    def brake(self, now: float, elapsed: float) -> bool:
        self.halt(now)
        return True

    def halt(self, now: float) -> None:
        self.row = self._reached(now)
        self._plan = ()

    def forget(self) -> None:
        self.row, self._plan = None, ()

    def _reached(self, now: float) -> Row | None:
        if not self._plan or not self.whole_chunk or self.row is None:
            return self.row
        steps = (now - self._sent_at) / self._step_period
        index = int(steps)
        if index >= len(self._plan):
            return self._plan[-1]
        before = self.row if index == 0 else self._plan[index - 1]
        share = steps - index
        return tuple(a + (b - a) * share for a, b in zip(before, self._plan[index]))

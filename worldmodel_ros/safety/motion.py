"""What is in force at the robot, and how it is brought to rest, by the kind of command interface."""

import math
from collections.abc import Sequence
from typing import Protocol

from worldmodel_ros.safety.joints import MeasuredPositions, Row
from worldmodel_ros.safety.limits import Limits

# s, the control period: after a longer pause, a command changes no more than within this time.
INTERVAL = 0.1
_ASTRAY = 2.0  # intervals at full rate, that a joint may be from where the commands have brought it


class Motion(Protocol):
    """
    The command in force. Times are in seconds on the steady clock, the gate's own.

    `row` is the last command, or None while it is not known. `whole_chunk` tells whether all rows of a chunk
    are sent at once, to be followed in time, or only the first. The rates of `limits` count the time since the last
    command, but no more than `interval`.
    """

    whole_chunk: bool
    row: Row | None
    limits: Limits
    interval: float

    def unready(self, step_period: float, now: float) -> str:
        """Return why no command can be followed now, with the remedy; '' if one can."""

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

    def __init__(self, limits: Limits, interval: float = INTERVAL) -> None:
        if not all(low <= 0.0 <= high for low, high in zip(limits.low, limits.high)):
            raise ValueError(f'speed limits must admit 0, got low {limits.low} and high {limits.high}')
        self.limits = limits
        self.interval = interval
        self._zero: Row = (0.0,) * len(limits.low)
        self.row = self._zero
        self._sent_at = -math.inf

    def unready(self, step_period: float, now: float) -> str:
        return ''

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        row, limited = self.limits.apply(rows[0], self.row, min(now - self._sent_at, self.interval))
        self.row, self._sent_at = row, now
        return (row,), limited

    def brake(self, now: float, elapsed: float) -> bool:
        self.row, _ = self.limits.apply(
            self._zero, self.row, min(elapsed, now - self._sent_at, self.interval))
        self._sent_at = now
        return not any(self.row)

    def halt(self, now: float) -> None:
        self.row, self._sent_at = self._zero, now

    def forget(self) -> None:
        self.row = self._zero


class PositionMotion:
    """
    Joint positions: rest is to stay where the last command has brought the joint; zero would be a slam.

    Nothing moves from a position that is not measured: without fresh `joints` no command is followed. Each one is
    limited from where the joint really is, the first after silence too. A lone row may lead the joint by what it
    moves in one `interval`, and differs from the row before by what the time since then allows. Of a trajectory
    (`whole_chunk`), which a controller interpolates, the first point is due one step from now and limited from the
    measured position by one step, each further point from the one before.
    """

    def __init__(
        self, limits: Limits, joints: MeasuredPositions, *, whole_chunk: bool, interval: float = INTERVAL
    ) -> None:
        self.limits = limits
        self.joints = joints
        self.whole_chunk = whole_chunk
        self.interval = interval
        self.row: Row | None = None
        self._plan: tuple[Row, ...] = ()
        self._step_period = 0.0
        self._sent_at = -math.inf

    def unready(self, step_period: float, now: float) -> str:
        if reason := self.joints.unknown(now):
            return reason
        limits, commanded = self.limits, self._reached(now)
        first_step = step_period if self.whole_chunk else self.interval
        for axis, (name, at) in enumerate(zip(self.joints.names, self.joints.row(now))):
            low, high, rate = limits.low[axis], limits.high[axis], limits.rate[axis]
            if max(low - at, at - high) > rate * first_step:
                return (f'{name} is measured at {at:.4g}, out of its limits {low:g} to {high:g} and further than it may '
                        'go at once: move it back by other means, or correct joint_low and joint_high')
            if commanded is not None and abs(at - commanded[axis]) > _ASTRAY * rate * self.interval:
                return (f'{name} is measured at {at:.4g}, but the commands have brought it to {commanded[axis]:.4g}: it '
                        'is blocked, moved by something else, or not the joint that is measured')
        return ''

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        """Raises ValueError where the joints are not known (see `unready`)."""
        measured = self.joints.row(now)
        if self.whole_chunk:
            plan, previous = [], measured
            for row in rows:
                previous, _ = self.limits.apply(row, previous, step_period)
                plan.append(previous)
            self.row = measured
        else:
            row, _ = self.limits.apply(rows[0], measured, self.interval)
            if self.row is not None:
                row, _ = self.limits.apply(row, self.row, min(now - self._sent_at, self.interval))
            plan, self.row = [row], row
        self._plan, self._step_period, self._sent_at = tuple(plan), step_period, now
        return self._plan, any(sent != asked for sent, asked in zip(self._plan, rows))

    def brake(self, now: float, elapsed: float) -> bool:
        self.halt(now)
        return True

    def halt(self, now: float) -> None:
        row = self._reached(now)
        if row is not None and self.whole_chunk and not self.joints.unknown(now):
            # Sent as a point that is due one step from now: where the joint has not followed, it must not be hurled.
            row, _ = self.limits.apply(row, self.joints.row(now), self._step_period)
        self.row, self._plan = row, ()

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

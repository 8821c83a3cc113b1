"""The command in force at the robot, its limits, and how the robot is brought to rest, by kind of command interface."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Row = tuple[float, ...]
# s, the control period: after a longer pause, a command changes by no more than it may within this time.
INTERVAL = 0.1
FEW = 100  # silences remembered between two reports
_ASTRAY = 2.0  # intervals at full rate: how far a joint may be from where the commands have brought it


@dataclass(frozen=True)
class Limits:
    """
    Closed intervals [low, high] for every axis, and how fast each axis may change.

    ``rate`` is per second: m/s^2 for a speed in m/s, rad/s for a joint position in rad. ``math.inf`` leaves an
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
            # Written so that a NaN, for which every comparison is false, is also refused.
            if not low <= high:
                raise ValueError(f'axis {axis}: the low limit {low} must not be above the high limit {high}')
            if not rate > 0.0:
                raise ValueError(f'axis {axis}: the rate limit must be above 0, got {rate}')

    def apply(
        self, target: Sequence[float], previous: Sequence[float] | None, dt: float
    ) -> tuple[tuple[float, ...], bool]:
        """
        Return the admissible command nearest to ``target``, and whether it differs from ``target``.

        ``previous`` is the command in force for the last ``dt`` seconds; None lifts the rate limit. The bounds
        always hold; the rate holds as long as ``previous`` is within the bounds (if they were tightened since,
        returning into them takes precedence). Raises ValueError if ``target`` or ``dt`` is not finite.
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
        """Return the same limits as ``Limits`` of the axes (linear.x, angular.z)."""
        return Limits((self.v_min, -self.w_max), (self.v_max, self.w_max), (self.a_max, self.alpha_max))


class LimitedTwist(NamedTuple):
    """An admissible (v, w) in m/s and rad/s, and whether it differs from the requested one."""

    twist: tuple[float, float]
    limited: bool


class TwistLimiter:
    """Clamps (v, w) to speed limits, and its changes to acceleration limits."""

    def __init__(self, limits: TwistLimits) -> None:
        self._axes = limits.axes()

    def limit(
        self, target: Sequence[float], previous: Sequence[float] | None, dt: float
    ) -> LimitedTwist:
        """
        Return the admissible (v, w) nearest to ``target``, both in m/s and rad/s.

        ``previous`` is the (v, w) commanded ``dt`` seconds ago; see ``Limits.apply`` for None, precedence and
        errors.
        """
        if len(target) != 2:
            raise ValueError(f'a twist has 2 values (v, w), got {len(target)}')
        row, limited = self._axes.apply(target, previous, dt)
        return LimitedTwist((row[0], row[1]), limited)


class MeasuredPositions:
    """
    Positions of the joints ``names`` [rad or m], each valid for ``timeout`` s (steady clock) after it was received.

    Other joints on the same topic are ignored, and those of one robot may come in several messages.
    """

    def __init__(self, names: Sequence[str], timeout: float = 0.2) -> None:
        self.names = tuple(names)
        self.timeout = timeout
        self._heard: dict[str, tuple[float, float]] = {}  # name to position and time

    def hear(self, names: Sequence[str], positions: Sequence[float], now: float) -> str:
        """Take a measurement of some joints; return why it is refused, or ''. A refused one changes nothing."""
        if not positions:
            return ''  # of speeds or efforts only
        if len(names) != len(positions):
            return f'joint_states has {len(positions)} positions for {len(names)} names'
        heard = {name: (at, now) for name, at in zip(names, positions) if name in self.names}
        for name, (at, _) in heard.items():
            if not math.isfinite(at):
                return f'joint_states has {name} at {at}'
        self._heard.update(heard)
        return ''

    def unknown(self, now: float) -> str:
        """Return which joint's position is unknown, since when, and the remedy; '' if all are known."""
        for name in self.names:
            _, heard_at = self._heard.get(name, (0.0, -math.inf))
            if not now - heard_at <= self.timeout:
                since = 'never was' if math.isinf(heard_at) else f'was last heard {now - heard_at:.3f} s ago'
                return (f'the position of {name} {since} on joint_states, and nothing moves from a position that is not '
                        f'known: start the joint_state_broadcaster, or remap joint_states (joint_state_timeout_s is '
                        f'{self.timeout:g})')
        return ''

    def row(self, now: float) -> Row:
        """Return the positions in the order of ``names``. Raises ValueError if one is unknown."""
        if reason := self.unknown(now):
            raise ValueError(reason)
        return tuple(self._heard[name][0] for name in self.names)


class Motion(Protocol):
    """
    The command in force. Times are in seconds on the steady clock, the gate's own.

    ``row`` is the last command, or None while it is unknown. ``whole_chunk`` tells whether all rows of a chunk are
    sent at once, to be followed over time, or only the first. The rates of ``limits`` apply to the time since the last
    command, but to no more than ``interval``.
    """

    whole_chunk: bool
    row: Row | None
    limits: Limits
    interval: float

    def unready(self, step_period: float, now: float) -> str:
        """Return why no command can be followed now, with the remedy; '' if one can."""

    def follow(self, rows: Sequence[Row], step_period: float, now: float) -> tuple[tuple[Row, ...], bool]:
        """Put ``rows`` in force as far as the limits allow; return what to send, and whether it was limited."""

    def brake(self, now: float, elapsed: float) -> bool:
        """Move ``row`` towards rest by as much as the limits allow in ``elapsed`` s; return whether it is at rest."""

    def halt(self, now: float) -> None:
        """Put ``row`` at rest at once."""

    def forget(self) -> None:
        """Assume that something else moves the robot from now on."""


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
    Joint positions: rest is to stay where the last command has brought the joint; going to zero would be a slam.

    Nothing moves from an unmeasured position: without fresh ``joints`` no command is followed. Each command is limited
    relative to the measured position, also the first after silence. A single row may lead the joint by what it moves in
    one ``interval``, and differs from the row before by what the time since then allows. The first point of a trajectory
    (``whole_chunk``), which a controller interpolates, is due one step from now and limited to one step from the measured
    position; each further point to one step from the one before.
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
        """Raise ValueError if the joints are unknown (see ``unready``)."""
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
            # Sent as a point due one step from now: a joint that has not followed must not be hurled there.
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


class Silences:
    """
    Records the steady times [s] of silences longer than ``bound()`` s.

    The gate and the robot's driver each report theirs in their diagnostics: so sender and receiver of a stop tell whether
    it was late, and where, and not only third parties that listen.
    """

    def __init__(self, bound: Callable[[], float]) -> None:
        self._bound = bound
        self._begun: float | None = None
        self._found: list[tuple[float, float]] = []

    def begin(self, now: float) -> None:
        """Note a command that moves the robot."""
        self._begun = now

    def end(self, now: float) -> None:
        """Note a command or a stop."""
        begun, self._begun = self._begun, None
        if begun is not None and now - begun > self._bound() and len(self._found) < FEW:
            self._found.append((begun, now))

    def tell(self) -> str:
        """Return 'BEGIN:END ...', steady times [s], of the silences since the last call."""
        found, self._found = self._found, []
        return ' '.join(f'{begun:.6f}:{end:.6f}' for begun, end in found)

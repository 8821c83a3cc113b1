"""Decides which commands of a model reach the robot, and what the robot gets when none does."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from worldmodel_ros.safety.chunk import Chunk, Fault, Order, Refusal, unsound
from worldmodel_ros.safety.joints import Row
from worldmodel_ros.safety.motion import Motion


class State(enum.IntEnum):
    """What the robot gets; the values are those of CommandStatus."""

    PASSING = 0
    HOLDING = 1
    SLOWING = 2
    STOPPED = 3


ACTIONS = ('hold', 'slow', 'stop')


@dataclass(frozen=True)
class Policy:
    """
    The gate's settings. Times in seconds.

    A command passes while its observation is at most `deadline` - `delivery_reserve` old; the reserve is for
    the way to the robot, which must have the command by the deadline. `future_tolerance` admits clocks that
    differ a little. `command_timeout` after the last command passed, the gate acts by `on_timeout`: 'hold'
    leaves the last command in force for `hold` more and then slows, 'slow' brakes within the acceleration
    limits, 'stop' sends zero at once. A stop is repeated for `stop_repeat`. After a stop for a fault, driving
    resumes with the `resume_after`th good command in a row, or only after a reset if that is 0. A chunk's step
    period is admitted from `step_period_min` to `step_period_max`.
    """

    deadline: float = 0.05
    delivery_reserve: float = 0.006
    future_tolerance: float = 0.005
    command_timeout: float = 0.13
    on_timeout: str = 'stop'
    hold: float = 0.2
    stop_repeat: float = 1.0
    resume_after: int = 3
    step_period_min: float = 0.01
    step_period_max: float = 0.5

    def __post_init__(self) -> None:
        if self.on_timeout not in ACTIONS:
            raise ValueError(f'on_timeout is {self.on_timeout!r}, use one of: {", ".join(ACTIONS)}')
        if not 0.0 <= self.delivery_reserve < self.deadline:
            raise ValueError(
                f'delivery_reserve ({self.delivery_reserve} s) must be at least 0 and less than the deadline '
                f'({self.deadline} s), or no command could ever pass')
        if not self.command_timeout > 0.0:
            raise ValueError(
                f'command_timeout must be above 0, got {self.command_timeout}: a gate that never times out '
                'cannot stop the robot')
        if not 0.0 < self.step_period_min <= self.step_period_max:
            raise ValueError(
                f'step_period_min ({self.step_period_min} s) must be above 0 and at most step_period_max '
                f'({self.step_period_max} s), or no command could ever pass')

    @property
    def memory(self) -> float:
        """How long the order of commands is remembered [s]: what is older is late, and the robot is stopped."""
        return max(self.command_timeout, self.deadline + self.future_tolerance)


class Command(NamedTuple):
    """Rows to send, `step_period` s apart. `stamp` (ns) is that of the observation answered; 0 for a stop."""

    rows: tuple[Row, ...]
    step_period: float
    stamp: int


@dataclass
class Counts:
    """Since the start. `passed` includes `limited`; `stops` counts the entries into STOPPED."""

    passed: int = 0
    limited: int = 0
    late: int = 0
    invalid: int = 0
    order: int = 0
    shape: int = 0
    stops: int = 0


class Gate:
    """
    The state machine. `now` is always the steady clock in s; ROS time, `ros_now` in ns, is there to tell the age of
    an observation only. Both are the gate's own: no field of a chunk is trusted.

    `on_chunk` and `on_tick` return what to send to the robot, or None. `on_tick` must be called every few
    milliseconds, whatever else happens: it is the watchdog. Not thread-safe.
    """

    def __init__(self, names: tuple[str, ...], motion: Motion, policy: Policy | None = None) -> None:
        self.names = names
        self.motion = motion
        self.policy = policy or Policy()
        self.counts = Counts()
        self.state = State.STOPPED
        self.reason = 'waiting for the first command'
        self.first_reason = ''
        self.last_passed: Chunk | None = None
        self.last_refusal: Refusal | None = None
        self._order = Order()
        self._faulted = False
        self._good = 0
        self._step_period = 0.0
        self._passed_at = self._good_at = self._entered_at = self._ticked_at = 0.0
        self._cause: Refusal | None = None
        self._heard: tuple[int, float] | None = None
        self._told_to_stop: int | None = None  # ns, ROS time

    def on_chunk(self, chunk: Chunk, ros_now: int, now: float) -> Command | None:
        """Judge a chunk that has come now; return the command to send, if any. A stop is obeyed, whatever else it says."""
        if chunk.stop:
            self._good, self._told_to_stop = 0, ros_now
            return self._asked_to_stop(chunk, now)
        refusal = self._refuse(chunk, ros_now, now)
        if refusal:
            self.refuse(refusal, own=self._order.is_current(chunk.episode_id))
            return None
        self._order.accept(chunk, now)
        if self._faulted and self.state is State.STOPPED and not self._resumes(now):
            return None
        return self._pass(chunk, now)

    def refuse(self, refusal: Refusal, *, own: bool = False) -> None:
        """
        Count a refusal. `own`: of the model that drives, whose next command is then the first in a row again.

        What others send does not keep a stopped robot from going on.
        """
        name = refusal.fault.value
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        if own:
            self._good = 0
        self.last_refusal = refusal
        # The first refusal after a good command is the cause of the time-out that may follow.
        self._cause = self._cause or refusal

    def on_tick(self, now: float, ahead: float = 0.0) -> Command | None:
        """
        Watch the time; return the command to send now, if any.

        `ahead` [s]: how long it may be until this is called again, where that is longer than usual. What would be due
        by then is done now.
        """
        elapsed, self._ticked_at = now - self._ticked_at, now
        policy = self.policy
        if self.state is State.PASSING:
            silence = now - self._passed_at
            if silence + ahead < policy.command_timeout:
                return None
            cause = f'last refused: {self._cause.text}' if self._cause else 'none arrived'
            self._fault(f'no command passed for {silence:.3f} s ({cause})')
            if policy.on_timeout == 'stop':
                return self._halt(now)
            self._enter(State.HOLDING if policy.on_timeout == 'hold' else State.SLOWING, now)
        # Nothing is sent while holding: velocity and position interfaces keep their last command by
        # themselves, and repeating it would keep the time-out of the robot's own controller, the last guard,
        # from counting.
        if self.state is State.HOLDING and now - self._entered_at >= policy.hold:
            self._enter(State.SLOWING, now)
        if self.state is State.SLOWING:
            if self.motion.brake(now, elapsed):
                self._enter(State.STOPPED, now)
            return self._in_force()
        if self.repeats_stop(now):
            # A trajectory needs no repetition: it was delivered reliably, and each copy would start it again.
            return None if self.motion.whole_chunk else self._in_force()
        if self.state is State.STOPPED:
            self.motion.forget()
        return None

    def repeats_stop(self, now: float) -> bool:
        """
        Tell whether the gate is standing in the way with its stop.

        A stop is repeated, in case the robot missed it, but not for ever: a person with a joystick must be
        able to drive the robot away, and the robot's own time-out holds it where nobody does.
        """
        recent = now - self._entered_at <= self.policy.stop_repeat
        return self._faulted and self.state is State.STOPPED and recent

    def halt(self, reason: str, now: float) -> Command | None:
        """Stop at once, whatever the policy; return the command, or None where the gate moves nothing."""
        if self.state is State.STOPPED and not self.repeats_stop(now):
            return None
        self._fault(reason)
        return self._halt(now)

    def reset(self) -> None:
        """
        Clear the latched reason and the memory of episodes, and let the next good command pass without a
        debounce.

        Stale commands stay out by their age. Braking that has begun is carried to its end.
        """
        self.first_reason = ''
        self._order = Order()
        if self.state is State.STOPPED:
            self._faulted = False
            self.reason = 'reset, waiting for a command'

    def silence(self, now: float) -> float | None:
        """Return the time since the last command passed (s), or None before the first."""
        return None if self.last_passed is None else now - self._passed_at

    def _refuse(self, chunk: Chunk, ros_now: int, now: float) -> Refusal | None:
        policy = self.policy
        if refusal := (unsound(chunk, self.names, (policy.step_period_min, policy.step_period_max))
                       or self._order.refuse(chunk, now, policy.memory)
                       or self._mistimed(chunk, ros_now, now)):
            return refusal
        if reason := self.motion.unready(chunk.step_period, now):
            return Refusal(Fault.INVALID, reason)
        return None

    def _mistimed(self, chunk: Chunk, ros_now: int, now: float) -> Refusal | None:
        policy = self.policy
        age = (ros_now - chunk.stamp) * 1e-9
        if age < -policy.future_tolerance:
            return Refusal(
                Fault.INVALID, f'clock mismatch: the observation is {-age:.3f} s in the future; synchronise '
                'the clocks of the camera and this machine, and give all nodes the same use_sim_time')
        # ROS time may stand still, the steady clock does not: an observation is at least as old as it, or a later one,
        # is known here. Unless ROS time was set back since then.
        heard = self._heard
        if heard is None or chunk.stamp > heard[0] or (heard[0] - ros_now) * 1e-9 > policy.future_tolerance:
            heard = self._heard = (chunk.stamp, now)
        age = max(age, now - heard[1])
        allowed = policy.deadline - policy.delivery_reserve
        if not age <= allowed:
            return Refusal(
                Fault.LATE, f'the observation is {age * 1e3:.1f} ms old, {allowed * 1e3:.1f} ms are allowed')
        return self._overtaken(chunk, ros_now)

    def _overtaken(self, chunk: Chunk, ros_now: int) -> Refusal | None:
        """
        Refuse what was observed before the last stop was asked for, and arrives after it.

        By the time the stop arrived, not by what it says: so a stop holds back what was sent before it, and nothing
        that comes later.
        """
        stop = self._told_to_stop
        if stop is None or not chunk.stamp <= stop <= ros_now:  # ROS time may have been set back since
            return None
        return Refusal(
            Fault.ORDER, f'the observation is {(stop - chunk.stamp) * 1e-9:.3f} s older than the last request to stop')

    def _pass(self, chunk: Chunk, now: float) -> Command:
        rows, limited = self.motion.follow(
            chunk.rows(None if self.motion.whole_chunk else 1), chunk.step_period, now)
        self.counts.passed += 1
        self.counts.limited += limited
        self.last_passed = chunk
        self._passed_at = now
        self._step_period = chunk.step_period
        self._cause = None
        self._faulted = False
        self.reason = ''
        self.state = State.PASSING
        return Command(rows, chunk.step_period, chunk.stamp)

    def _resumes(self, now: float) -> bool:
        in_a_row = now - self._good_at < self.policy.command_timeout
        self._good = self._good + 1 if in_a_row else 1
        self._good_at = now
        return 0 < self.policy.resume_after <= self._good

    def _asked_to_stop(self, chunk: Chunk, now: float) -> Command | None:
        reason = f'model asked to stop: episode {chunk.episode_id}, sequence {chunk.sequence}'
        if self.state in (State.PASSING, State.HOLDING):
            self._fault(reason)
            if self.policy.on_timeout == 'stop':
                return self._halt(now)
            self._enter(State.SLOWING, now)
        elif not self._faulted:
            self.reason = reason
        return None

    def _fault(self, reason: str) -> None:
        self._faulted = True
        self._good = 0
        self.reason = reason
        self.first_reason = self.first_reason or reason

    def _enter(self, state: State, now: float) -> None:
        if state is State.STOPPED and self.state is not State.STOPPED:
            self.counts.stops += 1
        self.state = state
        self._entered_at = now

    def _halt(self, now: float) -> Command | None:
        self.motion.halt(now)
        self._enter(State.STOPPED, now)
        return self._in_force()

    def _in_force(self) -> Command | None:
        if self.motion.row is None:
            return None
        return Command((self.motion.row,), self._step_period, 0)

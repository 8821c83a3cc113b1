"""Decides which of a model's commands reach the robot, and what the robot gets if none does."""

import enum
import math
import reprlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worldmodel_ros.safety.motion import Motion, Row

# Of a chunk. For a trajectory of 7 joints so many rows take 1.3 ms in the gate, in the thread of its watchdog.
MAX_ROWS = 256
_RETIRED = 16  # episodes remembered: more than one robot's models start while one command is fresh
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 16  # joints, of names that a refusal quotes


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    A sequence of actions that answers one observation.

    ``stamp`` is that of the observation (ns, ROS time). ``episode_id`` is an unordered identity; ``sequence`` counts
    within it. ``values`` holds rows of len(names) actions, row-major; the first row is for now, the next for
    ``step_period`` seconds later. ``stop`` makes it a request to stop; all else is then ignored.
    """

    stamp: int
    episode_id: int
    sequence: int
    step_period: float
    names: Sequence[str]
    values: Sequence[float]
    stop: bool = False

    def rows(self, count: int | None = None) -> tuple[tuple[float, ...], ...]:
        """Return the first ``count`` rows (None: all). The chunk must be sound."""
        width = len(self.names)
        rows = len(self.values) // width if count is None else count
        return tuple(tuple(self.values[k * width:(k + 1) * width]) for k in range(rows))


class Fault(enum.Enum):
    """The kinds of refusal."""

    SHAPE = 'shape'
    INVALID = 'invalid'
    ORDER = 'order'
    LATE = 'late'


class Refusal(NamedTuple):
    """Why a chunk is refused; ``text`` says what is wrong and what is allowed."""

    fault: Fault
    text: str


def unsound(chunk: Chunk, names: Sequence[str], step_periods: tuple[float, float]) -> Refusal | None:
    """
    Return why an interface with the axes ``names`` cannot carry out the chunk, or None.

    ``step_periods``: the shortest and the longest allowed [s].
    """
    if len(chunk.names) != len(names) or list(chunk.names) != list(names):
        return Refusal(Fault.SHAPE, f'names are {_SHORT.repr(chunk.names)}, expected {list(names)}')
    if len(chunk.values) > MAX_ROWS * len(names):
        return Refusal(
            Fault.SHAPE, f'{len(chunk.values)} values are more than {MAX_ROWS} rows of {len(names)} '
            f'({", ".join(names)}), the most that is checked in time: send the beginning of the plan only')
    if len(chunk.values) == 0 or len(chunk.values) % len(names):
        return Refusal(
            Fault.SHAPE,
            f'{len(chunk.values)} values are no whole number of rows of {len(names)} ({", ".join(names)})')
    if chunk.stamp <= 0:
        return Refusal(
            Fault.INVALID, f'header.stamp is {chunk.stamp * 1e-9:g} s; it must be the stamp of the observation answered')
    shortest, longest = step_periods
    # Written so that a NaN, for which every comparison is false, is also refused.
    if not shortest <= chunk.step_period <= longest:
        return Refusal(
            Fault.INVALID, f'step_period is {chunk.step_period:g} s, {shortest:g} to {longest:g} s are admitted: send '
            'the period of the model in seconds, or set step_period_min_s and step_period_max_s')
    if not all(map(math.isfinite, chunk.values)):
        index, value = next((k, value) for k, value in enumerate(chunk.values) if not math.isfinite(value))
        row, axis = divmod(index, len(names))
        return Refusal(Fault.INVALID, f'{names[axis]} is {value} in row {row}')
    return None


class Order:
    """
    Lets each chunk through at most once, none after a newer one, and one episode at a time.

    Within an episode, sequence numbers rise and observation stamps do not fall. Another episode takes over with
    its first accepted chunk, and retires the one before. The order is remembered for no longer than ``memory`` s
    (steady clock) after the last accepted chunk: older chunks are refused for their age, and a publisher that claims
    the highest sequence number, or another's episode, cannot block others for longer. ``memory`` must be at least the
    age at which commands are refused.
    """

    def __init__(self) -> None:
        self._last: Chunk | None = None
        self._accepted_at = -math.inf
        self._retired: deque[int] = deque(maxlen=_RETIRED)

    def refuse(self, chunk: Chunk, now: float, memory: float) -> Refusal | None:
        """Return why the chunk is out of order, or None."""
        last = self._last
        if last is None or now - self._accepted_at >= memory:
            return None
        if chunk.episode_id != last.episode_id:
            if chunk.episode_id not in self._retired:
                return None
            return Refusal(
                Fault.ORDER, f'episode {chunk.episode_id} is retired, episode {last.episode_id} is running: '
                'let one model publish at a time')
        if chunk.sequence <= last.sequence:
            return Refusal(Fault.ORDER, f'sequence {chunk.sequence} is not newer than {last.sequence}')
        if chunk.stamp < last.stamp:
            return Refusal(
                Fault.ORDER, f'the observation is {(last.stamp - chunk.stamp) * 1e-9:.3f} s older than the '
                'one answered before: after ROS time was set back, a new episode must begin')
        return None

    def accept(self, chunk: Chunk, now: float) -> None:
        """Record the chunk as the newest."""
        last = self._last
        if last is not None and last.episode_id != chunk.episode_id:
            self._retired.append(last.episode_id)
        if chunk.episode_id in self._retired:
            self._retired.remove(chunk.episode_id)
        self._last, self._accepted_at = chunk, now

    def is_current(self, episode_id: int) -> bool:
        """Return whether the episode is that of the last accepted chunk, or none was accepted yet."""
        return self._last is None or self._last.episode_id == episode_id


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

    A command passes while its observation is at most ``deadline`` - ``delivery_reserve`` old; the reserve is for
    delivery to the robot, which must have the command by the deadline. ``future_tolerance`` allows for clocks that
    differ slightly. ``command_timeout`` after the last command passed, the gate acts by ``on_timeout``: 'hold'
    leaves the last command in force for ``hold`` more and then slows, 'slow' brakes within the acceleration
    limits, 'stop' sends zero at once. A stop is repeated for ``stop_repeat``. After a stop for a fault, motion
    resumes with the ``resume_after``th good command in a row, or only after a reset if that is 0. A chunk's step
    period must be between ``step_period_min`` and ``step_period_max``.
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
        """How long the order of commands is remembered [s]: anything older is late, and the robot is stopped."""
        return max(self.command_timeout, self.deadline + self.future_tolerance)


class Command(NamedTuple):
    """Rows to send, ``step_period`` s apart. ``stamp`` (ns) is that of the observation answered; 0 for a stop."""

    rows: tuple[Row, ...]
    step_period: float
    stamp: int


@dataclass
class Counts:
    """Counts since the start. ``passed`` includes ``limited``; ``stops`` counts the entries into STOPPED."""

    passed: int = 0
    limited: int = 0
    late: int = 0
    invalid: int = 0
    order: int = 0
    shape: int = 0
    stops: int = 0


class Gate:
    """
    The gate's state machine. ``now`` is always the steady clock in s; ROS time, ``ros_now`` in ns, only serves to tell
    the age of an observation. Both are the gate's own: no field of a chunk is trusted.

    ``on_chunk`` and ``on_tick`` return what to send to the robot, or None. ``on_tick`` is the watchdog and must be
    called every few milliseconds, whatever else happens. Not thread-safe.
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
        self._excused = False  # by a reset while braking: the stop is repeated, and the next good command passes
        self._good = 0
        self._step_period = 0.0
        self._passed_at = self._good_at = self._entered_at = self._ticked_at = 0.0
        self._cause: Refusal | None = None
        self._heard: tuple[int, float] | None = None
        self._told_to_stop: int | None = None  # ns, ROS time

    def on_chunk(self, chunk: Chunk, ros_now: int, now: float) -> Command | None:
        """Judge a chunk that has arrived now; return the command to send, if any. A stop is obeyed whatever else it says."""
        if chunk.stop:
            self._good, self._told_to_stop = 0, ros_now
            return self._asked_to_stop(chunk, now)
        refusal = self._refuse(chunk, ros_now, now)
        if refusal:
            self.refuse(refusal, own=self._order.is_current(chunk.episode_id))
            return None
        self._order.accept(chunk, now)
        if self._faulted and not self._excused and self.state is State.STOPPED and not self._resumes(now):
            return None
        return self._pass(chunk, now)

    def refuse(self, refusal: Refusal, *, own: bool = False) -> None:
        """
        Count a refusal. ``own``: of the model in control; its good commands are then counted from zero again.

        Refused chunks of other publishers do not keep a stopped robot from resuming.
        """
        name = refusal.fault.value
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        if own:
            self._good = 0
        self.last_refusal = refusal
        # The first refusal after a good command is the cause of a time-out that may follow.
        self._cause = self._cause or refusal

    def on_tick(self, now: float, ahead: float = 0.0) -> Command | None:
        """
        Check the time-outs; return the command to send now, if any.

        ``ahead`` [s]: how long it may be until the next call, if longer than usual. A time-out due by then is acted on now.
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
        # Nothing is sent while holding: velocity and position interfaces keep their last command by themselves,
        # and repeating it would keep resetting the time-out of the robot's own controller, the last safeguard.
        if self.state is State.HOLDING and now - self._entered_at >= policy.hold:
            self._enter(State.SLOWING, now)
        if self.state is State.SLOWING:
            if self.motion.brake(now, elapsed):
                self._enter(State.STOPPED, now)
            return self._in_force()
        if self.repeats_stop(now):
            # A trajectory is not repeated: it was delivered reliably, and each copy would restart it.
            return None if self.motion.whole_chunk else self._in_force()
        if self.state is State.STOPPED:
            self.motion.forget()
        return None

    def repeats_stop(self, now: float) -> bool:
        """
        Return whether the gate is still repeating its stop.

        A stop is repeated in case the robot missed it, but not for ever: a person with a joystick must be able to
        drive the robot away, and the robot's own time-out holds it otherwise.
        """
        recent = now - self._entered_at <= self.policy.stop_repeat
        return self._faulted and self.state is State.STOPPED and recent

    def halt(self, reason: str, now: float) -> Command | None:
        """Stop at once, whatever the policy; return the command, or None if the gate moves nothing."""
        if self.state is State.STOPPED and not self.repeats_stop(now):
            return None
        self._fault(reason)
        return self._halt(now)

    def reset(self) -> None:
        """
        Clear the latched reason and the memory of episodes, and let the next good command pass without debouncing.

        Stale commands are still refused for their age. Braking in progress is completed.
        """
        self.first_reason = ''
        self._order = Order()
        self._excused = True
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
        # ROS time may stand still, the steady clock does not: an observation is at least as old as the time since it,
        # or a later one, was first heard of here. Unless ROS time was set back since then.
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
        Refuse a chunk that was observed before the last requested stop and arrives after it.

        The stop's arrival time counts, not its stamp: so a stop blocks what was sent before it, and nothing later.
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
        self._faulted, self._excused = True, False
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

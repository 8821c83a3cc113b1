"""The action chunk as plain values, and the checks that need only the chunk and what came before it."""

import enum
import math
import reprlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of a chunk. As a trajectory of 7 joints so many take the gate 1.3 ms, in the thread that its watchdog has too.
MAX_ROWS = 256
_RETIRED = 16  # episodes that are remembered: more than one robot's models begin while one command is fresh
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 16  # joints, of names that a refusal quotes


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    A sequence of actions that answers one observation.

    `stamp` is that of the observation (ns, ROS time). `episode_id` is an identity without an order; `sequence`
    counts within it. `values` holds rows of len(names) actions, row-major; the first row is for now, the next
    for `step_period` seconds later. `stop` makes it a request to stop, of which nothing else is read.
    """

    stamp: int
    episode_id: int
    sequence: int
    step_period: float
    names: Sequence[str]
    values: Sequence[float]
    stop: bool = False

    def rows(self, count: int | None = None) -> tuple[tuple[float, ...], ...]:
        """Return the first `count` rows (all, if None). The chunk must be sound."""
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
    """Why a chunk is refused; `text` names what, and what is allowed."""

    fault: Fault
    text: str


def unsound(chunk: Chunk, names: Sequence[str], step_periods: tuple[float, float]) -> Refusal | None:
    """
    Return why the chunk cannot be carried out by an interface with the axes `names`, or None.

    `step_periods`: the shortest and the longest that are admitted [s].
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
    # Written so that a NaN, for which every comparison is false, is refused too.
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
    Lets every chunk through at most once, none after a newer one, and one episode at a time.

    Within an episode, sequence numbers rise and observation stamps do not fall. Another episode takes over with
    its first accepted chunk, and retires the one before. No number of a chunk is trusted for longer than
    `memory` s (steady clock) after the last one was accepted: what is older than that, its age keeps out, and
    whoever claimed the last sequence number of all, or an episode of another, blocks nobody beyond it. `memory`
    must be at least the age at which commands are refused.
    """

    def __init__(self) -> None:
        self._last: Chunk | None = None
        self._accepted_at = -math.inf
        self._retired: deque[int] = deque(maxlen=_RETIRED)

    def refuse(self, chunk: Chunk, now: float, memory: float) -> Refusal | None:
        """Return why the chunk comes too late in the order, or None."""
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
        """Take the chunk as the newest."""
        last = self._last
        if last is not None and last.episode_id != chunk.episode_id:
            self._retired.append(last.episode_id)
        if chunk.episode_id in self._retired:
            self._retired.remove(chunk.episode_id)
        self._last, self._accepted_at = chunk, now

    def is_current(self, episode_id: int) -> bool:
        """Tell whether the episode is the one of the last accepted chunk, or none was accepted yet."""
        return self._last is None or self._last.episode_id == episode_id

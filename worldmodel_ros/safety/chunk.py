"""The action chunk as plain values, and the checks that need only the chunk and what came before it."""

import enum
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of a chunk. As a trajectory of 7 joints so many take the gate 1.3 ms, in the thread that its watchdog has too.
MAX_ROWS = 256
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 16  # joints, of names that a refusal quotes


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    A sequence of actions that answers one observation.

    `stamp` is that of the observation (ns, ROS time). `values` holds rows of len(names) actions, row-major;
    the first row is for now, the next for `step_period` seconds later. `stop` makes it a request to stop,
    without actions.
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


def unsound(chunk: Chunk, names: Sequence[str]) -> Refusal | None:
    """Return why the chunk cannot be carried out by an interface with the axes `names`, or None."""
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
    if chunk.stamp == 0:
        return Refusal(Fault.INVALID, 'header.stamp is 0; it must be the stamp of the observation answered')
    if not (math.isfinite(chunk.step_period) and chunk.step_period > 0.0):
        return Refusal(Fault.INVALID, f'step_period is {chunk.step_period}, it must be finite and above 0')
    if not all(map(math.isfinite, chunk.values)):
        index, value = next((k, value) for k, value in enumerate(chunk.values) if not math.isfinite(value))
        row, axis = divmod(index, len(names))
        return Refusal(Fault.INVALID, f'{names[axis]} is {value} in row {row}')
    return None


class Order:
    """
    Lets every chunk through at most once, and none after a newer one.

    An episode begins with its first accepted chunk and retires all older ones for good. Within an episode,
    sequence numbers rise and observation stamps do not fall; a new episode may begin at any stamp, as it does
    when ROS time was set back.
    """

    def __init__(self) -> None:
        self._last: Chunk | None = None

    def refuse(self, chunk: Chunk) -> Refusal | None:
        """Return why the chunk comes too late in the order, or None."""
        last = self._last
        if last is None or chunk.episode_id > last.episode_id:
            return None
        if chunk.episode_id < last.episode_id:
            return Refusal(
                Fault.ORDER, f'episode {chunk.episode_id} is retired, episode {last.episode_id} is running: '
                'start a new episode with a higher id, or reset the gate')
        if chunk.sequence <= last.sequence:
            return Refusal(Fault.ORDER, f'sequence {chunk.sequence} is not newer than {last.sequence}')
        if chunk.stamp < last.stamp:
            return Refusal(
                Fault.ORDER, f'the observation is {(last.stamp - chunk.stamp) * 1e-9:.3f} s older than the '
                'one answered before: after ROS time was set back, a new episode must begin')
        return None

    def accept(self, chunk: Chunk) -> None:
        """Take the chunk as the newest."""
        self._last = chunk

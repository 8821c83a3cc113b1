"""The scheduler's policy and settings."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """
    How ticks are ordered and what is promised.

    ``order``: of the queues and within them, by arrival or by deadline. ``ladder``: admit on arrival only what is
    predicted to be in time, at the best tier possible, and refuse the rest; without it everything is taken at its best
    tier and served however late. ``mixed_steps``: whether units of one network at different steps share a batch.
    """

    order: Literal['fifo', 'edf'] = 'edf'
    ladder: bool = True
    mixed_steps: bool = True

    def __post_init__(self) -> None:
        if self.order not in ('fifo', 'edf'):
            raise ValueError(f"policy: order must be 'fifo' or 'edf', not {self.order!r}")


FIFO = Policy('fifo', ladder=False)
EDF = Policy('edf', ladder=False)
EDF_LADDER = Policy('edf', ladder=True)


@dataclass(frozen=True)
class Settings:
    """
    Times in s.

    ``reserve``: kept free before a tick's deadline, for what comes after its last unit. ``headroom``: spare time with
    which a better tier must fit, for ``recovery_ticks`` ticks in a row, before it is taken up again. ``max_batch``: by
    network, to limit it below the largest size in the step table.

    ``blocking``: how long a background batch may delay an expected tick, by the high quantile.
    ``background_share``: fraction of the device's time that background work may use even where every gap between
    expected ticks is too short for it; a unit waits at most ``longest_wait`` for that. ``starving``: how long ticks must
    be refused, and none admitted, before background work may use all of it. ``idle_patience``: an IDLE request older
    than this goes before a WHAT_IF whose deadline is later. ``overdue``: how long a late tick is still waited for.

    ``share``: each account's fraction of the device's time (``shares.py``), 0 for equal parts; ``share_period``: the time
    over which it may be saved up.
    """

    reserve: float = 0.001
    headroom: float = 0.001
    recovery_ticks: int = 3
    max_batch: Mapping[str, int] = field(default_factory=dict)
    blocking: float = 0.001
    background_share: float = 0.005
    longest_wait: float = 1.0
    starving: float = 0.2
    idle_patience: float = 1.0
    overdue: float = 0.1
    share: float = 0.0
    share_period: float = 0.5

    def __post_init__(self) -> None:
        times = (self.reserve, self.headroom, self.blocking, self.background_share, self.longest_wait, self.starving,
                 self.idle_patience, self.overdue, self.share, self.share_period)
        counts = (self.recovery_ticks, *self.max_batch.values())
        if min(times) < 0.0 or self.share > 1.0 or min(counts) < 1:
            raise ValueError(f'settings: times must be at least 0, share 0 to 1, recovery_ticks and max_batch at least '
                             f'1: {self}')

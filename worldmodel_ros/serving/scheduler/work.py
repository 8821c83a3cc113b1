"""The scheduler's vocabulary: requests, the units they are made of, batches, and how requests end."""
from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from collections.abc import Hashable

from worldmodel_ros.control.ladder import Tier

TIER_WORDS = {Tier.TWO_STEP: 'two steps', Tier.ONE_STEP: 'one step', Tier.SMALLER: 'the smaller model'}


class Kind(enum.IntEnum):
    """What a request is for, most urgent first. All but TICK is background work."""

    TICK = 0
    WHAT_IF = 1
    IDLE = 2


class Unit(NamedTuple):
    """
    One pass of one network for one request: it cannot be interrupted, and is what batches are made of.

    ``network`` names a row of the step table ('tiny/denoise'); ``step`` of ``steps`` is the denoising step, where there
    are any. Units of one network may share a batch; without mixed steps only equal units may.
    """

    network: str
    step: int = 0
    steps: int = 1


Route = tuple[Unit, ...]


@dataclass(frozen=True)
class Request:
    """
    Something to be computed for a session by ``deadline`` [s, steady].

    ``id`` is unique for as long as the request is open. ``sequence`` increases within the ticks of a session; the
    other kinds may leave it 0. ``arrival`` [s] orders requests under FIFO. ``routes`` gives the units of each tier that
    the caller can serve; WHAT_IF and IDLE take the best one. ``deadline`` may be infinite for IDLE. ``account``: the one
    whose share of the device's time it is served from; None: its session's.
    """

    id: Hashable
    session: Hashable
    sequence: int
    kind: Kind
    arrival: float
    deadline: float
    routes: Mapping[Tier, Route]
    account: Hashable = None

    def __post_init__(self) -> None:
        if not self.routes or Tier.NONE in self.routes or not all(self.routes.values()):
            raise ValueError(f'request {self.id!r}: routes must give at least one tier, each with at least one unit, '
                             f'and none for NONE; got {dict(self.routes)}')
        if math.isnan(self.deadline) or not math.isfinite(self.arrival):
            raise ValueError(f'request {self.id!r}: arrival must be finite and deadline a number, '
                             f'got {self.arrival} and {self.deadline}')
        if self.kind is not Kind.IDLE and not math.isfinite(self.deadline):
            raise ValueError(f'request {self.id!r}: a {self.kind.name} needs a finite deadline')


@dataclass(frozen=True)
class Admission:
    """
    The decision on a request at its arrival. Times are steady [s].

    ``tier`` NONE: it is refused and will not run, ``reason`` says why in words and numbers, and ``finish`` is when the last
    tier that was tried would have been done. Otherwise ``finish`` is when it is done at the latest, as long as at most one
    batch exceeds its typical time, and ``expected`` when none does. ``finish`` is None where nothing is promised: for a tick
    that is attempted, since it is expected in time but not certain; without a ladder; and for background work. In the last
    two cases ``expected`` is None, too. ``reason`` of an admitted request says why its tier is not the best, or not certain.
    """

    tier: Tier
    finish: float | None = None
    expected: float | None = None
    reason: str = ''

    @property
    def admitted(self) -> bool:
        return self.tier is not Tier.NONE

    @property
    def attempted(self) -> bool:
        """Whether it is expected in time, but not promised."""
        return self.admitted and self.finish is None and self.expected is not None


class Entry(NamedTuple):
    """A request's part in a batch. ``tier`` can be lower than the admitted one: see ``Scheduler``."""

    request: Request
    unit: Unit
    tier: Tier


@dataclass(frozen=True)
class Batch:
    """Entries of one network, to be computed together now. ``finish``: when it ends, by the high quantile [s]."""

    id: int
    network: str
    kind: Kind
    entries: tuple[Entry, ...]
    begun: float
    expected: float
    finish: float


class Outcome(enum.Enum):
    """How an admitted request ended."""

    DONE = 'done'                # all its units were computed, in time or late
    GIVEN_UP = 'given up'        # it could no longer be done in time; its remaining units were not computed
    SUPERSEDED = 'superseded'    # a newer tick of its session came before it was begun
    CANCELLED = 'cancelled'
    FAILED = 'failed'            # a batch that contained it failed


@dataclass(frozen=True)
class Completion:
    """
    The end of an admitted request; each admitted request has exactly one.

    ``tier`` is the one served (or last tried), ``admission`` what was promised. ``finish`` is when it ended [s]. ``done``
    counts the computed units of that tier's route; of a WHAT_IF they are the part of the answer that exists.
    """

    request: Request
    outcome: Outcome
    tier: Tier
    admission: Admission
    finish: float
    done: int
    reason: str = ''

    @property
    def met(self) -> bool:
        """Whether it was done by its deadline."""
        return self.outcome is Outcome.DONE and self.finish <= self.request.deadline

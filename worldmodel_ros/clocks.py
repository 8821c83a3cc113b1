"""The machine's clocks, read at the same instant."""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_AT_ONCE = 200_000  # ns


def wall_minus_steady() -> int:
    """
    Return by how much the wall clock is ahead of the steady one [ns].

    Waiting for a core or the GIL between the reads would distort the result, so they are repeated until there was no wait.
    """
    while True:
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < _AT_ONCE:
            return wall - (before + after) // 2


@dataclass(frozen=True)
class Moment:
    """
    A moment, written down for another process to tell how long ago it was. On the same boot of a machine that is the
    difference of ``since_boot`` [s], which counts suspended time and which is never set; otherwise that of the wall clocks,
    ``at`` [s]. ``boot``: identity of the boot; empty: unknown.
    """

    at: float
    since_boot: float = 0.0
    boot: str = ''

    @classmethod
    def now(cls) -> Moment:
        """Return this moment."""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Moment:
        """Inverse of ``to_dict``; of the fields, ``values`` may have ``at`` alone."""
        return cls(float(values.get('at', 0.0)), float(values.get('since_boot', 0.0)), str(values.get('boot', '')))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def ago(self) -> float:
        """Return how long ago it was [s]; negative where a wall clock was set back, or is behind another machine's."""
        now = Moment.now()
        return now.since_boot - self.since_boot if self.boot and self.boot == now.boot else now.at - self.at


@cache
def _boot() -> str:
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    except OSError:  # a container may hide it
        return ''

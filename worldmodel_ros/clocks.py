"""The machine's clocks, read at one instant."""

import time

_AT_ONCE = 200_000  # ns


def wall_minus_steady() -> int:
    """
    Return by how much the wall clock is ahead of the steady one [ns].

    A thread that waits for its core, or for Python's lock, between the two would be wrong by as long as that, so it looks until
    it has not waited.
    """
    while True:
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < _AT_ONCE:
            return wall - (before + after) // 2

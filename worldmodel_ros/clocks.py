"""The machine's clocks, read at the same instant."""

import time

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

"""Command pattern for calibration: steps ahead, back and on the spot, which end about where they began."""
from __future__ import annotations

from collections.abc import Iterator

PERIOD = 0.1   # s, between two commands
SPEED, TURN = 0.2, 0.6  # m/s, rad/s, at most

# Shares of the greatest speed and turn, and seconds. The stops in between make a latency of up to half a second show.
_STEPS = (
    (0.0, 0.0, 0.6),
    (1.0, 0.0, 1.6), (0.0, 0.0, 0.6), (-1.0, 0.0, 1.6), (0.0, 0.0, 0.6),
    (0.0, 1.0, 1.2), (0.0, 0.0, 0.6), (0.0, -1.0, 1.2), (0.0, 0.0, 0.6),
    (1.0, 0.7, 0.8), (-1.0, -0.7, 0.8), (0.8, -1.0, 0.8), (-0.8, 1.0, 0.8), (0.0, 0.0, 0.4))


def commands(rounds: int = 2, speed: float = SPEED, turn: float = TURN) -> Iterator[tuple[float, float]]:
    """Yield commands, m/s and rad/s, one per PERIOD."""
    for _ in range(rounds):
        for v, w, seconds in _STEPS:
            for _ in range(round(seconds / PERIOD)):
                yield v * speed, w * turn
    yield 0.0, 0.0


def seconds(rounds: int = 2) -> float:
    """Return the duration of the pattern in s."""
    return rounds * sum(each[2] for each in _STEPS) + PERIOD

"""Times for which a robot that is being moved got neither a command nor a stop, as one process saw it."""
from __future__ import annotations

from collections.abc import Callable

FEW = 100  # silences that are remembered between two reports


class Silences:
    """
    Keeps the steady times [s] of silences that were longer than ``bound()`` s.

    The gate and the robot's driver each have one, in their diagnostics: whether a stop was late, and where, is then known from
    those who sent and received it, and not only from others who listen.
    """

    def __init__(self, bound: Callable[[], float]) -> None:
        self._bound = bound
        self._begun: float | None = None
        self._found: list[tuple[float, float]] = []

    def begin(self, now: float) -> None:
        """A command that moves the robot."""
        self._begun = now

    def end(self, now: float) -> None:
        """A command or a stop."""
        begun, self._begun = self._begun, None
        if begun is not None and now - begun > self._bound() and len(self._found) < FEW:
            self._found.append((begun, now))

    def tell(self) -> str:
        """Return 'BEGIN:END ...', steady times [s], of those since the last time."""
        found, self._found = self._found, []
        return ' '.join(f'{begun:.6f}:{end:.6f}' for begun, end in found)

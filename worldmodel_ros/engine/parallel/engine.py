"""The engine of a model that runs in several processes."""
from __future__ import annotations

from ..engine import Engine
from .leader import LeadingBackend
from .session import RestoringSession


class ParallelEngine(Engine):
    """An `Engine` whose sessions outlive a failure of its other processes."""

    backend: LeadingBackend

    def open_session(self, seed: int = 0) -> RestoringSession:
        return RestoringSession(self.backend, self.memory, self.step_times, seed)

    @property
    def trouble(self) -> str:
        return self.backend.trouble

    def close(self) -> None:
        """Ends the other processes; they would end with this one, too."""
        self.backend.close()

"""The engine of a model that runs in several processes."""
from __future__ import annotations

from contextlib import AbstractContextManager

from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.step_times import StepTimes
from .leader import LeadingBackend
from .session import RestoringSession


class ParallelEngine(Engine):
    """An `Engine` whose sessions outlive a failure of its other processes."""

    backend: LeadingBackend

    def _session(self, step_times: StepTimes, seed: int = 0) -> RestoringSession:
        return RestoringSession(self.backend, self.memory, step_times, seed, lambda: self.fingerprint)

    @property
    def trouble(self) -> str:
        return self.backend.trouble

    def starting_up(self) -> AbstractContextManager[None]:
        return self.backend.starting_up()

    def close(self) -> None:
        """Ends the other processes; they would end with this one, too."""
        self.backend.close()

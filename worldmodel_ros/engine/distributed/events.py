"""Points in time that somebody waits for, and a supervisor watches."""
from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """As torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has come."""


class _Over:
    def query(self) -> bool:
        return True


OVER = _Over()


class Started:
    """The end of something that is watched from before it is known what will tell of it: ``event``."""

    event: Event | None = None

    def query(self) -> bool:
        return self.event is not None and self.event.query()

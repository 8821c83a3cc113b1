"""Decides how many servers a fleet has, by the slack of its ticks. A state machine on the time passed in."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Step = tuple[Literal['start', 'empty'], int]


@dataclass(frozen=True)
class ScalingSettings:
    """
    ``fewest`` to ``most`` servers. Slack is the number of further robots for which there is memory, and time up to the load at
    which nothing is placed. A server is started if for ``patience`` s the slack was less than ``spare`` robots. One is emptied
    if for ``calm`` s the others had slack for all of its robots and ``calm_spare`` more; that is more than ``spare``, so that
    the two do not undo each other. ``start_up`` [s]: how long to wait for a started server before another is started.
    """

    fewest: int = 1
    most: int = 1
    patience: float = 2.0
    calm: float = 30.0
    spare: float = 1.0
    calm_spare: float = 3.0
    start_up: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for invalid settings."""
        if not 1 <= self.fewest <= self.most:
            raise ValueError(f'{self.fewest} to {self.most} servers: at least 1, and no fewer at most than at least')
        if self.calm_spare <= self.spare:
            raise ValueError(f'a server would be ended with slack for {self.calm_spare:g} robots, and started with less than '
                             f'{self.spare:g}: the first must be more, or they take turns')


class Scaler:
    """Decides what to do next. ``running`` are servers that are there or have been started, by number."""

    def __init__(self, settings: ScalingSettings) -> None:
        self.settings = settings
        self._tight_since: float | None = None
        self._calm_since: float | None = None
        self._started: dict[int, float] = {}
        self._seen: set[int] = set()  # servers that have answered once
        self.emptying: int | None = None  # server that takes no more robots, and ends when it has none

    def decide(self, slack: Mapping[int, int], robots: Mapping[int, int], running: frozenset[int], now: float) -> Step | None:
        """
        Return which server to start or empty, if any. ``slack``: for how many more robots each server that answers has time
        and memory; ``robots``: how many it has.
        """
        settings = self.settings
        self._seen |= slack.keys()
        for number in running - self._seen:  # including those that the fleet began with
            self._started.setdefault(number, now)
        for number in [number for number in self._started if number in slack or number not in running]:
            del self._started[number]
        awaited = any(now - began < settings.start_up for began in self._started.values())
        serving = {number: room for number, room in slack.items() if number != self.emptying}
        total = sum(serving.values())
        tight = total < settings.spare
        self._tight_since = (now if self._tight_since is None else self._tight_since) if tight else None
        least = min(serving, key=lambda number: (robots.get(number, 0), -number), default=None)
        calm = (least is not None and self.emptying is None and len(running) > settings.fewest and not awaited
                and total - serving[least] - robots.get(least, 0) >= settings.calm_spare)
        self._calm_since = (now if self._calm_since is None else self._calm_since) if calm else None
        if tight and now - self._tight_since >= settings.patience:
            if self.emptying is not None:  # needed after all
                number, self.emptying = self.emptying, None
                return 'start', number
            free = sorted(set(range(settings.most)) - running)
            if free and not awaited:
                self._started[free[0]], self._tight_since = now, None
                return 'start', free[0]
        if calm and now - self._calm_since >= settings.calm:
            self._calm_since, self.emptying = None, least
            return 'empty', least
        return None

    def ended(self, number: int) -> None:
        """Note that a server that was emptied has ended."""
        if self.emptying == number:
            self.emptying = None


class Homecoming:
    """
    Decides when a session at another host comes back to an own server: when for ``calm`` s one would have no more load than
    ``low`` with it. Sessions leave, or are not placed here, at a higher load, so that none goes back and forth. After each one
    that comes back, ``calm`` s must pass again, to see its effect.
    """

    def __init__(self, low: float, calm: float = 10.0) -> None:
        self._low, self._calm = low, calm
        self._since: float | None = None

    def decide(self, loads: Mapping[int, float], share: float, away: bool, now: float) -> bool:
        """Return whether one should come back. ``loads``: of own servers that have memory for another session, by number;
        ``share``: the load that a session adds; ``away``: whether a session at another host could come."""
        if not away or min(loads.values(), default=1.0) + share > self._low:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < self._calm:
            return False
        self._since = now
        return True

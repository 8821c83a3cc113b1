"""Playback time of a bag: when each message is due and what /clock says, at any rate and while paused."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worldmodel_ros.nodes.common.messages import NS

_STEP_BACK = NS  # ns, as in bags.steps_back: smaller steps occur when several threads record
_GAP = 60 * NS   # ns; longer ones are skipped: a clock that was set forward while recording may have skipped hours or years


class PlaybackTime:
    """
    Maps steady time to bag time [ns]. The playing thread waits here; services and parameters control it.

    Time never runs past a message that has not been played, so /clock goes back within one pass over the bag only where time
    was set back during the recording, and continues from there. A gap of more than a minute is skipped.
    """

    def __init__(self, rate: float, paused: bool, steady: Callable[[], float] = time.monotonic,
                 skipping: Callable[[float], None] = lambda seconds: None) -> None:
        """``rate``: bag seconds per second; ``skipping``: called with the length of each gap that is skipped [s]."""
        self._steady, self._skipping = steady, skipping
        self._changed = threading.Condition()
        self._rate, self._paused, self._stopped = rate, paused, False
        self._steps = 0      # messages to play although paused
        self._played = 0     # messages let through
        self._begun = False  # waiting for the first message, or past it
        self._ended = False  # the last one has been played
        self._bag, self._since = 0, steady()  # a bag time and the corresponding steady time
        self._newest = 0     # bag time of the message let through last

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def stopped(self) -> bool:
        return self._stopped

    def begin(self, bag_time: int) -> None:
        """Set the time to the first message of a pass."""
        with self._changed:
            self._begun = True
            self._newest = bag_time
            self._set(bag_time)

    def now(self) -> int:
        """Return the bag time [ns]."""
        with self._changed:
            return self._now()

    def wait_for(self, bag_time: int, period: float, tick: Callable[[int], None]) -> bool:
        """
        Wait until the message of that time is due or requested by ``step``; return False if playing was stopped.

        Meanwhile call ``tick`` with the time every ``period`` seconds, paused or not. The first call comes after a full
        period, which leaves subscribers of the clock that long to process the previous message.
        """
        with self._changed:
            if bag_time < self._newest - _STEP_BACK:
                self._set(bag_time)  # else this and all that follows would be overdue
            self._newest = bag_time
        while True:
            with self._changed:
                if not self._paused and (gap := bag_time - self._now()) > _GAP:
                    self._set(bag_time)
                    self._skipping(gap / NS)
                if not self._is_due(bag_time):
                    due = float('inf') if self._paused else (bag_time - self._now()) / NS / self._rate
                    self._changed.wait(max(0.0, min(due, period)))
                if self._stopped:
                    return False
                if self._is_due(bag_time):
                    if self._steps:  # the clock then stands at the played message
                        self._steps -= 1
                        self._set(bag_time)
                    return True
                now = min(self._now(), bag_time)
            tick(now)

    def behind(self, bag_time: int) -> float:
        """Return how long ago [s] a message of that time was due; 0 while paused."""
        with self._changed:
            return 0.0 if self._paused else max(0.0, (self._now() - bag_time) / NS / self._rate)

    def passed(self) -> None:
        """Count a message that has been published."""
        with self._changed:
            self._played += 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Mark the end of the bag, so that no thread waits for a step."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Pause or resume."""
        with self._changed:
            self._set(self._now())
            self._paused = paused
            self._changed.notify_all()

    def set_rate(self, rate: float) -> None:
        """Continue from here at another rate."""
        with self._changed:
            self._set(self._now())
            self._rate = rate
            self._changed.notify_all()

    def step(self, timeout: float) -> bool:
        """Play the next message while paused and wait until it is published; return whether it was."""
        with self._changed:
            if not self._paused or not self._begun or self._ended:
                return False
            goal = self._played + self._steps + 1
            self._steps += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._played >= goal or self._ended, timeout)
            if self._played >= goal:
                return True
            self._steps = 0  # drop the request
            return False

    def stop(self) -> None:
        """Stop playing for good; wakes the playing thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _is_due(self, bag_time: int) -> bool:
        return self._stopped or self._steps > 0 or (not self._paused and self._now() >= bag_time)

    def _now(self) -> int:
        if self._paused:
            return self._bag
        return self._bag + round((self._steady() - self._since) * self._rate * NS)

    def _set(self, bag_time: int) -> None:
        self._bag, self._since = bag_time, self._steady()

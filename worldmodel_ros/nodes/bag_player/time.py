"""The time of a bag that is being played: when what is due, and what /clock says, at any rate and while paused."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worldmodel_ros.nodes.common.messages import NS


class PlaybackTime:
    """
    Bag time [ns] against steady time. The thread that plays waits in it; services and parameters steer it.

    Time runs from one message to the next and no further than a message that has not been played: whatever
    happens on the way, what is read from /clock never goes back within one pass over the bag.
    """

    def __init__(self, rate: float, paused: bool, steady: Callable[[], float] = time.monotonic) -> None:
        """``rate``: seconds of the bag in one second."""
        self._steady = steady
        self._changed = threading.Condition()
        self._rate, self._paused, self._stopped = rate, paused, False
        self._steps = 0      # messages that are to be played although paused
        self._played = 0     # messages let through
        self._begun = False  # the first one is being waited for
        self._ended = False  # the last one has been played
        self._bag, self._since = 0, steady()  # a bag time, and when it was

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
            self._set(bag_time)

    def now(self) -> int:
        """Return the bag time [ns]."""
        with self._changed:
            return self._now()

    def wait_for(self, bag_time: int, period: float, tick: Callable[[int], None]) -> bool:
        """
        Wait until the message of that time is due, or asked for by ``step``; False: playing was stopped.

        Meanwhile ``tick`` is called with the time every ``period`` seconds, paused or not; never before a period is over,
        which leaves subscribers of the clock that long to deal with the message before.
        """
        while True:
            with self._changed:
                if not self._is_due(bag_time):
                    due = float('inf') if self._paused else (bag_time - self._now()) / NS / self._rate
                    self._changed.wait(max(0.0, min(due, period)))
                if self._stopped:
                    return False
                if self._is_due(bag_time):
                    if self._steps:  # the clock then stands at what was played
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
        """Say that nothing more comes, so that no thread waits for a step."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Hold the time, or let it go on."""
        with self._changed:
            self._set(self._now())
            self._paused = paused
            self._changed.notify_all()

    def set_rate(self, rate: float) -> None:
        """Go on from here at another rate."""
        with self._changed:
            self._set(self._now())
            self._rate = rate
            self._changed.notify_all()

    def step(self, timeout: float) -> bool:
        """Play the next message while paused, and wait until it is published; False: it was not."""
        with self._changed:
            if not self._paused or not self._begun or self._ended:
                return False
            goal = self._played + self._steps + 1
            self._steps += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._played >= goal or self._ended, timeout)
            if self._played >= goal:
                return True
            self._steps = 0  # no thread waits for it any more
            return False

    def stop(self) -> None:
        """End the wait of the playing thread, for good."""
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

"""Real-time pacing of the simulated robot: physics steps on a fixed time grid of the steady clock."""

import math
import time
from collections.abc import Callable


class Pacer:
    """
    Paces steps that are due at start, start + period, start + 2 * period, ... on a steady clock; start is the first call.

    A late step does not delay the ones after it. A lag of more than ``max_lag`` seconds is dropped instead of caught up: on a
    machine too slow for real time, the simulation runs slower rather than further and further behind.
    """

    def __init__(self, period: float, max_lag: float, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        self.dropped = 0.0  # time given up so far [s]
        self._period = period
        self._max_lag = max_lag
        self._clock = clock
        self._sleep = sleep
        self._due: float | None = None

    def next(self) -> float:
        """Wait until the next step is due; return its due time on the steady clock [s]."""
        self._due = self._clock() if self._due is None else self._due + self._period
        lag = self._clock() - self._due
        if lag < 0.0:
            self._sleep(-lag)
        elif lag > self._max_lag:
            self._due += lag
            self.dropped += lag
        return self._due


class Rate:
    """Divides a time grid: tells at which of its points an event of another rate is due, without drift."""

    def __init__(self) -> None:
        self._count = 0
        self._start = 0.0
        self._hz = math.nan

    def due(self, now: float, hz: float) -> bool:
        """Return whether the event is due at ``now`` [s]; missed events count once. A change of ``hz`` restarts at ``now``."""
        if hz != self._hz:
            self._hz, self._start, self._count = hz, now, 0
        # Half a microsecond early counts as on time: ``now`` is a sum of floats.
        if (now - self._start) * hz < self._count - 5e-7 * hz:
            return False
        self._count = math.floor((now - self._start) * hz + 5e-7 * hz) + 1
        return True

"""Events on a manual clock, which also occur while a network of a test's engine takes its time."""
import heapq
import itertools
from collections.abc import Callable

from fake_engine import FakeClock


class Happenings:
    def __init__(self, clock: FakeClock):
        self.clock, self.slow = clock, 1.0  # slow: factor on all durations
        self._coming, self._order = [], itertools.count()

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Schedule an action after ``delay`` s."""
        heapq.heappush(self._coming, (self.clock.now + delay, next(self._order), action))

    def sleep(self, seconds: float) -> None:
        """Let a network run for ``seconds``, while everything else goes on."""
        self.pass_until(self.clock.now + self.slow * seconds)

    def pass_until(self, until: float) -> None:
        while self._coming and self._coming[0][0] <= until:
            self.clock.now = max(self.clock.now, self._coming[0][0])
            heapq.heappop(self._coming)[2]()
        self.clock.now = max(self.clock.now, until)

    def play(self, step: Callable[[], float | None]) -> None:
        """Call ``step``, which returns its idle time [s] or None (until the next event), until no event is left."""
        while True:
            patience = step()
            if patience == 0.0:
                continue
            if patience is None and not self._coming:
                return
            later = [self._coming[0][0]] if self._coming else []
            self.pass_until(min([*later, *([] if patience is None else [self.clock.now + max(patience, 1e-6)])]))

"""A device on a virtual clock under a real Scheduler, and step times that are easy to add up."""
from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from worldmodel_ros.serving.scheduler import Admission, Batch, Completion, Kind, Request, Scheduler, StepTable, Tier, Unit

MS = 1e-3
OBSERVE, FIRST, SECOND = Unit('big/observe'), Unit('big/denoise', 0, 2), Unit('big/denoise', 1, 2)
WHOLE, DECODE = Unit('big/denoise', 0, 1), Unit('big/decode')
SMALL = (Unit('small/observe'), Unit('small/denoise'))
ROUTES = {Tier.TWO_STEP: (OBSERVE, FIRST, SECOND), Tier.ONE_STEP: (OBSERVE, WHOLE), Tier.SMALLER: SMALL}
BRANCH = {Tier.TWO_STEP: (FIRST, SECOND, DECODE)}


def table(tail: float = 0.0, **other: dict[int, float]) -> StepTable:
    """
    Return times in ms by batch size: a pass of the big model takes 4 ms alone and 7 for four, one of the small model 1 and
    1.6; the high quantile is ``tail`` ms more. ``other``: instead of those, by network, with '_' for '/'.
    """
    big, small = {1: 4.0, 2: 5.0, 4: 7.0}, {1: 1.0, 2: 1.2, 4: 1.6}
    times = {'big/observe': big, 'big/denoise': big, 'big/decode': big, 'small/observe': small, 'small/denoise': small}
    times |= {name.replace('_', '/'): sizes for name, sizes in other.items()}
    rows = [{'network': network, 'batch': size, 'p50_ms': ms, 'p99_ms': ms + tail, 'samples': 100}
            for network, sizes in times.items() for size, ms in sizes.items()]
    return StepTable.from_dict({'rows': rows})


def tick(session: str, sequence: int = 1, at: float = 0.0, budget: float = 35 * MS, routes=None) -> Request:
    """Return a tick that arrives at ``at`` and has ``budget`` [s]."""
    return Request((session, sequence), session, sequence, Kind.TICK, at, at + budget, routes or ROUTES)


def branch(name: str, at: float = 0.0, budget: float = 1.0, routes=None, kind: Kind = Kind.WHAT_IF) -> Request:
    """Return a branch of a what-if question, or idle work."""
    return Request(name, 'asker', 0, kind, at, at + budget, routes or BRANCH)


class VirtualDevice:
    """
    Runs a scheduler's batches on a virtual clock. ``duration(batch)`` [s]: how long a batch really takes; without it,
    the step table's typical time.
    """

    def __init__(self, scheduler: Scheduler, duration: Callable[[Batch], float] | None = None) -> None:
        self.scheduler = scheduler
        self.duration = duration or (lambda batch: batch.expected - batch.begun)
        self.now = 0.0
        self.batches: list[Batch] = []
        self.admissions: dict[object, Admission] = {}
        self.completions: dict[object, Completion] = {}
        self._busy: tuple[float, Batch] | None = None

    def submit(self, request: Request) -> Admission:
        """Submit a request now, and begin it if the device is free."""
        self.admissions[request.id] = self.scheduler.submit(request, self.now)
        self._collect()
        self.begin()
        return self.admissions[request.id]

    def play(self, requests: Iterable[Request], until: float | None = None) -> VirtualDevice:
        """Submit requests at their arrivals, and run until a time, or until nothing is left to do."""
        arrivals = [(request.arrival, k, request) for k, request in enumerate(requests)]
        heapq.heapify(arrivals)
        self.begin()
        while arrivals or (until is None and (self._busy or self.scheduler.waiting)) or (until and self.now < until):
            times = [arrivals[0][0]] if arrivals else []
            times += [self._busy[0]] if self._busy else []
            wake = self.scheduler.wake_at(self.now)
            times += [wake] if wake is not None else []
            end = min(times, default=until)
            assert end is not None, 'requests wait, the device is free, and the scheduler wants no call'
            if until is not None and end > until and not arrivals:
                self.now = until
                return self
            self.now = max(self.now, end)
            if self._busy and self._busy[0] <= self.now:
                self.finish()
            elif arrivals and arrivals[0][0] <= self.now:
                self.submit(heapq.heappop(arrivals)[2])
            self.begin()
        return self

    def begin(self) -> Batch | None:
        """Begin the next batch, if the device is free and there is one."""
        if self._busy:
            return None
        batch = self.scheduler.next(self.now)
        self._collect()
        if batch:
            self.batches.append(batch)
            self._busy = self.now + self.duration(batch), batch
        return batch

    def finish(self) -> None:
        """Finish the running batch."""
        self.now, batch = max(self.now, self._busy[0]), self._busy[1]
        self._busy = None
        self.scheduler.finished(batch, self.now)
        self._collect()

    def fail(self, reason: str = 'broken') -> None:
        """Fail the running batch."""
        self.now, batch = max(self.now, self._busy[0]), self._busy[1]
        self._busy = None
        self.scheduler.failed(batch, self.now, reason)
        self._collect()

    def units(self, request_id: object) -> list[Unit]:
        """Return the units of a request that were begun, in order."""
        return [entry.unit for batch in self.batches for entry in batch.entries if entry.request.id == request_id]

    def _collect(self) -> None:
        for completion in self.scheduler.completions():
            assert completion.request.id not in self.completions, 'completed twice'
            self.completions[completion.request.id] = completion

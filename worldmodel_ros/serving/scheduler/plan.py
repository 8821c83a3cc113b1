"""Chooses the next batches: drawn one by one from the queues, or all in advance as a plan."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from .jobs import Job, Place, Queues, enqueue
from .overruns import Overruns
from .settings import Settings
from .step_table import Curve, StepTable

ROUNDING = 1e-9  # s, rounding error of sums of times
GAIN = 1.02  # by how much a larger batch must raise the work per second; otherwise it only delays its head


@dataclass(frozen=True)
class Device:
    """
    When the device is free: typically ``at`` [s], and up to ``tail`` [s] later. ``flying``: the ticks in its current
    batch.
    """

    at: float
    tail: float = 0.0
    flying: tuple[Job, ...] = ()


class Planned:
    """
    A batch of a plan: its places, when it begins and ends [s] if it and all before it take their typical times, and
    by how much it and all after it can be delayed before a limit is broken [s].
    """

    __slots__ = ('begin', 'end', 'places', 'slack')

    def __init__(self, places: list[Place], begin: float, end: float) -> None:
        self.places, self.begin, self.end, self.slack = places, begin, end, inf


class Plan:
    """
    All batches to come, in order, and when each job is done: expected, and at the latest.

    Every job is done by the latter if every batch takes its typical time except one that takes its high quantile, or if
    all of them together exceed their typical times by as much as recent runs of as many batches did.
    """

    def __init__(self) -> None:
        self.batches: deque[Planned] = deque()
        self.ends: dict[Job, tuple[float, float]] = {}

    def late(self) -> list[Job]:
        """Return the jobs that would be done after their limits, in order of their ends."""
        return [job for job, (_, promised) in self.ends.items() if promised > job.limit + ROUNDING]

    def close(self) -> None:
        """Compute the slacks."""
        slack = inf
        for planned in reversed(self.batches):
            for _, _, job, position in planned.places:
                if position + 1 == len(job.route) and job.outcome is None:
                    slack = min(slack, job.limit - self.ends[job][1])
            planned.slack = slack


class Planner:
    """
    Draws batches from queues: from the one with the most urgent head, in order of urgency. The size is the one that does
    the most work per second without making anything late that would otherwise be in time.
    """

    def __init__(self, table: StepTable, settings: Settings, overruns: Overruns) -> None:
        self._table, self._settings, self._overruns = table, settings, overruns

    def plan(self, queues: Queues, device: Device) -> Plan:
        """Plan everything in ``queues``, which are not modified, and what follows it."""
        queues = {label: queue.copy() for label, queue in queues.items()}
        plan, now, tail = Plan(), device.at, device.tail
        for job in device.flying:
            _advance(plan, queues, job, job.position, now, tail)
        while queues:
            places, typical, high = self.draw(queues, now, tail)
            begin, now = now, now + typical
            plan.batches.append(Planned(places, begin, now))
            tail = max(tail, high - typical, self.spread(plan) * (now - device.at))
            for _, _, job, position in places:
                _advance(plan, queues, job, position, now, tail)
        return plan

    def spread(self, plan: Plan) -> float:
        """Return the relative overrun to allow for in a whole plan, from recent runs of as many batches."""
        return self._overruns.after(len(plan.batches))

    def likely(self, batches: int) -> float:
        """Return the relative overrun that one in five runs of ``batches`` exceeds; infinite if not known."""
        return self._overruns.likely(batches)

    def draw(self, queues: Queues, now: float, tail: float = 0.0) -> tuple[list[Place], float, float]:
        """
        Take the next batch out of ``queues``, which must not be empty; return its places and its typical and high
        time [s]. It begins at ``now``, or up to ``tail`` later [s].
        """
        label = min(queues, key=lambda name: queues[name][0])
        bound = inf if len(queues[label]) == 1 else self._bound(queues, label, now + tail)
        return self.take(queues, label, now, bound, tail)

    def take(self, queues: Queues, label: str, now: float, bound: float,
             tail: float = 0.0) -> tuple[list[Place], float, float]:
        """As ``draw``, from one queue; the batch ends by ``bound`` [s] if a batch of one can."""
        queue = queues[label]
        network = network_of(queue[0])
        curve = self._table.curve(network)
        room = min(len(queue), self._settings.max_batch.get(network, curve.largest), curve.largest)
        size = 1 if room == 1 else _size(queue, room, curve, now, tail, bound)
        places = queue[:size]
        del queue[:size]
        if not queue:
            del queues[label]
        return places, curve.typical[size], curve.high[size]

    def _bound(self, queues: Queues, label: str, now: float) -> float:
        """Return by when the device must be free for those heads of the other queues that can still be in time."""
        bound = inf
        for name, queue in queues.items():
            if name != label:
                _, _, job, position = queue[0]
                start = job.limit - job.rest[position] - self._table.curve(job.route[position].network).typical[1]
                if now <= start < bound:
                    bound = start
        return bound


def _size(queue: list[Place], room: int, curve: Curve, now: float, tail: float, bound: float) -> int:
    """Return the size, up to ``room``, with the most work per second that ends by ``bound`` and its members' limits."""
    typical, high = curve
    alone = now + max(tail + typical[1], high[1])
    best, rate = 1, 1.0 / typical[1]
    for size in range(1, room + 1):
        _, _, job, position = queue[size - 1]
        limit = job.limit - job.rest[position]
        if alone <= limit < bound:  # one that would be late even alone does not restrict the others
            bound = limit
        time = typical[size]
        if now + max(tail + time, high[size]) > bound:
            break
        if size > GAIN * rate * time:
            best, rate = size, size / time
    return best


def network_of(place: Place) -> str:
    """Return the network of the unit that waits in a place."""
    return place[2].route[place[3]].network


def _advance(plan: Plan, queues: Queues, job: Job, position: int, now: float, tail: float) -> None:
    """Note that the unit at ``position`` is done: queue the next one, or end the job and begin its follower."""
    if job.outcome is not None:
        return
    if position + 1 < len(job.route):
        enqueue(queues, job, position + 1)
        return
    plan.ends[job] = now, now + tail
    if job.follower is not None:
        enqueue(queues, job.follower, 0)

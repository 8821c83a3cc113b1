"""Open requests: the position of each on its route, and the queues they wait in."""
from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING
from collections.abc import Hashable

from .step_table import StepTable
from .work import Admission, Outcome, Request, Route, Tier, Unit

if TYPE_CHECKING:
    from .sessions import SessionRecord


class Job:
    """
    An open request.

    ``position`` is the index of the next unit or, if ``flying``, of the one on the device. ``limit``: by when it must be done
    [s], infinite where nothing depends on it. ``key`` orders it within queues; ``labels`` and ``rest`` are, by position, the
    name of the queue and the typical time of the units after it [s]; ``work`` is that of the whole route. ``follower``:
    the next tick of the session, which begins when this one has ended. ``headroom``: whether a better tier would have
    fitted with room to spare. ``postponed``: by how much its deadline is postponed for its robot's overused share [s].
    ``charged``: device time that its robot's budget was charged with when it was submitted [s].
    """

    __slots__ = (
        'admission',
        'charged',
        'flying',
        'follower',
        'headroom',
        'key',
        'labels',
        'limit',
        'order',
        'outcome',
        'position',
        'postponed',
        'request',
        'rest',
        'route',
        'session',
        'tier',
        'work',
    )

    def __init__(self, request: Request, session: SessionRecord, order: int) -> None:
        self.request, self.session, self.order = request, session, order
        self.position = 0
        self.flying = False
        self.follower: Job | None = None
        self.headroom = False
        self.postponed = self.charged = 0.0
        self.admission: Admission | None = None
        self.outcome: Outcome | None = None

    def take_route(self, tier: Tier, key: float, limit: float, table: StepTable, mixed_steps: bool) -> None:
        """Take the route of a tier. Raises ValueError for a network without step times."""
        route: Route = self.request.routes[tier]
        times = [table.curve(unit.network).typical[1] for unit in route]
        rest = [0.0]
        for time in reversed(times[1:]):
            rest.append(rest[-1] + time)
        self.tier, self.route, self.key, self.limit = tier, route, key, limit
        self.labels = tuple(unit.network if mixed_steps else _label(unit) for unit in route)
        self.rest = tuple(reversed(rest))
        self.work = rest[-1] + times[0]

    @property
    def account(self) -> Hashable:
        """The account whose share of the device's time it is served from."""
        return self.request.session if self.request.account is None else self.request.account

    @property
    def begun(self) -> int:
        """Number of units that are done or on the device."""
        return self.position + self.flying


# A place in a queue: key, order of submission, job, position on its route. The first two determine the order.
Place = tuple[float, int, Job, int]
Queues = dict[str, list[Place]]


def enqueue(queues: Queues, job: Job, position: int) -> None:
    """Put a job into the queue of the unit at ``position``."""
    insort(queues.setdefault(job.labels[position], []), (job.key, job.order, job, position))


def dequeue(queues: Queues, job: Job) -> bool:
    """Take a job out of the queue that it waits in; return whether it was there."""
    if job.position == len(job.route):
        return False
    label = job.labels[job.position]
    queue = queues.get(label, [])
    index = bisect_left(queue, (job.key, job.order))
    if index == len(queue) or queue[index][2] is not job:
        return False
    del queue[index]
    if not queue:
        del queues[label]
    return True


def _label(unit: Unit) -> str:
    return f'{unit.network} {unit.step}/{unit.steps}'

"""The waiting ticks: which are admitted and what they are promised, and what happens to promises when others overrun."""
from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf

from .arrivals import Arrivals
from .jobs import Job, Place, dequeue
from .plan import ROUNDING, Device, Plan, Planned, Planner, network_of
from .settings import Policy, Settings
from .shares import Shares
from .step_table import StepTable
from .tick_queues import TickQueues, lower_tier
from .work import TIER_WORDS, Admission, Tier


CLAIMED = 10  # admitted ticks after which a claim ends


class Margin(enum.Enum):
    """How certain it must be that a tick is in time: to promise it, to prefer an attempt to a lower tier, or to a refusal."""

    CERTAIN = 'by the tail of its plan'
    LIKELY = 'if its batches take as much longer as they do in one case of five'
    EXPECTED = 'if they take their typical times'


@dataclass
class _Claim:
    """
    The claim of a session that was refused although it was within its share of the device: its next ticks have ``lead``
    [s] from their arrival to their limit, and need ``work`` [s] of that. It ends when ``left`` ticks have been admitted.
    """

    lead: float
    work: float
    left: int = CLAIMED


class Ticks:
    """
    With the ladder there is always a plan in which everything promised is in time; a tick is promised an answer if there
    is such a plan that includes it, and the device then follows that plan. Without it, batches follow the queues.

    A tick that cannot be promised in a tier is attempted in it, as long as no promise is broken: if it is likely to be in
    time, or, instead of a refusal, if it is in time by typical times. A refusal or a lower tier makes interruptions of the
    device no rarer: where these make the tail, it would only give up what mostly succeeds.

    ``give_up(job, reason)`` is called to end a job that can no longer be in time.

    A tick of a robot that has used more than its share of the device (``shares.py``) is admitted with what the others
    leave: it lowers only the tiers of other such robots, and is refused where it would take time from a robot that is
    within its share, was refused recently, and is expected to tick. Admitted ticks are never taken back for that.
    """

    def __init__(self, table: StepTable, planner: Planner, policy: Policy, settings: Settings,
                 give_up: Callable[[Job, str], None], arrivals: Arrivals) -> None:
        self._table, self._planner, self._policy, self._settings = table, planner, policy, settings
        self._give_up, self._arrivals = give_up, arrivals
        self._shares = Shares(settings.share, settings.share_period)
        self._claims: dict[Hashable, _Claim] = {}  # by session
        self._waiting = TickQueues(table, policy, settings)
        self._plan = Plan()

    @property
    def waiting(self) -> bool:
        """Whether there is a batch to draw once the device is free."""
        return bool(self._waiting.queues)

    def admit(self, job: Job, device: Device, now: float) -> Admission:
        """Choose the tier of a new job and queue it, or refuse it. No older tick of its session is waiting."""
        request, session = job.request, job.session
        if not self._policy.ladder:
            self._waiting.take_tier(job, min(request.routes))
            self._waiting.place(job)
            return Admission(job.tier)
        self.settle(device)
        if self._policy.order == 'edf':
            job.postponed = self._shares.postponement(job.account, now)
        tiers = session.tiers(request)
        reasons = [] if tiers[0] is min(request.routes) else [session.recovering()]
        for tier in tiers:
            self._waiting.take_tier(job, tier)
            plan, finish, reason = self._try(job, device)
            if plan is None and not job.postponed:
                plan = self._make_room(job, device, self._owing())
            if plan is None:
                plan, _, _ = self._try(job, device, Margin.LIKELY)
            if plan:
                break
            reasons.append(reason)
        if plan is None:
            plan = self._make_room(job, device, self._owing() if job.postponed else list(self._plan.ends))
            lowered = plan is not None
            if plan is None:
                plan, _, _ = self._try(job, device, Margin.EXPECTED)
            if plan is None:
                session.refused(tier)
                if job.postponed:
                    reasons.append(f'and this robot has used its share of the device for the next '
                                   f'{job.postponed * 1e3:.0f} ms')
                elif job.work <= job.limit - now:  # otherwise not even an idle device could have done it
                    self._claims[request.session] = _Claim(job.limit - now, job.work)
                return Admission(Tier.NONE, finish, reason=', '.join(reasons))
            if lowered:
                reasons.append('so others were lowered a tier')
        self._plan = plan
        self._served(request.session)
        session.fell(tier)
        expected, finish = plan.ends[job]
        promised = finish <= self._waiting.limit(request) + ROUNDING
        likely = expected + self._planner.likely(len(plan.batches)) * (expected - device.at)
        job.headroom = self._headroom(job, min(finish, likely))
        if not promised:
            reasons.append(f'{TIER_WORDS[tier]} may be {(finish - request.deadline) * 1e3:.1f} ms late, and is attempted')
        return Admission(tier, finish if promised else None, expected, ', '.join(reasons))

    def forget(self, session: Hashable) -> None:
        """Drop a session that has ended, or begins again."""
        self._claims.pop(session, None)

    def took(self, job: Job, seconds: float, now: float) -> None:
        """Charge a unit's device time [s] to the job's account."""
        self._shares.charge(job.account, seconds, now)

    def wait(self, job: Job) -> None:
        """Queue a job for its next unit."""
        self._waiting.wait(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        self._waiting.remove(job)

    def settle(self, device: Device) -> None:
        """
        Check that the plan still holds. One that is only delayed stays, as long as everything in it is expected in
        time; otherwise a new one is made, and jobs that would be late in it are degraded or given up.
        """
        if not self._policy.ladder:
            return
        first = self._first()
        if first is None and not self._waiting.queues:
            return
        delay = device.at - first.begin if first else 0.0
        if first is None or (delay > first.slack + ROUNDING and not self._delayed(delay)):
            self._repair(device)

    def slack(self, now: float) -> float:
        """Return how much longer the waiting ticks can wait [s]; infinite if there are none. The device is free."""
        if not self._waiting.queues:
            return inf
        first = self._first()
        return first.slack - max(0.0, now - first.begin) if first else 0.0

    def draw(self, now: float) -> tuple[list[Place], float, float] | None:
        """Return the places of the next batch and its typical and high time [s]. The device is free."""
        if not self._waiting.queues:
            return None
        if not self._policy.ladder:
            return self._planner.draw(self._waiting.queues, now)
        places = self._first().places
        self._plan.batches.popleft()
        for place in places:
            dequeue(self._waiting.queues, place[2])
        curve = self._table.curve(network_of(places[0]))
        return places, curve.typical[len(places)], curve.high[len(places)]

    def _try(self, job: Job, device: Device, margin: Margin = Margin.CERTAIN) -> tuple[Plan | None, float, str]:
        """Queue the job and return a plan with it and its finish [s]; or None, the finish, and why there is no plan."""
        if margin is Margin.CERTAIN:
            curves = [self._table.curve(unit.network) for unit in job.route]
            tail = max(device.tail, *(curve.high[1] - curve.typical[1] for curve in curves))
        else:
            tail = self._spread(margin, len(job.route)) * job.work
        finish = device.at + job.work + tail
        if finish <= job.limit:
            self._waiting.place(job)
            plan = self._planner.plan(self._waiting.queues, device)
            expected, finish = plan.ends[job]
            late = plan.late()
            if job in late and margin is not Margin.CERTAIN and expected + (
                    expected - device.at) * self._spread(margin, len(plan.batches)) <= job.limit:
                late.remove(job)
            taken = self._taken(finish, device.at) if job.postponed and not late else 0.0
            if not late and taken <= 0.0:
                job.limit = max(job.limit, finish)  # no later plan may make it later than this one
                plan.close()
                return plan, finish, ''
            self._waiting.remove(job)
            if taken > 0.0:
                return None, finish, (f'{TIER_WORDS[job.tier]} would take {taken * 1e3:.1f} ms from the next tick of a '
                                      f'robot that has had less')
            if finish <= job.limit:
                over = (plan.ends[late[0]][1] - late[0].limit) * 1e3
                return None, finish, (f'{TIER_WORDS[job.tier]} would make {len(late)} admitted answers late, the first '
                                      f'by {over:.1f} ms')
        return None, finish, f'{TIER_WORDS[job.tier]} would finish {(finish - job.limit) * 1e3:.1f} ms late'

    def _spread(self, margin: Margin, batches: int) -> float:
        """Return the relative overrun that an attempt must tolerate and still be in time."""
        return self._planner.likely(batches) if margin is Margin.LIKELY else 0.0

    def _taken(self, finish: float, now: float) -> float:
        """Return by how much a claim's tick would be late after work until ``finish`` [s]; 0 if none would."""
        most = 0.0
        for session, claim in self._claims.items():
            at = self._arrivals.of(session)
            # An overdue tick is not waited for, but keeps its claim: an image may be late once.
            if at is not None and at + self._settings.overdue >= now and finish > at:
                most = max(most, finish + claim.work - (at + claim.lead))
        return most

    def _served(self, session: Hashable) -> None:
        claim = self._claims.get(session)
        if claim:
            claim.left -= 1
            if claim.left == 0:
                del self._claims[session]

    def _headroom(self, job: Job, finish: float) -> bool:
        routes = job.request.routes
        better = [tier for tier in routes if tier < job.tier]
        if not better:
            return True
        work = sum(self._table.typical(unit.network, 1) for unit in routes[max(better)])
        return finish + work - job.work + self._settings.headroom <= job.limit

    def _first(self) -> Planned | None:
        """Return the next batch of the plan, without jobs that have ended since."""
        batches = self._plan.batches
        while batches:
            first = batches[0]
            first.places = [place for place in first.places if place[2].outcome is None]
            if first.places:
                return first
            batches.popleft()
        return None

    def _delayed(self, delay: float) -> bool:
        """Delay the whole plan by ``delay`` [s] if everything in it is still expected in time; return whether it was."""
        ends = {job: (expected + delay, finish + delay) for job, (expected, finish) in self._plan.ends.items()
                if job.outcome is None}
        if any(expected > self._waiting.limit(job.request) + ROUNDING for job, (expected, _) in ends.items()):
            return False
        for job, (_, finish) in ends.items():
            job.limit = max(finish, self._waiting.limit(job.request))
        self._plan.ends = ends
        for planned in self._plan.batches:
            planned.begin += delay
            planned.end += delay
        self._plan.close()
        return True

    def _repair(self, device: Device) -> None:
        while True:
            plan = self._planner.plan(self._waiting.queues, device)
            spread = self._planner.spread(plan)
            if all(self._keep(job, expected, finish, (expected - device.at) * spread)
                   for job, (expected, finish) in plan.ends.items()):
                plan.close()
                self._plan = plan
                return

    def _keep(self, job: Job, expected: float, finish: float, spread: float) -> bool:
        """
        Return whether a job stays as it is planned. One that may still be in time, if the batches before it take as much
        less than expected as they have been taking more (``spread`` [s]), stays, with what is left of its promise; no
        job is admitted at the cost of that.
        """
        request, last = job.request, job.begun == len(job.route)
        job.limit = max(finish, self._waiting.limit(request))
        if finish <= self._waiting.limit(request) or last:
            return True
        if self._degrade(job):
            return False
        if expected - spread <= request.deadline:
            return True
        job.session.fell(max(request.routes))
        self._give_up(job, f'others took longer than expected, and it would be '
                           f'{(expected - request.deadline) * 1e3:.1f} ms late')
        return False

    def _degrade(self, job: Job) -> bool:
        """Put a job on the next lower tier possible from its current position; return whether there is one."""
        lower = lower_tier(job)
        if lower:
            self._waiting.change_tier(job, *lower)
            job.session.fell(job.tier)
        return lower is not None

    def _owing(self) -> list[Job]:
        """Return the admitted ticks of robots that had used more than their share of the device when these came."""
        return [job for job in self._plan.ends if job.postponed and job.outcome is None]

    def _make_room(self, job: Job, device: Device, others: list[Job]) -> Plan | None:
        """
        Return a plan that includes a job which would be refused, in its tier, by lowering the tiers of ``others``, or None:
        the second step of one is worth less than any answer to another.
        """
        lower = [(other, found) for other in others if other.outcome is None and (found := lower_tier(other))]
        lowered: list[tuple[Job, Tier, int, float]] = []
        plan = None
        while lower and plan is None:
            count = max(1, len(lowered))  # lowered in total: 1, then 2, 4, 8
            for other, found in lower[:count]:
                lowered.append((other, other.tier, other.position, other.limit))
                self._waiting.change_tier(other, *found)
            del lower[:count]
            plan, _, _ = self._try(job, device)
        for other, tier, position, limit in lowered:
            if plan:
                other.session.fell(other.tier)
            else:
                self._waiting.change_tier(other, tier, position)
                other.limit = limit
        return plan

"""What holds for the scheduler whatever comes: arrivals, overruns, failures, sessions that go, clocks that jump."""
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from virtual_device import BRANCH, DECODE, MS, ROUTES, VirtualDevice, table, tick

from worldmodel_ros.serving.scheduler import Kind, Outcome, Policy, Request, Scheduler, Settings, Tier

POLICIES = [Policy(order, ladder, mixed)
            for order in ('fifo', 'edf') for ladder in (False, True) for mixed in (False, True)]
SESSIONS = st.sampled_from('abcd')
BUDGETS = st.floats(0.5 * MS, 80 * MS)
TIERS = st.sets(st.sampled_from(list(ROUTES)), min_size=1)


class AnyService(RuleBasedStateMachine):
    """A service that does everything a scheduler allows, in any order, on a device of any speed."""

    @initialize(policy=st.sampled_from(POLICIES), tail=st.sampled_from([0.0, 3.0]))
    def start(self, policy, tail):
        self.scheduler = Scheduler(table(tail), policy, Settings(recovery_ticks=2))
        self.now = self.newest = 100.0
        self.count = 0
        self.batch = None
        self.admitted, self.refused, self.completed = {}, set(), {}
        self.computed = {}  # units whose batch finished, by request
        self.finished_at = {}
        self.last_answer = {}  # by session, the newest sequence that was answered

    def submit(self, request):
        admission = self.scheduler.submit(request, self.now)
        if admission.admitted:
            self.admitted[request.id] = request
        else:
            assert admission.reason
            self.refused.add(request.id)
        self.collect()

    @rule(session=SESSIONS, budget=BUDGETS, tiers=TIERS)
    def a_tick_comes(self, session, budget, tiers):
        self.count += 1
        routes = {tier: ROUTES[tier] for tier in tiers}
        self.submit(Request(self.count, session, self.count, Kind.TICK, self.now, self.now + budget, routes))

    @rule(session=SESSIONS)
    def a_tick_comes_out_of_order(self, session):
        self.count += 1
        self.submit(Request(self.count, session, self.count - 5, Kind.TICK, self.now, self.now + 0.05, ROUTES))

    @rule(session=SESSIONS, budget=st.floats(1 * MS, 0.5), idle=st.booleans())
    def background_work_comes(self, session, budget, idle):
        self.count += 1
        kind, route = (Kind.IDLE, {Tier.TWO_STEP: (DECODE,)}) if idle else (Kind.WHAT_IF, BRANCH)
        self.submit(Request(self.count, session, 0, kind, self.now, self.now + budget, route))

    @precondition(lambda self: self.batch is None)
    @rule()
    def the_device_is_free(self):
        self.batch = self.scheduler.next(self.now)
        self.collect()
        if self.batch:
            assert len({entry.unit.network for entry in self.batch.entries}) == 1
            assert len({entry.request.id for entry in self.batch.entries}) == len(self.batch.entries)
            for request, unit, tier in self.batch.entries:
                assert request.id in self.admitted and request.id not in self.completed
                route, done = request.routes[tier], self.computed.setdefault(request.id, [])
                if done and unit == route[0]:
                    done.clear()  # begun afresh, on the smaller model
                assert [*done, unit] == list(route[:len(done) + 1])

    @precondition(lambda self: self.batch is not None)
    @rule(factor=st.sampled_from([0.5, 1.0, 1.0, 1.0, 1.2, 3.0, 20.0]))
    def a_batch_finishes(self, factor):
        self.now += factor * (self.batch.expected - self.batch.begun)
        self.newest = max(self.newest, self.now)
        for request, unit, _ in self.batch.entries:
            self.computed[request.id].append(unit)
            self.finished_at[request.id] = self.now
        self.scheduler.finished(self.batch, self.now)
        self.batch = None
        self.collect()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def a_batch_fails(self):
        failed = {entry.request.id for entry in self.batch.entries} - set(self.completed)
        self.scheduler.failed(self.batch, self.now, 'broken')
        self.batch = None
        self.collect()
        assert all(self.completed[request_id].outcome is Outcome.FAILED for request_id in failed)

    @rule(seconds=st.sampled_from([0.1 * MS, 1 * MS, 5 * MS, 20 * MS, 0.2]))
    def time_goes_by(self, seconds):
        self.now += seconds

    @rule(seconds=st.sampled_from([-1 * MS, -0.5, -30.0, 30.0]))
    def the_clock_jumps(self, seconds):
        self.now += seconds

    @rule(session=SESSIONS, ahead=st.floats(0.0, 0.1))
    def a_tick_is_expected(self, session, ahead):
        self.scheduler.expect(session, self.now + ahead)
        assert 0.0 <= self.scheduler.phase(0.1) < 0.1

    @precondition(lambda self: set(self.admitted) - set(self.completed))
    @rule(data=st.data())
    def a_request_is_cancelled(self, data):
        request_id = data.draw(st.sampled_from(sorted(set(self.admitted) - set(self.completed))))
        assert self.scheduler.cancel(request_id, self.now)
        self.collect()
        assert self.completed[request_id].outcome is Outcome.CANCELLED
        assert not self.scheduler.cancel(request_id, self.now)

    @rule(session=SESSIONS)
    def a_session_closes(self, session):
        self.scheduler.close(session, self.now)
        self.collect()
        assert all(request_id in self.completed for request_id, request in self.admitted.items()
                   if request.session == session)

    def collect(self):
        for completion in self.scheduler.completions():
            request = completion.request
            assert request.id in self.admitted and request.id not in self.completed, 'completed twice, or refused'
            self.completed[request.id] = completion
            if completion.outcome is Outcome.DONE:
                assert self.computed[request.id] == list(request.routes[completion.tier])
            if completion.met:
                assert self.finished_at[request.id] <= request.deadline
            if request.kind is Kind.TICK and completion.outcome is Outcome.DONE:
                assert request.sequence > self.last_answer.get(request.session, -math.inf)
                self.last_answer[request.session] = request.sequence

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, 'scheduler'):
            assert self.scheduler.waiting == len(self.admitted) - len(self.completed)
            assert not self.refused & set(self.computed)

    def teardown(self):
        """Everything admitted ends, in as many calls as there is work."""
        if not hasattr(self, 'scheduler'):
            return
        for _ in range(20 * len(self.admitted) + 20):
            if self.batch:
                self.a_batch_finishes(1.0)
            self.the_device_is_free()
            if self.batch is None:
                wake = self.scheduler.wake_at(self.now)
                if wake is None:
                    break
                self.now = wake
        assert self.scheduler.waiting == 0
        assert set(self.completed) == set(self.admitted)


TestAnyService = AnyService.TestCase
TestAnyService.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

arrivals = st.lists(st.tuples(st.floats(0.0, 12 * MS), st.sampled_from('abcdefgh'), st.floats(2 * MS, 60 * MS), TIERS,
                              st.sampled_from([Kind.TICK, Kind.TICK, Kind.WHAT_IF])), max_size=30)


def requests(sequence):
    now = 0.0
    for k, (gap, session, budget, tiers, kind) in enumerate(sequence):
        now += gap
        if kind is Kind.TICK:
            yield tick(session, k, now, budget, {tier: ROUTES[tier] for tier in tiers})
        else:
            yield Request(k, session, 0, kind, now, now + 1.0, BRANCH)


@given(arrivals, st.sampled_from(['fifo', 'edf']), st.booleans(), st.sampled_from([0.0, 0.05]), st.floats(0.3, 1.0))
@settings(max_examples=100, deadline=None)
def test_an_admitted_tick_is_never_late_if_no_batch_takes_longer_than_its_typical_time(
        sequence, order, mixed, share, speed):
    scheduler = Scheduler(table(), Policy(order, True, mixed), Settings(background_share=share))
    device = VirtualDevice(scheduler, lambda batch: speed * (batch.expected - batch.begun)).play(requests(sequence))
    for completion in device.completions.values():
        if completion.request.kind is Kind.TICK and completion.outcome is not Outcome.SUPERSEDED:
            assert completion.met


@given(arrivals, st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_one_batch_that_takes_its_high_quantile_makes_no_promised_tick_late(sequence, overrun):
    count = iter(range(10_000))
    scheduler = Scheduler(table(tail=3.0), settings=Settings(background_share=0.0))
    device = VirtualDevice(scheduler, lambda batch: (batch.finish if next(count) == overrun else batch.expected)
                           - batch.begun).play(requests(sequence))
    for completion in device.completions.values():
        if completion.request.kind is Kind.TICK and completion.outcome is not Outcome.SUPERSEDED:
            assert completion.met or completion.admission.attempted

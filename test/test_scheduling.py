"""The scheduler by its behaviours, on virtual time: a pass of the big model takes 4 ms, one of the small model 1 ms."""
import tracemalloc

import pytest
from virtual_device import (BRANCH, DECODE, FIRST, MS, OBSERVE, ROUTES, SECOND, SMALL, WHOLE, VirtualDevice, branch,
                            table, tick)

from worldmodel_ros.serving.scheduler import (
    EDF, EDF_LADDER, FIFO, Kind, Outcome, Policy, Request, Scheduler, Settings, StepTable, Tier, Unit)

NO_RESERVE = Settings(reserve=0.0)


def device(policy=EDF_LADDER, settings=NO_RESERVE, duration=None, times=None):
    return VirtualDevice(Scheduler(times or table(), policy, settings), duration)


# Admission


def test_a_lone_tick_is_promised_the_sum_of_its_units_and_one_tail():
    admission = device(times=table(tail=2.0)).submit(tick('a'))
    assert admission.tier is Tier.TWO_STEP and admission.reason == ''
    assert admission.expected == pytest.approx(12 * MS)
    assert admission.finish == pytest.approx(14 * MS)


@pytest.mark.parametrize('budget, tier', [(12.5, Tier.TWO_STEP), (11.5, Tier.ONE_STEP), (7.5, Tier.SMALLER),
                                          (1.5, Tier.NONE)])
def test_a_tick_gets_the_best_tier_that_its_deadline_has_room_for(budget, tier):
    assert device().submit(tick('a', budget=budget * MS)).tier is tier


def test_a_refusal_says_for_each_tier_by_how_much_it_would_be_late():
    admission = device().submit(tick('a', budget=1.5 * MS))
    assert admission.reason == ('two steps would finish 10.5 ms late, one step would finish 6.5 ms late, '
                                'the smaller model would finish 0.5 ms late')
    assert admission.finish == pytest.approx(2 * MS)


def test_the_reserve_is_kept_before_the_deadline():
    assert device(settings=Settings(reserve=1 * MS)).submit(tick('a', budget=12.5 * MS)).tier is Tier.ONE_STEP


def test_the_rest_of_the_batch_in_flight_counts():
    robot = device()
    robot.submit(tick('a'))
    robot.now = 1 * MS
    admission = robot.submit(tick('b', at=1 * MS))
    assert admission.expected == pytest.approx(24 * MS)  # a, whose deadline is earlier, ends at 12 ms


def test_an_admission_never_makes_an_admitted_tick_late():
    robot = device()
    robot.submit(tick('a', budget=12 * MS))
    robot.now = 1 * MS
    later = robot.submit(tick('b', at=1 * MS, budget=11 * MS))
    robot.play([])
    assert robot.completions['a', 1].met
    assert robot.completions['b', 1].met if later.admitted else 'late' in later.reason


def test_a_refused_request_is_never_run_and_has_no_completion():
    robot = device()
    robot.submit(tick('a', budget=1 * MS))
    robot.play([])
    assert not robot.batches and not robot.completions


def test_without_a_ladder_everything_is_taken_at_its_best_tier_and_served_however_late():
    for policy in (FIFO, EDF):
        robot = device(policy).play(tick(f'{k}', budget=15 * MS) for k in range(8))
        assert {a.tier for a in robot.admissions.values()} == {Tier.TWO_STEP}
        assert {c.outcome for c in robot.completions.values()} == {Outcome.DONE}
        assert any(not c.met for c in robot.completions.values())


def test_others_give_up_a_step_before_anyone_is_refused():
    big_only = {tier: ROUTES[tier] for tier in (Tier.TWO_STEP, Tier.ONE_STEP)}
    robot = device(times=table(big_observe={1: 4.0}, big_denoise={1: 4.0}))
    robot.play([tick('a', budget=17 * MS, routes=big_only), tick('b', at=1 * MS, budget=17 * MS, routes=big_only)])
    assert robot.admissions['a', 1].tier is Tier.TWO_STEP and robot.admissions['b', 1].tier is Tier.ONE_STEP
    assert {c.tier for c in robot.completions.values()} == {Tier.ONE_STEP}
    assert all(c.met for c in robot.completions.values())
    assert 'two steps would finish' in robot.admissions['b', 1].reason


def test_nobody_is_lowered_for_one_who_is_refused_all_the_same():
    big_only = {tier: ROUTES[tier] for tier in (Tier.TWO_STEP, Tier.ONE_STEP)}
    robot = device(times=table(big_observe={1: 4.0}, big_denoise={1: 4.0}))
    robot.play([tick('a', budget=13 * MS, routes=big_only), tick('b', at=1 * MS, budget=13 * MS, routes=big_only)])
    assert not robot.admissions['b', 1].admitted
    assert robot.completions['a', 1].tier is Tier.TWO_STEP and robot.completions['a', 1].met


def test_a_network_without_step_times_is_refused_by_name():
    with pytest.raises(ValueError, match='huge/denoise'):
        device().submit(tick('a', routes={Tier.TWO_STEP: (Unit('huge/denoise'),)}))


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match='at least one tier'):
        Request('x', 's', 0, Kind.TICK, 0.0, 1.0, {})
    with pytest.raises(ValueError, match='deadline'):
        Request('x', 's', 0, Kind.WHAT_IF, 0.0, float('inf'), BRANCH)
    robot = device()
    robot.submit(tick('a'))
    with pytest.raises(ValueError, match='open already'):
        robot.submit(tick('a'))


# Batches


def test_units_of_different_steps_share_a_batch_where_steps_are_mixed():
    def batches(mixed):
        robot = device(Policy('edf', True, mixed))
        robot.play([tick('a'), tick('b', at=5 * MS, budget=20 * MS, routes={Tier.ONE_STEP: ROUTES[Tier.ONE_STEP]})])
        return [{entry.unit for entry in batch.entries} for batch in robot.batches]
    assert {SECOND, WHOLE} in batches(True)
    assert all(len(units) == 1 for units in batches(False))


def test_a_batch_is_no_larger_than_its_most_urgent_member_can_bear():
    crowd = [tick('a', budget=13 * MS), *(tick(name, budget=60 * MS) for name in 'bcd')]
    robot = device()
    for request in crowd:
        robot.scheduler.submit(request, 0.0)
    robot.play([])
    assert len(robot.batches[0].entries) < 4
    assert all(c.met for c in robot.completions.values()) and len(robot.completions) == 4


def test_a_batch_that_saves_nothing_is_not_made():
    linear = {1: 4.0, 2: 8.0, 4: 16.0}
    robot = device(times=table(big_observe=linear, big_denoise=linear))
    for name in 'ab':
        robot.scheduler.submit(tick(name), 0.0)
    robot.play([])
    assert all(len(batch.entries) == 1 for batch in robot.batches)


def test_max_batch_bounds_a_network():
    def largest(settings):
        robot = device(settings=settings)
        for name in 'abcd':
            robot.scheduler.submit(tick(name, budget=1.0), 0.0)
        robot.play([])
        return max(len(batch.entries) for batch in robot.batches if batch.network == 'big/observe')
    assert largest(NO_RESERVE) == 4
    assert largest(Settings(reserve=0.0, max_batch={'big/observe': 2})) == 2


def test_the_earlier_deadline_goes_first_under_edf_and_the_earlier_arrival_under_fifo():
    def first(policy):
        robot = device(policy, settings=Settings(max_batch={'big/observe': 1}))
        robot.scheduler.submit(tick('patient', budget=90 * MS), 0.0)
        robot.scheduler.submit(tick('urgent', at=1e-6, budget=20 * MS), 1e-6)
        robot.play([])
        return robot.batches[0].entries[0].request.session
    assert (first(FIFO), first(EDF), first(EDF_LADDER)) == ('patient', 'urgent', 'urgent')


# Broken promises


def test_after_an_overrun_a_tick_is_served_at_a_lower_tier_rather_than_late():
    slow = iter([16 * MS])
    robot = device(duration=lambda batch: next(slow, batch.expected - batch.begun))
    robot.submit(tick('a', budget=22 * MS))
    robot.play([])
    assert robot.completions['a', 1].tier is Tier.ONE_STEP and robot.completions['a', 1].met
    assert robot.units(('a', 1)) == [OBSERVE, WHOLE]


def test_a_tick_that_has_not_begun_falls_to_the_smaller_model():
    slow = iter([25 * MS])
    robot = device(duration=lambda batch: next(slow, batch.expected - batch.begun))
    robot.play([tick('a', budget=60 * MS), tick('b', at=1 * MS, budget=30 * MS)])
    assert robot.admissions['b', 1].tier is Tier.TWO_STEP
    assert robot.units(('b', 1)) == list(SMALL) and robot.completions['b', 1].met


def test_what_cannot_be_in_time_any_more_is_given_up_at_once_and_never_met():
    slow = iter([40 * MS])
    robot = device(duration=lambda batch: next(slow, batch.expected - batch.begun))
    robot.play([tick('a', budget=60 * MS), tick('b', at=1 * MS, budget=20 * MS)])
    gone = robot.completions['b', 1]
    assert gone.outcome is Outcome.GIVEN_UP and not gone.met and gone.finish == pytest.approx(40 * MS)
    assert not robot.units(('b', 1)) and 'late' in gone.reason
    assert robot.completions['a', 1].met


def test_what_is_on_the_device_does_not_change_its_model():
    times = iter([4 * MS, 30 * MS])
    robot = device(duration=lambda batch: next(times, batch.expected - batch.begun))
    robot.play([tick('a', budget=20 * MS), tick('b', at=18 * MS)])
    # At 18 ms, a's first step is overdue, and its second one would end at 22 ms.
    assert robot.completions['a', 1].outcome is Outcome.GIVEN_UP and robot.units(('a', 1)) == [OBSERVE, FIRST]
    assert robot.completions['a', 1].finish == pytest.approx(18 * MS)


def test_an_answer_that_came_late_is_not_reported_as_met():
    slow = iter([4 * MS, 4 * MS, 50 * MS])
    robot = device(duration=lambda batch: next(slow))
    robot.play([tick('a')])
    assert robot.completions['a', 1].outcome is Outcome.DONE and not robot.completions['a', 1].met


def test_the_failure_of_a_batch_ends_its_requests_and_nothing_else():
    robot = device()
    robot.submit(tick('a'))
    robot.now = 1 * MS
    robot.submit(tick('b', at=1 * MS))
    robot.fail('out of memory')
    robot.play([])
    assert robot.completions['a', 1].outcome is Outcome.FAILED and robot.completions['a', 1].reason == 'out of memory'
    assert robot.completions['b', 1].met
    robot.submit(tick('a', 2, at=robot.now))
    robot.play([])
    assert robot.completions['a', 2].met


# Recovery


def test_a_session_goes_down_at_once_and_up_only_after_ticks_with_headroom():
    robot, tiers = device(settings=Settings(reserve=0.0, recovery_ticks=3)), []
    for k, budget in enumerate([35, 9, 35, 35, 35, 35]):
        tiers.append(robot.submit(tick('a', k, at=robot.now, budget=budget * MS)).tier)
        robot.play([])
    one, two = Tier.ONE_STEP, Tier.TWO_STEP
    assert tiers == [two, one, one, one, one, two]
    assert 'for 2 of 3 ticks' in robot.admissions['a', 4].reason


def test_without_headroom_a_session_stays_down():
    robot = device(settings=Settings(reserve=0.0, headroom=3 * MS, recovery_ticks=2))
    budgets = [9, *[13] * 6]  # two steps would fit into 13 ms, but with less than the headroom
    for k, budget in enumerate(budgets):
        robot.submit(tick('a', k, at=robot.now, budget=budget * MS))
        robot.play([])
    assert {a.tier for a in robot.admissions.values()} == {Tier.ONE_STEP}


# Order within a session


def test_a_newer_tick_supersedes_one_that_has_not_begun():
    robot = device()
    robot.play([tick('other'), tick('a', 1, at=1 * MS), tick('a', 2, at=2 * MS)])
    assert robot.completions['a', 1].outcome is Outcome.SUPERSEDED and not robot.units(('a', 1))
    assert robot.completions['a', 2].met


def test_a_newer_tick_waits_for_one_that_has_begun():
    robot = device()
    robot.play([tick('a', 1), tick('a', 2, at=1 * MS)])
    assert robot.completions['a', 1].met and robot.completions['a', 2].met
    assert robot.admissions['a', 2].expected == pytest.approx(24 * MS)
    assert robot.completions['a', 1].finish < robot.completions['a', 2].finish


def test_an_older_or_repeated_sequence_is_refused():
    robot = device()
    robot.play([tick('a', 7)])
    assert not robot.submit(tick('a', 5, at=robot.now)).admitted
    assert 'sequence 7 came after 7' in robot.submit(tick('a', 7, at=robot.now)).reason


def test_closing_a_session_ends_all_of_it_and_drops_what_is_in_flight():
    robot = device()
    robot.submit(tick('a'))
    robot.submit(Request('dream', 'a', 0, Kind.WHAT_IF, 0.0, 1.0, BRANCH))
    robot.submit(tick('b'))
    robot.scheduler.close('a', 1 * MS)
    robot.play([])
    assert robot.completions['a', 1].outcome is robot.completions['dream'].outcome is Outcome.CANCELLED
    assert robot.completions['b', 1].met
    robot.submit(tick('a', 1, at=robot.now))  # the same name is a new session
    assert robot.admissions['a', 1].admitted


# Background work


def test_background_work_runs_only_while_no_tick_waits():
    robot = device()
    robot.play([branch('dream'), tick('a', at=1 * MS), tick('b', at=2 * MS)])
    kinds = [batch.kind for batch in robot.batches]
    assert kinds == [Kind.WHAT_IF, *[Kind.TICK] * (len(kinds) - 3), *[Kind.WHAT_IF] * 2]
    assert robot.units('dream') == [FIRST, SECOND, DECODE]


def test_branches_are_batched_among_themselves():
    robot = device()
    for k in range(4):
        robot.scheduler.submit(branch(f'{k}'), 0.0)
    robot.play([])
    assert [len(batch.entries) for batch in robot.batches] == [4, 4, 4]


def test_background_work_is_out_of_the_way_when_a_tick_is_expected():
    robot = device(settings=Settings(reserve=0.0, blocking=0.0))
    robot.scheduler.expect('a', 6 * MS)
    robot.play([branch('dream'), tick('a', at=6 * MS)])
    assert robot.admissions['a', 1].expected == pytest.approx(18 * MS)  # as if there were no background work
    assert robot.batches[0].kind is Kind.WHAT_IF and robot.batches[1].kind is Kind.TICK


def test_a_batch_of_branches_is_made_as_large_as_the_gap_allows():
    robot = device(settings=Settings(reserve=0.0, blocking=0.0))
    robot.scheduler.expect('a', 5.5 * MS)
    for k in range(4):
        robot.scheduler.submit(branch(f'{k}'), 0.0)
    assert len(robot.scheduler.next(0.0).entries) == 2


def test_an_expected_tick_that_does_not_come_is_not_waited_for_for_ever():
    robot = device(settings=Settings(overdue=50 * MS, blocking=0.0, background_share=0.0))
    robot.scheduler.expect('gone', 1 * MS)
    robot.play([branch('dream')])
    assert robot.batches[0].begun == pytest.approx(51 * MS)
    assert robot.completions['dream'].met


def test_background_work_does_not_starve_while_ticks_leave_time():
    # Every 4 ms a tick is expected, so that no unit of 4 ms ever fits in between; half of the time is free.
    settings = Settings(reserve=0.0, blocking=0.0, background_share=0.04)
    robot = device(settings=settings)
    ticks = [tick(f'{k % 100}', k, at=4 * MS * k, routes={Tier.SMALLER: SMALL}) for k in range(400)]
    for request in ticks:
        robot.scheduler.expect(request.session, request.arrival)
    # Sessions tick again after 0.4 s: expected anew each time.
    for request in [branch('dream', budget=1.2), *ticks]:
        if request.arrival > robot.now:
            robot.play([], until=request.arrival)
        robot.submit(request)
        if request.kind is Kind.TICK:
            robot.scheduler.expect(request.session, request.arrival + 400 * MS)
    assert robot.completions['dream'].met
    begun = [batch.begun for batch in robot.batches if batch.kind is Kind.WHAT_IF]
    assert all(after - before < 4 * MS / 0.04 + 20 * MS for before, after in zip([0.0, *begun], begun))
    assert all(robot.completions[request.id].met for request in ticks[:-1])


@pytest.mark.parametrize('longest, units', [(1.0, [1.0, 2.0, 3.0]), (10.0, [])])
def test_a_unit_that_no_gap_is_long_enough_for_waits_as_long_as_is_allowed(longest, units):
    # A tick is expected every 4 ms for 3.5 s; the share of a unit of 4 ms would come after 8 s.
    robot = device(settings=Settings(blocking=0.0, overdue=0.0, background_share=0.0005, longest_wait=longest))
    robot.scheduler.submit(branch('question', budget=30.0), 0.0)
    begun = []
    for k in range(875):
        robot.scheduler.expect('a', 4 * MS * (k + 0.9))
        batch = robot.scheduler.next(4 * MS * k)
        if batch:
            begun.append(batch.begun)
            robot.scheduler.finished(batch, batch.begun + 4 * MS)
    assert begun == pytest.approx(units, abs=10 * MS)


@pytest.mark.parametrize('budget, first', [(15, Kind.TICK), (17, Kind.WHAT_IF)])
def test_background_work_goes_out_of_turn_only_if_the_ticks_that_wait_have_the_time(budget, first):
    robot = device(settings=Settings(reserve=0.0, background_share=0.04))  # 4 ms in 100 ms
    robot.scheduler.submit(branch('dream'), 0.0)
    robot.now = 0.2
    robot.scheduler.submit(tick('a', at=0.2, budget=budget * MS, routes={Tier.TWO_STEP: ROUTES[Tier.TWO_STEP]}), 0.2)
    robot.play([])
    assert robot.batches[0].kind is first
    assert robot.completions['a', 1].met


def test_a_batch_out_of_turn_takes_no_longer_than_one_unit():
    robot = device(settings=Settings(reserve=0.0, blocking=0.0, background_share=0.04))
    for k in range(4):
        robot.scheduler.submit(branch(f'{k}'), 0.0)
    robot.scheduler.expect('a', 0.2)
    assert len(robot.scheduler.next(0.1999).entries) == 1


def test_a_branch_ends_at_its_deadline_with_what_was_done():
    robot = device()
    robot.play([branch('dream', budget=7 * MS)])
    end = robot.completions['dream']
    assert end.outcome is Outcome.GIVEN_UP and end.done == 2
    assert end.finish == pytest.approx(8 * MS)  # the unit in flight is not interrupted


def test_idle_work_comes_after_what_if_unless_it_has_waited_long():
    routes = {Tier.TWO_STEP: (DECODE,)}
    robot = device(settings=Settings(max_batch={'big/decode': 1}, idle_patience=0.3))
    robot.scheduler.submit(branch('picture', routes=routes, kind=Kind.IDLE), 0.0)
    robot.scheduler.submit(branch('young', budget=0.2, routes=routes), 0.0)
    robot.scheduler.submit(branch('late', budget=0.5, routes=routes), 0.0)
    robot.play([])
    assert [batch.entries[0].request.id for batch in robot.batches] == ['young', 'picture', 'late']


def test_the_best_phase_is_in_the_middle_of_the_widest_gap():
    scheduler = Scheduler(table())
    assert scheduler.phase(0.1) == 0.0
    for k, at in enumerate([10.02, 20.04, 30.98]):
        scheduler.expect(k, at)
    assert scheduler.phase(0.1) == pytest.approx(0.06)


def test_ticks_that_are_expected_for_hours_take_no_memory():
    scheduler = Scheduler(table())
    tracemalloc.start()
    for k in range(30_000):
        scheduler.expect(k % 3, 0.1 * k)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 20_000


# Clocks


def test_a_clock_that_goes_back_a_little_stands_still():
    scheduler = Scheduler(table(), EDF_LADDER, NO_RESERVE)
    scheduler.submit(tick('a', at=10.0), 10.0)
    batch = scheduler.next(9.5)
    assert batch.begun == 10.0
    scheduler.finished(batch, 9.9)
    assert scheduler.next(9.9).begun == 10.0


def test_after_a_clock_that_was_far_ahead_for_once_ticks_are_admitted_again():
    robot = device()
    robot.play([tick('a', 1)])
    robot.scheduler.next(1e6)
    assert robot.submit(tick('a', 2, at=robot.now)).tier is Tier.TWO_STEP
    with pytest.raises(ValueError, match='finite'):
        robot.scheduler.next(float('nan'))


def test_a_batch_that_is_not_the_one_in_flight_is_refused():
    scheduler = Scheduler(table())
    scheduler.submit(tick('a'), 0.0)
    batch = scheduler.next(0.0)
    assert scheduler.next(0.0) is None  # one device, one batch
    scheduler.finished(batch, 4 * MS)
    with pytest.raises(ValueError, match='not the one'):
        scheduler.finished(batch, 5 * MS)


def test_the_scheduler_keeps_its_step_table_up_to_date():
    times = table()
    robot = device(times=times, duration=lambda batch: 6 * MS)
    robot.play([tick('a', k, at=0.1 * k) for k in range(40)])
    assert isinstance(times, StepTable) and times.typical('big/observe', 1) == pytest.approx(6 * MS)

"""
The deadline ladder on virtual time: never late, never beyond the plan, back to quality without flapping.
"""
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel_ros.control.ladder import NS, Ladder, LastPlan, Settings, Tier

PERIOD, DEADLINE = 0.1, 0.05
SETTINGS = Settings(reserve=0.010, headroom=0.003, recovery_ticks=3)
PLAN = np.arange(8, dtype=np.float32).reshape(4, 2)

# A tick: base cost and cost of a denoising step [s], how late its work begins [s], whether the model breaks
# its promise.
ticks = st.lists(st.tuples(st.floats(0.0, 0.06), st.floats(0.0, 0.04), st.floats(0.0, 0.05), st.booleans()),
                 max_size=60)


def times(base, step):
    return lambda steps: base + steps * step


def drive(ladder, plan, sequence):
    """
    Play ticks as the engine would; yield for each the decision, the tier that was served and when [s], and
    whether its own plan was in time.
    """
    for k, (base, step, wait, overruns) in enumerate(sequence):
        received = k * PERIOD
        stamp, due, begun = round(received * NS), received + DEADLINE, received + wait
        limit = due - SETTINGS.reserve
        decision = ladder.decide(begun, due, times(base, step), plan.has_action(stamp))
        planned = begun + base + (0.1 if overruns else 0.0)
        if planned <= limit:
            plan.remember(PLAN, stamp)
        at = {Tier.STOP: begun, Tier.PLAN_ONLY: planned, Tier.LAST_PLAN: planned}.get(decision.tier, planned + 2 * step)
        served = decision.tier
        if served is not Tier.STOP and at > limit:
            at = max(begun, limit)
            served = ladder.overrun(decision, at, plan.has_action(stamp)).tier
        ladder.finished(decision, planned if decision.tier is Tier.STOP else planned + 2 * step)
        if served in (Tier.PLAN_ONLY, Tier.LAST_PLAN):
            assert plan.rest(stamp) is not None
        yield decision, served, at, planned <= limit


@given(ticks)
def test_no_tier_is_chosen_whose_predicted_finish_is_past_the_limit(sequence):
    for k, (decision, _, _, _) in enumerate(drive(Ladder(SETTINGS), LastPlan(PERIOD), sequence)):
        assert decision.limit == k * PERIOD + DEADLINE - SETTINGS.reserve
        if decision.tier is not Tier.STOP:
            assert decision.finish <= decision.limit


@given(ticks)
def test_a_plan_is_never_followed_beyond_its_end(sequence):
    in_a_row = 0
    for _, served, _, new_plan in drive(Ladder(SETTINGS), LastPlan(PERIOD), sequence):
        in_a_row = in_a_row + 1 if served in (Tier.PLAN_ONLY, Tier.LAST_PLAN) and not new_plan else 0
        assert in_a_row <= len(PLAN) - 1


@given(ticks)
def test_after_every_sequence_a_fast_model_is_back_at_two_steps_soon(sequence):
    ladder, plan = Ladder(SETTINGS), LastPlan(PERIOD)
    good = [(0.005, 0.005, 0.0, False)] * (2 * SETTINGS.recovery_ticks + 1)
    served = [s for _, s, _, _ in drive(ladder, plan, sequence + good)]
    assert served[-1] is Tier.TWO_STEP


@given(ticks)
def test_the_ladder_is_climbed_by_one_step_at_a_time_and_never_before_the_debounce(sequence):
    ladder = Ladder(SETTINGS)
    best, since_fall = [Tier.TWO_STEP], None
    for _ in drive(ladder, LastPlan(PERIOD), sequence):
        best.append(ladder.best)
    for k in range(1, len(best)):
        if best[k] > best[k - 1]:
            since_fall = k
        if best[k] < best[k - 1]:
            assert {best[k - 1], best[k]} in ({Tier.STOP, Tier.ONE_STEP}, {Tier.ONE_STEP, Tier.TWO_STEP})
            assert since_fall is not None and k - since_fall >= SETTINGS.recovery_ticks


@given(ticks)
def test_every_tick_is_served_by_its_limit_or_as_soon_as_it_is_begun(sequence):
    for k, (decision, served, at, _) in enumerate(drive(Ladder(SETTINGS), LastPlan(PERIOD), sequence)):
        begun = k * PERIOD + sequence[k][2]
        assert at <= max(decision.limit, begun)
        assert served is not Tier.STOP or decision.tier is not Tier.STOP or at == begun


def test_the_tiers_follow_the_time_that_is_left():
    chosen = {}
    for wait in (0.0, 0.012, 0.025, 0.035):
        chosen[wait] = Ladder(SETTINGS).decide(wait, DEADLINE, times(0.01, 0.01), True).tier
    assert chosen == {0.0: Tier.TWO_STEP, 0.012: Tier.ONE_STEP, 0.025: Tier.PLAN_ONLY, 0.035: Tier.LAST_PLAN}


def test_without_a_plan_what_does_not_fit_is_a_stop():
    decision = Ladder(SETTINGS).decide(0.0, DEADLINE, times(0.05, 0.0), False)
    assert decision.tier is Tier.STOP
    assert 'no plan has an action left' in decision.reason


def test_two_steps_return_only_after_enough_ticks_with_headroom():
    ladder = Ladder(SETTINGS)
    tiers = []
    slow, tight, fast = times(0.02, 0.012), times(0.014, 0.012), times(0.01, 0.005)
    for k, predict in enumerate([fast, slow, tight, fast, fast, tight, fast, fast, fast, fast]):
        decision = ladder.decide(k * PERIOD, k * PERIOD + DEADLINE, predict, True)
        ladder.finished(decision, decision.finish)
        tiers.append(decision.tier)
    # ``tight`` fits, but with less than the headroom: it does not count, and begins the count again.
    assert tiers == [Tier.TWO_STEP] + [Tier.ONE_STEP] * 8 + [Tier.TWO_STEP]


def test_a_stop_ends_after_enough_trials_on_time():
    ladder = Ladder(SETTINGS)
    ladder.fault('NaN')
    tiers = []
    for k in range(8):
        decision = ladder.decide(k * PERIOD, k * PERIOD + DEADLINE, times(0.01, 0.005), True)
        ladder.finished(decision, k * PERIOD + 0.02)
        tiers.append(decision.tier)
    assert tiers == [Tier.STOP] * 3 + [Tier.ONE_STEP] * 3 + [Tier.TWO_STEP] * 2


@pytest.mark.parametrize('base', [0.02, 0.045])
def test_a_stop_ends_when_plans_were_in_time_whatever_is_predicted(base):
    ladder = Ladder(SETTINGS)
    ladder.fault('NaN')
    tiers = []
    for k in range(6):
        decision = ladder.decide(k * PERIOD, k * PERIOD + DEADLINE, times(base, 0.03), k > 0)
        ladder.finished(decision, k * PERIOD + 0.02)
        tiers.append(decision.tier)
    bridge = Tier.PLAN_ONLY if base < DEADLINE - SETTINGS.reserve else Tier.LAST_PLAN
    assert tiers == [Tier.STOP] * 3 + [bridge] * 3


def test_a_late_trial_does_not_count():
    ladder = Ladder(SETTINGS)
    ladder.fault('NaN')
    for k in range(10):
        decision = ladder.decide(k * PERIOD, k * PERIOD + DEADLINE, times(0.01, 0.005), True)
        assert decision.tier is Tier.STOP
        ladder.finished(decision, k * PERIOD + 0.06)


def test_reasons_name_the_time_that_is_missing():
    decision = Ladder(SETTINGS).decide(0.0, DEADLINE, times(0.02, 0.015), True)
    assert decision.tier is Tier.ONE_STEP
    assert 'two steps would be ready 10.0 ms after the limit' in decision.reason


def test_a_last_plan_that_was_predicted_is_not_late():
    ladder = Ladder(SETTINGS)
    decision = ladder.decide(0.0, DEADLINE, times(0.05, 0.0), True)
    assert decision.tier is Tier.LAST_PLAN
    assert ladder.overrun(decision, decision.limit, True) is decision
    assert ladder.counts.late == 0
    assert ladder.overrun(decision, decision.limit, False).tier is Tier.STOP
    assert ladder.counts.late == 1


def test_served_ticks_are_counted_by_tier():
    ladder = Ladder(SETTINGS)
    for tier in (*Tier, Tier.TWO_STEP, Tier.LAST_PLAN):
        ladder.counts.served(tier)
    ladder.overrun(None, 0.0, True)
    assert asdict(ladder.counts) == {
        'two_step': 2, 'one_step': 1, 'smaller': 1, 'plan_only': 1, 'last_plan': 2, 'stop': 1, 'late': 1}


def test_the_last_plan_moves_on_with_the_stamps():
    plan = LastPlan(PERIOD)
    plan.remember(PLAN, 0)
    assert plan.rest(0).tolist() == PLAN.tolist()
    assert plan.rest(NS // 10).tolist() == PLAN[1:].tolist()
    assert plan.rest(NS * 3 // 10).tolist() == PLAN[3:].tolist()
    assert plan.rest(NS * 4 // 10) is None


@given(st.lists(st.integers(1, 3 * NS // 10), min_size=1, max_size=12))
def test_no_action_of_a_plan_serves_two_observations(gaps):
    plan = LastPlan(PERIOD)
    plan.remember(PLAN, 0)
    stamp, left = 0, len(PLAN)
    for gap in gaps:
        stamp += gap
        rest = plan.rest(stamp)
        assert rest is None or len(rest) < left
        left = 0 if rest is None else len(rest)


def test_a_plan_that_was_forgotten_serves_nothing():
    plan = LastPlan(PERIOD)
    assert not plan.has_action(0)
    plan.remember(PLAN, 0)
    plan.forget()
    assert plan.rest(0) is None

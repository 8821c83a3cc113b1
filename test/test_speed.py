"""The machine's speed, and the budget that goes with it."""

import json

import pytest
from scenarios import speed
from scenarios.catalogue import SYSTEMS
from scenarios.speed import (
    OWN, STRETCH, USUAL_PRODUCT, USUAL_TICK, VARIABLE, Budget, Speed, budget, budget_for, measure_again, measured,
    question_time)
from test_scenarios import Stage

# Products for each tick, on any machine, with as much again for what differs between processors.
ENGINE_IS_SLOW = 2.0 * USUAL_TICK / USUAL_PRODUCT


@pytest.fixture
def unasked(monkeypatch):
    """Nobody has asked for the speed in this process."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(speed, 'busy_share', lambda: 0.0)
    measured.cache_clear()
    yield
    measured.cache_clear()


@pytest.mark.realtime
def test_a_tick_takes_as_long_as_it_should_on_a_machine_of_this_speed():
    """What gets more time on a slow machine must not hide an engine that has become slow."""
    now = measured()
    assert now.tick_s <= ENGINE_IS_SLOW * now.product_s, str(now)


def test_what_other_programs_take_is_seen_and_what_needs_all_cores_says_so_beforehand(monkeypatch):
    times = iter([(100, 1000), (160, 1200)])  # ticks of the kernel
    monkeypatch.setattr(speed, '_core_times', lambda: next(times))
    assert speed.busy_share(0.0) == pytest.approx(0.3)
    monkeypatch.undo()
    used, total = speed._core_times()
    assert 0 < used < total
    one_robot, server = SYSTEMS[0], SYSTEMS[-1]
    needs = 'needs all cores, of which other programs may take 25% before it starts; here they take 30%'
    for busy, words in ((0.2, ''), (0.3, needs)):
        monkeypatch.setattr(speed, 'measured', lambda busy=busy: Speed(0.02, 0.001, busy))
        assert words in server.lacks() and bool(server.lacks()) is bool(words) and not one_robot.lacks()


def test_it_is_measured_once_and_known_to_the_processes_of_a_run(unasked, monkeypatch):
    asked = []
    monkeypatch.setattr(speed, 'tick_seconds', lambda: asked.append('tick') or 0.03)
    monkeypatch.setattr(speed, 'product_seconds', lambda: asked.append('product') or 0.001)
    assert measured() == measured() == Speed(0.03, 0.001)
    measured.cache_clear()  # as in another process
    assert measured() == Speed(0.03, 0.001) and asked == ['tick', 'product']
    assert '30.0 ms' in str(measured()) and '1.00 ms' in str(measured())


def test_what_was_measured_before_holds(unasked, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({'tick_s': 0.04, 'product_s': 0.002}))
    assert measured() == Speed(0.04, 0.002) and budget(2) == budget_for(0.04, 2)


@pytest.mark.parametrize('robots', [1, 2])
@pytest.mark.parametrize('tick', [0.010, 0.021, USUAL_TICK])
def test_a_usual_machine_runs_as_configured(tick, robots):
    assert budget_for(tick, robots) == Budget(0.05, 0.1)


@pytest.mark.parametrize('robots', [1, 2])
def test_a_slower_machine_gets_more_time_and_never_less(robots):
    budgets = [budget_for(k / 1000, robots) for k in range(10, 200)]
    assert budgets == sorted(budgets)
    for k, given in enumerate(budgets, start=10):
        # Two steps fit, less reserve and headroom, and no image comes before the last one is answered.
        assert given.deadline - 0.015 > k / 1000
        assert given.period >= given.deadline
    assert budget_for(0.042, 1).period == 0.1 < budget_for(0.042, 2).period


@pytest.mark.parametrize('tick, seconds', [(0.010, 4), (USUAL_TICK, 4), (2 * USUAL_TICK, 32)])
def test_questions_get_more_time_where_ticks_leave_less(tick, seconds):
    assert question_time(tick) == seconds and question_time(tick, robots=2) == pytest.approx(3 * seconds, abs=2)


def test_it_is_measured_again_when_that_is_asked_for(unasked, monkeypatch):
    ticks = iter([0.03, 0.06])
    monkeypatch.setattr(speed, 'tick_seconds', lambda: next(ticks))
    monkeypatch.setattr(speed, 'product_seconds', lambda: 0.001)
    assert measured().tick_s == 0.03
    assert measure_again() == measured() == Speed(0.06, 0.001, 0.0)
    measured.cache_clear()  # as in a process that is started then
    assert measured().tick_s == 0.06


@pytest.mark.parametrize('system', SYSTEMS, ids=lambda system: system.name)
def test_a_second_for_what_other_programs_take_is_waited_where_that_decides(unasked, monkeypatch, system):
    monkeypatch.setattr(speed, 'tick_seconds', lambda: 0.02)
    monkeypatch.setattr(speed, 'product_seconds', lambda: 0.001)
    monkeypatch.setattr(speed, 'busy_share', lambda: 0.3)
    Stage(None).make_room(system)
    assert ('other programs take 30%' in str(measured())) is bool(system.lacks()) is (system is SYSTEMS[-1])
    assert 'other programs' not in str(measure_again(others=False))


def test_ticks_that_take_longer_in_the_node_get_more_time(unasked, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({'tick_s': 0.022, 'product_s': 0.001}))
    assert budget(own=STRETCH * 0.022) == Budget()
    assert budget(own=STRETCH * 0.040) == budget_for(0.040, 1)
    assert budget(own=10.0) == budget_for(OWN * 0.022, 1), 'a node that has become slow is no slow machine'


@pytest.mark.parametrize('robots', [1, 2])
def test_ticks_leave_time_for_questions_on_a_slow_machine(robots):
    assert budget_for(0.019, robots, questions=True) == Budget()
    for tick in (0.03, 0.05, 0.08):
        given = budget_for(tick, robots, questions=True)
        assert given.tick == tick
        assert given.deadline == budget_for(tick, robots).deadline
        assert given.period >= robots * 1.5 * tick + tick


def test_ticks_of_two_robots_leave_no_time_for_questions_on_a_usual_machine():
    assert budget_for(USUAL_TICK, 1, questions=True) == Budget()
    given = budget_for(USUAL_TICK, 2, questions=True)
    assert given == Budget(period=given.period) and given.period > 0.12

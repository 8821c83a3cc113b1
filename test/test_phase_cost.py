"""What phases cost, and what is offered, against the plain way to compute them."""
import random

import pytest
from hypothesis import given, settings, strategies as st

from worldmodel_ros.serving.scheduler import phases as module
from worldmodel_ros.serving.scheduler.phases import PhaseAdvice, Rhythm, least_cost, waiting_cost

PERIOD = 0.1
ROUTES = ('observe', 'denoise', 'denoise'), ('observe', 'denoise'), ('observe', 'policy', 'denoise', 'denoise')


def plain_cost(rhythms, period, route, times, largest):
    """The definition: every tick of three periods is played, everything is sorted and counted afresh."""
    coming = sorted((rhythm.phase + k * period, rhythm.lead, k) for rhythm in rhythms.values() for k in range(3))
    waiting: list[tuple[float, float, int, int]] = []  # deadline, arrival, period, networks passed
    free, cost, at = 0.0, 0.0, 0
    rest = [sum(times(network, 1) for network in route[passed:]) for passed in range(len(route))]
    while waiting or at < len(coming):
        if not waiting:
            free = max(free, coming[at][0])
        while at < len(coming) and coming[at][0] <= free + 1e-4:
            arrival, lead, k = coming[at]
            waiting.append((arrival + lead, arrival, k, 0))
            at += 1
        waiting.sort()
        deadline, _, k, passed = waiting[0]
        if free + rest[passed] > deadline:
            del waiting[0]
            cost += 10.0 if k == 1 else 0.0
            continue
        network = route[passed]
        batch = [tick for tick in waiting if route[tick[3]] == network][:largest]
        # As the scheduler does, which makes no larger batch for a saving that is next to nothing.
        each = [times(network, count) / count for count in range(1, len(batch) + 1)]
        batch = batch[:next(count for count, one in enumerate(each, 1) if one <= 1.02 * min(each))]
        free += times(network, len(batch))
        for tick in batch:
            waiting.remove(tick)
            deadline, arrival, k, passed = tick
            if passed + 1 < len(route):
                waiting.append((deadline, arrival, k, passed + 1))
            elif k == 1:
                needed = (free - arrival) / (deadline - arrival)
                cost += needed * needed + (10.0 if needed > 1.0 else 0.0)
    return cost


def times_of(unit, alone):
    """A batch takes ``unit`` s a member, but for the share of it that is the same for one as for many."""
    return lambda network, size: (unit + 0.001 * (network == 'observe')) * (1.0 - alone + alone * size)


@settings(max_examples=600, deadline=None)
@given(phases=st.lists(st.floats(0.0, 0.0999), min_size=1, max_size=9), together=st.booleans(),
       leads=st.lists(st.sampled_from([0.02, 0.035, 0.05]), min_size=9, max_size=9), route=st.sampled_from(ROUTES),
       unit=st.sampled_from([0.0015, 0.004, 0.006, 0.011]), alone=st.sampled_from([0.2, 0.6, 1.0]),
       largest=st.sampled_from([1, 2, 4, 32]))
def test_the_cost_is_that_of_the_plain_way_and_not_below_its_bound(phases, together, leads, route, unit, alone, largest):
    rhythms = {robot: Rhythm(phases[0] if together else phase, lead, 1 / 30)
               for robot, (phase, lead) in enumerate(zip(phases, leads))}
    times = times_of(unit, alone)
    cost = waiting_cost(rhythms, PERIOD, route, times, largest)
    assert cost == plain_cost(rhythms, PERIOD, route, times, largest)
    assert least_cost(rhythms, route, times) <= cost


@pytest.mark.parametrize('seed', range(12))
def test_offers_are_those_of_the_plain_way(seed, monkeypatch):
    rng = random.Random(seed)
    robots, unit = rng.randint(2, 8), rng.choice([0.002, 0.0035, 0.005])
    alone, largest = rng.choice([0.5, 1.0]), rng.choice([1, 8])
    phases = [rng.uniform(0.0, PERIOD) for _ in range(robots)]

    def offers():
        jitter, advice, now_at, found = random.Random(seed), PhaseAdvice(PERIOD), dict(enumerate(phases)), []
        for period in range(150):
            for robot in sorted(now_at, key=now_at.get):
                now = 10.0 + period * PERIOD + now_at[robot] + jitter.gauss(0.0, 5e-4)
                advice.ticked(robot, now, 0.035, 1 / 30)
                if earlier := advice.earlier(robot, now, ROUTES[0], times_of(unit, alone), largest):
                    found.append((period, robot, earlier))
                    now_at[robot] = (now_at[robot] - earlier) % PERIOD
        return found
    quick = offers()
    monkeypatch.setattr(module, 'waiting_cost', plain_cost)
    monkeypatch.setattr(module, 'least_cost', lambda *_: float('-inf'))
    assert quick == offers()


def test_phases_that_no_move_can_mend_enough_are_played_once(monkeypatch):
    played = []
    monkeypatch.setattr(module, 'waiting_cost', lambda *given: played.append(1) or waiting_cost(*given))
    advice = PhaseAdvice(PERIOD)
    for robot in range(4):
        advice.ticked(robot, 10.0 + 0.025 * robot, 0.035, 1 / 30)
    assert advice.earlier(3, 10.075, ROUTES[0], times_of(0.005, 1.0), 1) == 0.0
    assert len(played) == 1

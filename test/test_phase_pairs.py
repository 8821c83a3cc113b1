"""Moves of two sessions' phases at once: what holds for any phases, step times and robots that obey, wait, refuse or leave."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from worldmodel_ros.serving.scheduler import phases as module
from worldmodel_ros.serving.scheduler.phases import SETTLE, PhaseAdvice, Rhythm, waiting_cost

PERIOD, LEAD = 0.1, 0.035
ROUTE = 'observe', 'denoise', 'denoise'
LATE = 10.0  # cost of a late tick; those in time cost less than that together, with the few robots here
MOST = 5


@pytest.fixture(scope='module', autouse=True)
def costs_kept():
    """What phases cost is computed once: robots that stay where they are would have it computed at each tick."""
    known = {}

    def kept(rhythms, period, route, times, largest):
        key = times('observe', 1), tuple((name, round(rhythm.phase, 9)) for name, rhythm in rhythms.items())
        if key not in known:
            known[key] = waiting_cost(rhythms, period, route, times, largest)
        return known[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'waiting_cost', kept)
        yield


class Robots:
    """Robots that tick at their phases, 10 Hz, and take an offer after as many ticks as ``wait`` says; None: never."""

    def __init__(self, phases, unit, rate, jitter=0.0, wait=lambda robot: 1, seed=0):
        self.phases, self.spacing = dict(enumerate(phases)), 1.0 / rate
        self._unit, self._jitter, self._wait = unit, jitter, wait
        self._rng, self._taking, self._period = np.random.default_rng(seed), {}, 0
        self.advice = PhaseAdvice(PERIOD)
        self.offers = []  # (time, robot, how much earlier, the second half that is left of the move)

    def times(self, network, size):
        return size * self._unit

    def cost(self, moved=None):
        rhythms = {robot: Rhythm(phase, LEAD, self.spacing) for robot, phase in (self.phases | (moved or {})).items()}
        return waiting_cost(rhythms, PERIOD, ROUTE, self.times, 1)

    def late(self, moved=None):
        return int(self.cost(moved) // LATE)

    def run(self, seconds, seen=lambda robots: None):
        """``seen``: is called after each offer, before the robot takes it."""
        for _ in range(round(seconds / PERIOD)):
            self._period += 1
            for robot in sorted(self.phases, key=self.phases.get):
                now = self._period * PERIOD + self.phases[robot] + self._jitter * self._rng.uniform(-1.0, 1.0)
                self.advice.ticked(robot, now, LEAD, self.spacing)
                if earlier := self.advice.earlier(robot, now, ROUTE, self.times, 1):
                    self.offers.append((now, robot, earlier, self.advice._second))
                    seen(self)
                    if (wait := self._wait(robot)) is not None:
                        self._taking[robot] = wait, earlier
            for robot, (wait, earlier) in list(self._taking.items()):
                self._taking[robot] = wait - 1, earlier
                if wait <= 1:
                    self.phases[robot] = (self.phases[robot] - earlier) % PERIOD
                    del self._taking[robot]


# Phases are not taken all from one place, or no pair is ever needed; 4 to 9 ms a unit, three units a tick.
PHASES = st.lists(st.integers(0, 199).map(lambda part: part * 0.0005), min_size=2, max_size=MOST)
UNITS = st.integers(40, 90).map(lambda tenth: tenth * 1e-4)
RATES = st.sampled_from([20, 30, 60])


def test_pairs_are_offered_at_all():
    """Else nothing below is of any worth: phases are drawn as there, and counted."""
    rng, pairs = np.random.default_rng(0), 0
    for _ in range(20):
        robots = Robots(rng.uniform(0.0, PERIOD, 4), 0.0071, 30)
        robots.run(20.0)
        pairs += any(second for *_, second in robots.offers)
    assert pairs >= 3


def test_among_many_robots_no_two_are_moved_where_a_tick_stays_late():
    """With twelve, what eleven ticks in time cost together with one that is late is less than twelve."""
    rng = np.random.default_rng(1382)
    unit = float(rng.choice([0.0019, 0.0022, 0.0024]))
    robots, tried = Robots(rng.uniform(0.0, PERIOD, 12), unit, 30), 0
    for robot, phase in robots.phases.items():
        robots.advice.ticked(robot, 5.0 + phase, LEAD, robots.spacing)
    rhythms = robots.advice._rhythms

    def cost(moved):
        return waiting_cost({**rhythms, **moved}, PERIOD, ROUTE, robots.times, 1)
    before = cost({})
    assert before > LATE
    for robot in rhythms:
        for _ in range(len(rhythms) - 1):
            move, tried = robots.advice._best_pair(robot, robots.advice._choices(robot), before, cost), tried + 1
            assert not move.saves or before - move.saves < LATE
    assert tried == 132


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PHASES, UNITS, RATES)
def test_two_are_moved_only_where_a_tick_is_late_and_none_is_late_after(phases, unit, rate):
    def seen(robots):
        _, robot, earlier, second = robots.offers[-1]
        if second:
            assert second.first == robot != second.partner and second.moved == earlier
            both = {robot: (robots.phases[robot] - earlier) % PERIOD,
                    second.partner: (robots.phases[second.partner] - second.earlier) % PERIOD}
            assert robots.late() > 0 == robots.late(both)
    Robots(phases, unit, rate).run(12.0, seen)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PHASES, UNITS, RATES, st.integers(1, 8))
def test_robots_that_obey_are_soon_left_alone_and_not_more_of_their_ticks_are_late(phases, unit, rate, wait):
    robots = Robots(phases, unit, rate, wait=lambda robot: wait)
    before, late = robots.cost(), robots.late()
    robots.run(30.0)
    moved = len(robots.offers)
    assert moved <= 3 * len(phases) and robots.late() <= late and robots.cost() <= before + 1e-9
    robots.run(60.0)
    assert len(robots.offers) == moved


@settings(max_examples=6, deadline=None, derandomize=True)
@given(PHASES, UNITS, st.sampled_from([20, 30]), st.integers(0, 1000))
def test_phases_that_are_not_quite_the_same_each_time_do_not_make_it_flap(phases, unit, rate, seed):
    robots = Robots(phases, unit, rate, jitter=0.0005, seed=seed)
    robots.run(20.0)
    moved = len(robots.offers)
    robots.run(40.0)
    assert moved <= 3 * len(phases) and len(robots.offers) <= moved + 2, robots.offers


@settings(max_examples=20, deadline=None, derandomize=True)
@given(PHASES, UNITS, RATES, st.lists(st.sampled_from([None, 1, 2, 5, 30]), min_size=MOST, max_size=MOST))
def test_what_is_asked_is_images_of_less_than_a_period_one_robot_at_a_time_whatever_robots_do(phases, unit, rate, waits):
    robots = Robots(phases, unit, rate, wait=lambda robot: waits[robot])
    robots.run(20.0)
    for (now, robot, earlier, _), before in zip(robots.offers, [None, *robots.offers], strict=False):
        images = earlier * rate
        assert abs(images - round(images)) < 1e-6 and 1 <= round(images) < PERIOD * rate
        if before and now - before[0] < SETTLE - 0.01:  # the second half of a pair alone comes sooner, once the first has moved
            assert before[3] and (before[1], before[3].partner, before[3].earlier) == (before[3].first, robot, earlier)
            assert waits[before[1]] is not None


@settings(max_examples=30, deadline=None, derandomize=True)
@given(PHASES, UNITS, st.integers(0, MOST - 1))
def test_of_a_pair_whose_first_robot_does_not_come_earlier_the_second_is_not_asked_to(phases, unit, stubborn):
    robots = Robots(phases, unit, 30, wait=lambda robot: None if robot == stubborn else 1)
    robots.run(20.0)
    for (now, robot, _, second), after in zip(robots.offers, robots.offers[1:], strict=False):
        if second and robot == stubborn:  # what comes later is an offer of its own
            assert after[0] - now >= SETTLE - 0.01


@settings(max_examples=5, deadline=None, derandomize=True)
@given(PHASES, UNITS, RATES, st.integers(0, 1000), st.permutations(range(MOST)))
def test_equal_ticks_get_equal_offers(phases, unit, rate, seed, waits):
    def played():
        robots = Robots(phases, unit, rate, jitter=0.001, wait=lambda robot: 1 + waits[robot], seed=seed)
        robots.run(6.0)
        return robots.offers
    assert played() == played()

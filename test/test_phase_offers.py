"""Phases: whose ticks should come at another moment, and that a robot's camera gives it."""
import contextlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from fake_service import FakeService, serving
from gateway_rig import gateway
from hypothesis import given, settings, strategies as st
from test_serve_failover import Robot
from timed_backend import Rig
from virtual_device import MS, ROUTES, VirtualDevice, table, tick

from worldmodel_ros.inputs.ticks import NS, FramePacer, Pace
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.scheduler import Scheduler, StepTable, Tier, Unit
from worldmodel_ros.serving.scheduler.phases import SETTLE, PhaseAdvice, Rhythm, waiting_cost

PERIOD, LEAD, IMAGES = 0.1, 35 * MS, 1 / 30
BASE = Path(__file__).resolve().parents[1] / 'benchmarks' / 'results' / 'step_table_miss_curve_h100_base.json'


def times(first=0.012, more=0.012):
    """A route of one network: what one takes, and each more of a batch."""
    return ['whole'], lambda network, count: first + more * (count - 1)


def settled(phases, route=times(), largest=1, spacing=IMAGES, rounds=12):
    """The phases once all offers have been taken."""
    advice, phases = PhaseAdvice(PERIOD), dict(enumerate(phases))
    for period in itertools.count():
        for session, phase in sorted(phases.items(), key=lambda item: item[1]):
            now = period * PERIOD + phase
            advice.ticked(session, now, LEAD, spacing)
            if earlier := advice.earlier(session, now, *route, largest):
                phases[session] = (phase - earlier) % PERIOD
        if period * PERIOD > rounds * SETTLE:
            return phases


def cost(phases, route=times(), largest=1):
    return waiting_cost({session: Rhythm(phase, LEAD) for session, phase in phases.items()}, PERIOD, *route, largest)


def test_robots_that_tick_together_are_spread_over_the_images_of_their_cameras():
    phases = sorted(settled([0.0, 0.001, 0.002]).values())
    gaps = np.diff([*phases, phases[0] + PERIOD])
    assert min(gaps) > 0.03


def test_where_a_batch_of_several_costs_little_more_than_one_ticks_may_come_together():
    batch = times(0.031, 0.001)
    together, apart = {0: 0.0, 1: 0.0, 2: 0.05, 3: 0.05}, {0: 0.0, 1: 0.025, 2: 0.05, 3: 0.075}
    assert cost(together, batch, 4) < 10.0 < cost(apart, batch, 4)
    assert cost(together) < cost({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.05}), 'but not three where they cost as much as three'


def test_a_camera_without_a_choice_gets_no_offer_and_phases_that_are_good_are_left():
    assert settled([0.0, 0.001], spacing=0.0) == {0: 0.0, 1: 0.001}
    assert settled([0.0, 0.033, 0.066]) == {0: 0.0, 1: 0.033, 2: 0.066}


def test_a_robot_that_pauses_is_in_the_way_of_no_other():
    advice, offers = PhaseAdvice(PERIOD), {0: [], 1: []}
    for period in range(200):
        for session in (0, 1):
            if session == 0 or period < 5 or period >= 150:  # both are there, then one, and both again
                now = period * PERIOD + session * 0.001
                advice.ticked(session, now, LEAD, IMAGES)
                if advice.earlier(session, now, *times(0.03), 1):
                    offers[session].append(period)
    assert not [period for period in offers[0] if 30 < period < 150]
    assert max(offers[0] + offers[1]) >= 150


@settings(max_examples=20, deadline=None)
@given(places=st.lists(st.integers(0, 49), min_size=1, max_size=5), saving=st.floats(0.0, 1.0),
       rate=st.sampled_from([20, 30, 60]))
def test_offers_come_to_an_end_and_never_make_it_worse(places, saving, rate):
    phases = [place * 0.002 + 0.0005 for place in places]
    batch = times(0.012, 0.012 * (1.0 - saving))
    before = cost(dict(enumerate(phases)), batch, 4)
    after = settled(phases, batch, 4, 1 / rate)
    assert cost(after, batch, 4) <= before + 1e-9
    advice = PhaseAdvice(PERIOD)
    for session, phase in after.items():
        advice.ticked(session, phase, LEAD, 1 / rate)
    assert not any(advice.earlier(session, 200.0 + phase, *batch, 4) for session, phase in after.items())


def images(pacer, rate, seconds, begin=0, offers=(), jitter=0.0, seed=0):
    """Stamps [s] of the ticks of a camera; ``offers``: after so many images, so much earlier."""
    rng, taken = np.random.default_rng(seed), []
    for k in range(round(rate * seconds)):
        if k in dict(offers):
            pacer.come_earlier(dict(offers)[k])
        stamp = round((1.0 + begin + (k + jitter * rng.uniform(-1, 1)) / rate) * NS)
        pace = pacer.classify(stamp, 0.05, 1.0)
        pacer.take(stamp, pace)
        if pace in (Pace.TICK, Pace.NEW_EPISODE):
            taken.append(stamp / NS)
    return np.array(taken)


@pytest.mark.parametrize('rate, wanted, moved', [
    (30, 0.033, 1 / 30), (30, 0.067, 2 / 30), (30, 0.04, 1 / 30), (20, 0.05, 0.05), (60, 0.05, 0.05), (60, 0.017, 1 / 60),
    (10, 0.05, 0.0), (13, 0.05, 0.0), (30, 0.01, 0.0)])
@pytest.mark.parametrize('jitter', [0.0, 0.1])
def test_ticks_come_earlier_by_whole_images_and_no_step_is_long(rate, wanted, moved, jitter):
    pacer, undisturbed = FramePacer(PERIOD), FramePacer(PERIOD)
    taken = images(pacer, rate, 6.0, offers=[(40, wanted)], jitter=jitter)
    plain = images(undisturbed, rate, 6.0, jitter=jitter)
    assert pacer.moved == pytest.approx(moved, abs=0.2 / rate)
    steps, allowed = np.diff(taken), np.diff(plain)
    assert steps.max() <= allowed.max() + 0.3 / rate and (steps < 0.9 * allowed.min()).sum() <= round(moved * rate)
    off = (plain[-1] - taken[-1]) % PERIOD
    assert min(abs(off - moved), abs(off - moved + PERIOD), abs(off - moved - PERIOD)) < 0.3 / rate


def test_the_spacing_of_a_camera_is_told_where_there_is_a_choice():
    for rate, spacing in ((30, 1 / 30), (20, 0.05), (10, 0.0), (13, 0.0)):
        pacer = FramePacer(PERIOD)
        assert pacer.spacing == 0.0
        images(pacer, rate, 2.0)
        assert pacer.spacing == pytest.approx(spacing, rel=0.01)


def on_time_in_two_steps(phases, steps, routes, seconds=8.0):
    """Share of all ticks that were offered which a device of these step times answers in two steps, in time."""
    rng = np.random.default_rng(1)
    ticks = [tick(f'robot{session}', k, phase + k * PERIOD + rng.uniform(0, 0.001), LEAD, routes)
             for session, phase in enumerate(phases) for k in range(round(seconds / PERIOD))]
    played = VirtualDevice(Scheduler(steps)).play(sorted(ticks, key=lambda request: request.arrival))
    met = [completion.met and completion.tier is Tier.TWO_STEP for completion in played.completions.values()]
    return sum(met) / len(ticks)


def test_more_of_all_ticks_are_answered_in_two_steps_by_the_times_of_a_large_model_on_a_gpu():
    """Step times of ``base`` as measured on an H100; time itself is simulated."""
    steps = StepTable.from_dict(json.loads(BASE.read_text()))
    routes = {Tier.TWO_STEP: (Unit('base/observe'), Unit('base/denoise', 0, 2), Unit('base/denoise', 1, 2)),
              Tier.ONE_STEP: (Unit('base/observe'), Unit('base/denoise', 0, 1))}
    *batch, largest = Scheduler(steps).batches(routes[Tier.TWO_STEP])
    found = []
    for seed in range(3):
        phases = np.random.default_rng(seed).uniform(0.0, PERIOD, 4)
        after = settled(phases, batch, largest)
        found.append([on_time_in_two_steps(each, steps, routes) for each in (phases, [after[k] for k in range(4)])])
    random, advised = np.mean(found, 0)
    assert random < 0.85 and advised > 0.99, found


def test_nine_robots_of_a_compiled_model_fit_a_gpu_in_two_steps():
    """``base`` with its layers compiled for one session, about as on an H100 (tick_h100.json); time itself is simulated."""
    values = json.loads(BASE.read_text())
    compiled = {'base/observe': (3.9, 4.4), 'base/denoise': (3.2, 3.4)}
    for row in values['rows']:
        if row['batch'] == 1 and row['network'] in compiled:
            row['p50_ms'], row['p99_ms'] = compiled[row['network']]
    steps = StepTable.from_dict(values)
    routes = {Tier.TWO_STEP: (Unit('base/observe'), Unit('base/denoise', 0, 2), Unit('base/denoise', 1, 2)),
              Tier.ONE_STEP: (Unit('base/observe'), Unit('base/denoise', 0, 1))}
    *batch, largest = Scheduler(steps).batches(routes[Tier.TWO_STEP])
    phases = np.random.default_rng(0).uniform(0.0, PERIOD, 9)
    after = settled(phases, batch, largest)
    assert on_time_in_two_steps([after[k] for k in range(9)], steps, routes, 4.0) > 0.99


def test_what_ticks_take_together_is_what_the_table_says():
    networks, taken, largest = Scheduler(table()).batches(ROUTES[Tier.TWO_STEP])
    assert networks == ['big/observe', 'big/denoise', 'big/denoise'] and largest == 4
    assert [taken('big/denoise', count) for count in (1, 4)] == pytest.approx([0.004, 0.007])


@pytest.fixture
def replay(monkeypatch):
    """benchmarks/capacity_replay.py on the times of a device that others use; by robots, way and how many times slower."""
    monkeypatch.syspath_prepend(BASE.parents[1])
    import capacity_replay

    def played(robots, way, slower=1.0, times='batch_times_tiny_epyc_2_cores.json'):
        device = capacity_replay.RecordedDevice(json.loads((BASE.parent / times).read_text()), slower)
        return capacity_replay.play(device, robots, way, settle=8.0, seconds=10.0)
    return played


INTERRUPTED = 'batch_times_tiny_interrupted_epyc_2_cores.json'


def test_four_robots_whose_time_there_is_are_answered_in_two_steps_at_the_phases_that_are_offered(replay):
    ladder, offers = replay(4, 'ladder'), replay(4, 'offers')
    assert offers['two_steps'] >= 0.99 > ladder['two_steps'] and 1 <= offers['offers'] <= 4


@pytest.mark.parametrize('times', ['batch_times_tiny_epyc_2_cores.json', INTERRUPTED])
def test_where_the_period_has_no_room_for_two_steps_no_phase_is_offered_and_nothing_is_lost(replay, times):
    """On a device 2.2 times slower, three robots in two steps need all of its time and more."""
    ladder, offers = replay(3, 'ladder', 2.2, times), replay(3, 'offers', 2.2, times)
    assert offers['offers'] == 0 and offers['in_time'] >= ladder['in_time'] > 0.95


def test_what_is_expected_in_time_is_attempted_where_interruptions_let_nothing_be_promised(replay):
    first_come, ladder = replay(3, 'fifo', 2.2, INTERRUPTED), replay(3, 'ladder', 2.2, INTERRUPTED)
    assert ladder['attempted'] > 0.3 and ladder['attempted_late'] < 0.1 and ladder['refused'] < 0.05
    assert ladder['in_time'] > first_come['in_time'] + 0.05


def drive(rig, clients, periods, spacing, moved):
    """Tick together, each as much earlier as it has ``moved``; what was offered, as (period, client, earlier)."""
    begin, offers = rig.clock.now, []
    for period in range(1, periods + 1):
        times = [begin + period * PERIOD + number * MS - moved[number] for number in range(len(clients))]
        for at, number in sorted(zip(times, range(len(clients)), strict=True)):
            rig.clock.now = max(rig.clock.now, at)
            rig.tick(clients[number][0], period, spacing=spacing, moved=moved[number])
        rig.settle()
        for number, (_, listener) in enumerate(clients):
            if earlier := listener.replies[-1].earlier:
                offers.append((period, number, earlier))
                moved[number] += earlier
    return offers


def test_a_service_offers_one_robot_at_a_time_and_counts_who_took_it():
    rig = Rig(pictures=False)
    offers = drive(rig, [rig.open() for _ in range(3)], 80, IMAGES, [0.0] * 3)
    assert len(offers) >= 2 and offers[1][0] - offers[0][0] >= SETTLE / PERIOD - 1 and offers[0][1] != offers[1][1]
    counts = rig.service.stats()
    assert counts['phase_shifts_offered'] == counts['phase_shifts_taken'] == len(offers)


@pytest.mark.parametrize('spacing', [float('nan'), float('inf'), -1.0, 1e-12, 7.0])
def test_a_spacing_that_is_none_gives_no_offer_and_no_work(spacing):
    rig = Rig(pictures=False)
    assert drive(rig, [rig.open(), rig.open()], 50, spacing, [spacing * 0.0] * 2) == []


@pytest.mark.parametrize('over_network', [False, True])
def test_a_node_comes_earlier_as_the_server_offers_and_tells_it(tmp_path, over_network):
    service, pacer = FakeService(), FramePacer(PERIOD)
    images(pacer, 30, 1.0)
    with contextlib.ExitStack() as stack:
        if over_network:
            address = Endpoint(stack.enter_context(gateway(tmp_path, service)).url(''))
        else:
            address = stack.enter_context(serving(tmp_path / 'engine.sock', service)).path
        robot = Robot(address, pacer.come_earlier)
        stack.callback(robot.worker.stop)
        robot.drive_with_server()
        service.earlier = 0.033
        robot.tick()
        images(pacer, 30, 2.0, begin=1.0)
        robot.tick(spacing=pacer.spacing, moved=pacer.moved)
    assert pacer.moved == pytest.approx(1 / 30, rel=0.01)
    assert (service.ticks[-1].spacing, service.ticks[-1].moved) == (pacer.spacing, pacer.moved)


def test_where_ticks_are_late_and_one_move_mends_nothing_two_are_offered():
    """Four robots with 7.1 ms a unit, 85 % of the device's time: from these phases no move of one alone saves a tick."""
    period, unit, spacing = 0.1, 0.0071, 0.1 / 3
    phases = dict(enumerate(np.random.default_rng(0).uniform(0.0, period, 4)))
    route, advice, rng = ('observe', 'denoise', 'denoise'), PhaseAdvice(period), np.random.default_rng(1)

    def cost():
        rhythms = {robot: Rhythm(phase, 0.035, spacing) for robot, phase in phases.items()}
        return waiting_cost(rhythms, period, route, lambda network, size: size * unit, 1)
    assert cost() > 10.0  # a tick is late
    offered = []
    for number in range(1, 120):
        for robot in sorted(phases, key=phases.get):
            now = number * period + phases[robot] + 0.0005 * rng.uniform(-1.0, 1.0)
            advice.ticked(robot, now, 0.035, spacing)
            earlier = advice.earlier(robot, now, route, lambda network, size: size * unit, 1)
            if earlier:
                offered.append(robot)
                phases[robot] = (phases[robot] - earlier) % period
    assert len(offered) >= 2 and cost() < 4.0, (offered, cost())


def test_of_a_pair_the_second_is_not_moved_before_the_first_and_is_forgotten_with_its_session():
    period, unit, spacing = 0.1, 0.0071, 0.1 / 3
    phases = np.random.default_rng(0).uniform(0.0, period, 4)
    route, advice, offered = ('observe', 'denoise', 'denoise'), PhaseAdvice(period), []
    for number in range(1, 400):
        for robot in sorted(range(4), key=lambda robot: phases[robot]):
            now, second = number * period + phases[robot], advice._second
            advice.ticked(robot, now, 0.035, spacing)
            if advice.earlier(robot, now, route, lambda network, size: size * unit, 1):
                assert not second or robot != second.partner or offered[-1][0] < now - SETTLE  # a pair of its own
                offered.append((now, robot))
                if advice._second and len(offered) > 3:
                    advice.forget(advice._second.partner)
                    assert advice._second is None
                    return
    raise AssertionError(f'no pair was offered: {offered}')

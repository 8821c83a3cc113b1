"""When a fleet starts a server more and ends one: the decision alone, and with real servers and robots."""
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.fleet_robots import Robot
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros import interrupts
from worldmodel_ros.serving.fleet import pools, process
from worldmodel_ros.serving.fleet.front import SETTINGS, Front
from worldmodel_ros.serving.fleet.pools import LocalPool, ServerProcess
from worldmodel_ros.serving.fleet.process import Options, scale
from worldmodel_ros.serving.fleet.scaling import Homecoming, Scaler, ScalingSettings
from worldmodel_ros.serving.transport.address import ListeningSocket

FLEET = ScalingSettings(fewest=1, most=3, patience=2.0, calm=10.0, spare=1.0, calm_spare=3.0, start_up=60.0)


def play(scaler, slack, robots, running, begin, seconds):
    """Decisions by whole seconds; what is started runs."""
    found, running = [], set(running)
    for second in range(seconds):
        step = scaler.decide(slack, robots, frozenset(running), begin + second)
        if step:
            found.append((second, step))
            running |= {step[1]} if step[0] == 'start' else set()
    return found


def test_it_starts_one_after_no_server_had_slack_for_a_while_and_waits_for_it():
    scaler = Scaler(FLEET)
    assert play(scaler, {0: 1}, {0: 7}, {0}, 0.0, 5) == []
    assert scaler.decide({0: 0}, {0: 8}, frozenset({0}), 10.0) is None
    assert scaler.decide({0: 1}, {0: 7}, frozenset({0}), 11.0) is None  # it was a moment
    assert play(scaler, {0: 0}, {0: 8}, {0}, 12.0, 3) == [(2, ('start', 1))]
    assert play(scaler, {0: 0}, {0: 8}, {0, 1}, 15.0, 50) == []  # it is starting up
    assert play(scaler, {0: 0, 1: 0}, {0: 8, 1: 8}, {0, 1}, 70.0, 4) == [(0, ('start', 2))]
    assert play(scaler, {0: 0, 1: 0, 2: 0}, {0: 8, 1: 8, 2: 8}, {0, 1, 2}, 200.0, 9) == []  # no more than these


def test_servers_that_the_fleet_begins_with_are_waited_for_too():
    scaler = Scaler(FLEET)
    assert play(scaler, {}, {}, {0}, 0.0, 50) == []
    assert play(scaler, {0: 0}, {0: 8}, {0}, 50.0, 3) == [(0, ('start', 1))]  # there was no slack all the while
    assert play(Scaler(FLEET), {}, {}, {0}, 0.0, 70) == [(60, ('start', 1))]  # one that does not come


def test_it_empties_the_one_with_the_fewest_robots_where_the_others_have_slack_and_no_sooner():
    scaler = Scaler(FLEET)
    assert play(scaler, {0: 4, 1: 6}, {0: 4, 1: 2}, {0, 1}, 0.0, 30) == []  # 2 robots would leave slack for 2, and 3 are asked
    assert play(scaler, {0: 5, 1: 6}, {0: 3, 1: 2}, {0, 1}, 100.0, 11) == [(10, ('empty', 1))]
    assert scaler.emptying == 1
    # It is needed after all.
    assert play(scaler, {0: 0, 1: 6}, {0: 8, 1: 1}, {0, 1}, 200.0, 3) == [(2, ('start', 1))]
    assert scaler.emptying is None
    assert play(scaler, {0: 8}, {0: 0}, {0}, 300.0, 60) == []  # the fewest


def test_it_does_not_flap_for_any_number_of_robots():
    for robots in range(25):
        scaler, running, changes = Scaler(FLEET), {0}, []
        for second in range(600):
            share = {number: robots // len(running) + (number < robots % len(running)) for number in running}
            slack = {number: max(0, 8 - count) for number, count in share.items()}
            step = scaler.decide(slack, share, frozenset(running), float(second))
            if step and step[0] == 'start':
                running.add(step[1])
            elif step:
                running.discard(step[1])
                scaler.ended(step[1])
            changes += [step] if step else []
        assert len(changes) <= 2 and all(what == 'start' for what, _ in changes), (robots, changes)


@pytest.mark.parametrize('settings, why', [({'fewest': 0}, 'at least 1'), ({'fewest': 3, 'most': 2}, '3 to 2'),
                                           ({'calm_spare': 1.0}, 'take turns')])
def test_settings_without_sense_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        ScalingSettings(**settings)


def test_a_store_is_the_same_wherever_a_fleet_is_started(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('ROS_HOME', str(tmp_path / 'ros'))
    assert [Options(store=store).where for store in ('x/y', '/x', 's3://bucket/x', 'wss://a:8000', '')] == [
        str(tmp_path / 'x/y'), '/x', 's3://bucket/x', 'wss://a:8000', str(tmp_path / 'ros/worldmodel_store')]


def test_the_options_of_a_fleet_say_how_many_servers_there_may_be():
    assert Options(servers=2).scaling() == ScalingSettings(2, 2)
    assert Options(servers=1, most=4).scaling() == ScalingSettings(1, 4)
    with pytest.raises(ValueError, match='3 to 2'):
        Options(servers=3, most=2)


@pytest.mark.slow
@pytest.mark.waiting(seconds=18)
def test_a_full_fleet_gets_a_server_and_the_robots_of_one_that_is_not_needed_go_on_elsewhere(tmp_path: Path):
    listening, pool = ListeningSocket(tmp_path / 'front.sock'), LocalPool()
    paths = [tmp_path / f'{number}.sock' for number in range(2)]

    def start(number):
        pool.start(number, [str(paths[number]), '--store', str(tmp_path / 'store'), '--sessions', '2', '--backend', 'onnx',
                            '--ticks', '0', '--realtime-priority', '0'], paths[number].with_suffix('.log'))
    start(0)
    # However slow this machine is: what fills a server here is its sessions.
    front = Front(listening, paths, sessions=2, settings=replace(SETTINGS, full=1000.0, high=1e9, blocking=1e9))
    front.wanted = {0}
    scaler = Scaler(ScalingSettings(1, 2, patience=0.5, calm=1.0, spare=0.5, calm_spare=1.0, start_up=120.0))
    listening.listen()
    engine, robots = load('tiny', 'onnx', sessions=3), []

    def until(condition, patience=120.0):
        end = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < end, front.status()['fleet']
            front.run(0.05)
            for robot in robots:
                robot.idle(0.0 if robot.link is None else 0.01)
            scale(pool, front, scaler, start, time.monotonic())

    def drive(robot):
        answer = robot.tick(due=60.0, patience=120.0)
        assert answer.tier is not Tier.NONE, answer.reason
        np.testing.assert_array_equal(answer.plan, robot.twin_answers(answer.tier)[0])
    try:
        assert front.wait_for_servers(120.0)
        for seed in range(2):
            robots.append(Robot(seed, front.place(f'robot{seed}'), engine, session=f'robot{seed}'))
            drive(robots[-1])
        until(lambda: front.wanted == {0, 1} and len(front.room()[0]) == 2)  # no server had slack for a third
        robots.append(Robot(2, front.place('robot2'), engine, session='robot2'))
        drive(robots[2])
        assert robots[2].server == paths[1]
        for robot in robots[:2]:  # who goes makes one of the two needless
            robot.close()
        del robots[:2]
        robots[0].idle(0.01)
        until(lambda: front.wanted != {0, 1})
        drive(robots[0])  # bit for bit, wherever it is by now
        assert len(front.wanted) == 1 and robots[0].server == paths[front.wanted.copy().pop()]
    finally:
        for robot in robots:
            robot.close()
        front.close()
        pool.close()
        listening.close()


# --- sessions that come back from another host ---


def simulate(share, noise, robots, seed, low, calm=10.0, full=0.85, seconds=600.0):
    """
    Robots of which those that there was no time for are away, and each leaves at some time. What is believed of the ``share``
    of one varies by ``noise``; above ``full`` + 0.05 the newest is moved away. Returns (time, robot, away or back).
    """
    rng, coming, moves = np.random.default_rng(seed), Homecoming(low, calm), []
    here = list(range(min(robots, int(full / (share * (1.0 + noise)) + 1e-9))))
    away = list(range(len(here), robots))
    for now in np.arange(0.0, seconds, 0.5):
        believed = share * (1.0 + rng.uniform(-noise, noise))
        for of in (here, away):
            if of and rng.random() < 0.01:
                of.pop(rng.integers(len(of)))
        if here and len(here) * believed > full + 0.05:
            away.append(here.pop())
            moves.append((now, away[-1], 'away'))
        elif coming.decide({0: len(here) * believed}, believed, bool(away), now):
            here.append(away.pop())
            moves.append((now, here[-1], 'back'))
    return moves


@given(share=st.floats(0.05, 0.4), noise=st.floats(0.0, 0.08), robots=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_no_session_goes_to_and_fro_while_loads_vary_by_less_than_the_hysteresis(share, noise, robots, seed):
    """From 0.8 times the mark to 5 % above it is more than what 8 % either way make of a load."""
    moves = simulate(share, noise, robots, seed, low=0.8 * 0.85)
    assert all(kind == 'back' for _, _, kind in moves) and len({robot for _, robot, _ in moves}) == len(moves)
    assert all(later - at >= 10.0 for (at, *_), (later, *_) in zip(moves, moves[1:]))  # one at a time, and seen


def test_without_the_hysteresis_sessions_do_go_to_and_fro():
    kinds = [kind for seed in range(20) for _, _, kind in simulate(0.1, 0.08, 14, seed, low=0.85, calm=0.0)]
    assert kinds.count('away') > 20


@given(share=st.floats(0.05, 0.3), count=st.integers(1, 6))
def test_all_come_back_that_there_is_time_for_and_no_more(share, count):
    coming, here, away, now = Homecoming(0.68), 0, count, 0.0
    while now < 10.5 * (count + 2):
        if coming.decide({0: here * share, 1: 0.9}, share, away > 0, now):
            here, away = here + 1, away - 1
        now += 0.5
    assert here == min(count, int(0.68 / share + 1e-9))


def test_time_that_is_there_for_a_moment_brings_nothing_back():
    coming = Homecoming(0.68)
    for tick in range(400):
        assert not coming.decide({0: 0.0 if tick % 19 else 0.9}, 0.2, True, 0.5 * tick)
    assert not any(coming.decide({}, 0.2, True, 300.0 + tick) for tick in range(40))  # no memory anywhere


def test_no_server_is_started_again_while_the_fleet_ends(monkeypatch, tmp_path):
    class Slow:
        """A pool whose servers have ended, and are started again while it is looked at."""

        name, looked, closed, started = 'slow', threading.Event(), threading.Event(), []

        def start(self, number, arguments, log):
            pass

        def look(self):
            self.looked.set()
            if self.closed.wait(1.5):  # longer than a front takes to end
                self.started.append('after it was closed')
            return {}

        def close(self):
            self.closed.set()

    def until_asked(front, end):
        assert Slow.looked.wait(30.0)
    monkeypatch.setattr(process, 'LocalPool', Slow)
    monkeypatch.setattr(process, '_LOOK', 0.01)
    monkeypatch.setattr(Front, 'run', until_asked)
    monkeypatch.setattr(process.realtime, 'apply', lambda *what, **more: None)
    for each in ('raise_interrupted', 'End', 'ignore'):  # signals are the test process's
        monkeypatch.setattr(interrupts, each, lambda: None)
    log = logging.getLogger('worldmodel_ros')
    interval, level = sys.getswitchinterval(), log.level
    try:
        assert process.up(tmp_path / 'front.sock', Options(servers=1, page=-1)) == 0
    finally:
        sys.setswitchinterval(interval)
        log.setLevel(level)
    for thread in threading.enumerate():
        if thread.name == 'pool':
            thread.join(30.0)
    assert Slow.started == []


def left_running(monkeypatch, *options):
    """A process that says that it is a server with these options."""
    process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'serve', *options])
    monkeypatch.setattr(pools, 'ask_status', lambda socket: {'pid': process.pid})
    return process


@pytest.mark.parametrize('options, state', [(['--store', 'a', '--sessions', '8'], 'runs'), (['--store', 'b'], 'ended')])
def test_a_server_that_was_left_is_adopted_and_one_with_other_options_replaced(monkeypatch, tmp_path, options, state):
    socket = str(tmp_path / 'socket')
    process = left_running(monkeypatch, '--socket', socket, '--store', 'a', '--sessions', '8')
    monkeypatch.setattr(pools, '_AGAIN', 0.0)
    started = []
    monkeypatch.setattr(ServerProcess, '_start', lambda self: started.append(self._arguments))
    server = ServerProcess(options, socket, str(tmp_path / 'log'))
    assert started == []
    if state == 'ended':
        process.wait(10.0)
    assert [server.state(), server.state()] == [state] * 2 and started == ([] if state == 'runs' else [options])
    process.kill()
    process.wait(10.0)


def test_an_adopted_server_has_ended_when_its_process_has_whatever_has_its_number_then(monkeypatch, tmp_path):
    process = left_running(monkeypatch, '--socket', str(tmp_path / 'socket'))
    server = ServerProcess([], str(tmp_path / 'socket'), str(tmp_path / 'log'))
    assert (server.state(), server.starts) == ('runs', 0)
    server.stop()
    process.wait(10.0)
    monkeypatch.setattr(pools.os, 'kill', lambda pid, number: None)  # another process has its number
    assert server.state() == 'ended'

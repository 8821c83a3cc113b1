"""What must hold in every scenario is checked whatever becomes of the scenario, by real processes."""

import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import test_scenarios
from builtin_interfaces.msg import Time
from geometry_msgs.msg import TwistStamped
from scenarios import stalls
from scenarios.catalogue import SCALED, SYSTEMS, raise_worst
from scenarios.checks import Invariants
from scenarios.observer import Received
from scenarios.rig import GATE, MODEL, ROBOT
from scenarios.speed import Speed
from scenarios.stalls import InvariantViolation, play_out
from scenarios.supervised import SupervisedSystem
from test_scenarios import Stage

from worldmodel_ros.nodes.common.qos import COMMAND

ONE_ROBOT = SYSTEMS[0]


def is_commanded_past_the_gate_then_loses_it_and_fails(rig):
    """By a stranger, too fast, and in answer to no observation that was made."""
    rig.drive()
    for _ in range(3):
        command = TwistStamped()
        command.header.stamp = Time(sec=1)
        command.twist.linear.x = 0.7
        rig.publish(TwistStamped, 'cmd_vel', command, COMMAND)
        rig.watch(0.02)
    rig.wait_until_driving('a command', time.monotonic())
    os.kill(rig.processes.pid(rig.full_name(GATE)), signal.SIGKILL)
    rig.watch(2.0)
    raise AssertionError('no goal was reached')


@pytest.mark.ros
def test_a_scenario_that_fails_is_checked_for_what_must_hold(tmp_path):
    plays, scenario, replays = [], is_commanded_past_the_gate_then_loses_it_and_fails, len(stalls.REPLAYS)
    stage = Stage(lambda system: SupervisedSystem(system, tmp_path))

    def one():
        plays.append(1)
        stage.play(scenario)
    try:
        with pytest.raises(InvariantViolation) as failed:
            play_out(one, scenario.__name__, lambda: stage.start(ONE_ROBOT))
    finally:
        stage.end()
    for words in ('3 commands came late', 'let (0.7, 0.0) through', "['command_gate'] ended", 'no stop for',
                  'no goal was reached', 'command_gate ended with [-9, 0]'):
        assert words in str(failed.value)
    assert plays == [1] and len(stalls.REPLAYS) == replays, 'played again'
    assert [bool(wrong) for wrong in stage.ended[ONE_ROBOT.name]] == [True]


class Reporting:
    """A rig whose observer saw a command that moves the robot at 10 s and a stop at 10.4; gate and robot say what they saw."""

    def __init__(self, gate, robot, gate_pid=2):
        moving, stop = TwistStamped(), TwistStamped()
        moving.header.stamp, moving.twist.linear.x = Time(sec=1), 0.3
        heard = [Received(10.0, moving), Received(10.4, stop)]
        self.observer = SimpleNamespace(since=lambda topic, start: heard, newest=lambda topic: heard[-1])
        self.processes = SimpleNamespace(pid=lambda node: pids[node])
        self._told = {GATE: gate, ROBOT: robot}
        pids = {ROBOT: 1, GATE: 2, MODEL: 3}
        self.full_name = lambda node: node
        self.get = lambda node, name: {'command_timeout_s': 0.13, 'delivery_reserve_s': 0.006}[name]
        self.next_report = lambda node: {'late': 0, 'deadline_ms': 50.0}
        self.refused = lambda node: {}
        self.begin = lambda: pids.update({GATE: gate_pid})

    def wait(self, condition, what, timeout):
        assert condition(), what

    def reports(self, node, since):
        told = self._told[node]
        return [(at, told if at == 10.9 else {'silences': ''}) for at in (10.9, 11.9) if at > since]


@pytest.mark.parametrize('gate, robot, gate_pid, words', [
    ('', '', 2, ''),                                                   # the observer alone was late
    ('10.0:10.4', '10.0:10.4', 2, 'command_gate: 400 ms, sim_robot: 400 ms'),
    ('', '10.0:10.39', 2, 'command_gate: in time, sim_robot: 390 ms'),  # on the way
    ('9.0:9.4', '9.0:9.4', 2, ''),                                     # another one
    ('', '', 7, 'no stop for 400 ms'),                                 # another gate, which cannot know
    (None, '', 2, 'command_gate: no report')])
def test_a_stop_is_late_unless_both_who_sent_and_who_received_it_say_it_was_not(monkeypatch, gate, robot, gate_pid, words):
    monkeypatch.setattr(stalls, '_running', None)
    rig = Reporting(*({} if told is None else {'silences': told} for told in (gate, robot)), gate_pid)
    invariants = Invariants(rig)
    rig.begin()
    found = '; '.join(invariants._late_stops())
    assert words in found and bool(found) is bool(words)
    assert invariants.late_here == ([] if words else [(10.0, 10.4)])


def test_what_follows_a_scenario_that_failed_gets_a_system_of_its_own():
    made = []

    def make(system):
        made.append(system)
        return SimpleNamespace(rigs=[], processes=Processes([0]), start=lambda: None, stop=lambda: None)
    stage = Stage(make)

    def fails():
        raise AssertionError('of its own')
    for scenario, systems in ((lambda: None, 1), (lambda: None, 1), (fails, 1), (lambda: None, 2)):
        stage.start(ONE_ROBOT)
        with pytest.raises(AssertionError) if scenario is fails else nullcontext():
            stage.play(scenario)
        assert len(made) == systems


class Processes:
    """Each node of a system ended with these codes."""

    kills: ClassVar[dict] = {}

    def __init__(self, codes):
        self.exit_codes = lambda node: codes


@pytest.mark.parametrize('codes, good', [([0], True), ([1], False), ([-11], False), ([], False), ([0, 0], False)])
def test_exit_codes_are_checked_of_every_run_of_a_system(monkeypatch, codes, good):
    """Of one in which a scenario failed as well."""
    running = SimpleNamespace(rigs=[], processes=Processes(codes), start=lambda: None, stop=lambda: None)
    stage = Stage(lambda system: running)
    stage.start(ONE_ROBOT)

    def fails():
        raise AssertionError('of its own')
    with pytest.raises(AssertionError) as failed:
        stage.play(fails)
    assert isinstance(failed.value, InvariantViolation) is not good
    assert 'of its own' in str(failed.value)
    assert any(stage.ended[ONE_ROBOT.name]) is not good


def test_a_violated_invariant_comes_before_any_other_failure_and_names_them_all():
    first, second = AssertionError('slow'), InvariantViolation('late')
    with pytest.raises(InvariantViolation, match='late; slow'):
        raise_worst([first, second])
    with pytest.raises(AssertionError) as failed:
        raise_worst([first])
    assert failed.value is first
    raise_worst([])


def test_what_fails_on_a_machine_that_became_slower_is_played_again_and_nothing_else(monkeypatch):
    """By a measurement before and after, with nothing running; a violated invariant is final there, too."""
    ticks, failure = [], None

    def fails(scenario, rigs):
        raise failure

    def make(system):
        running = SimpleNamespace(rigs=[], processes=SimpleNamespace(kills={}))
        running.start = running.stop = lambda: None
        return running

    def plays(wanted, scenario, *speeds):
        nonlocal failure
        failure, count = wanted, 0
        before, *ticks[:] = speeds
        monkeypatch.setattr(test_scenarios, 'measured', lambda: Speed(before, 0.001))

        def one():
            nonlocal count
            count += 1
            stage.play(scenario)
        with pytest.raises(AssertionError):
            play_out(one, 'scenario', lambda: stage.start(ONE_ROBOT))
        return count

    monkeypatch.setattr(test_scenarios, 'play', fails)
    monkeypatch.setattr(test_scenarios, 'ended_in_good_order', lambda *_: None)
    monkeypatch.setattr(test_scenarios, 'measure_again', lambda: Speed(ticks.pop(0), 0.001))
    monkeypatch.setattr(stalls, 'REPLAYS', [])
    monkeypatch.setattr(stalls, 'UNEXPLAINED', 0)
    monkeypatch.setattr(stalls, '_unexplained', 0)
    stage = Stage(make)
    try:
        scaled = next(scenario for scenario in ONE_ROBOT.scenarios if scenario in SCALED)
        configured = next(scenario for scenario in ONE_ROBOT.scenarios if scenario not in SCALED)
        slow = AssertionError('0 % of the ticks were answered by the model')
        assert plays(slow, scaled, 0.025, 0.030) == 1
        monkeypatch.setattr(stalls, 'UNEXPLAINED', 1)
        assert plays(slow, scaled, 0.025, 0.030, 0.030) == 2
        assert len(stalls.REPLAYS) == 1 and 'nothing that was measured explains it: 0 % of' in stalls.REPLAYS.pop().reason
        assert plays(slow, scaled, 0.025, 0.040, 0.045, 0.050) == 3
        assert len(stalls.REPLAYS) == 2 and 'now, a tick of the shipped model takes 40.0 ms' in stalls.REPLAYS[0].reason
        stalls.REPLAYS.clear()  # else the table of this run would name them
        assert plays(InvariantViolation('a command was late'), scaled, 0.025, 0.060) == 1
        assert plays(slow, configured, 0.025, 0.060) == 1
    finally:
        stage.end()

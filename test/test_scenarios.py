"""
Integration scenarios on the real processes: the simulated robot, the trained model, the gate.

Where the launch system of a distribution is installed it starts them, and elsewhere the package's own
supervisor; the scenarios are the same, and never skipped in both.

A scenario that fails is a failure, and a violated invariant is final. A bound of quality that was missed by less than the
machine itself stood still meanwhile, which other processes have seen, is tried again (scenarios/stalls.py). How fast the
machine is, is asked before each system starts; on a slow one predictions get more time (scenarios/speed.py), and what needs
them is tried again where the machine is found to have become slower than that meanwhile.
"""

import importlib.util
import os
import sys
from pathlib import Path

import environments
import pytest

from scenarios.catalogue import SCALED, SYSTEMS, play, raise_worst
from scenarios.checks import ended_in_good_order
from scenarios.speed import SLOWER, measure_again, measured
from scenarios.stalls import InvariantViolation, Missed, Slowed, Unexplained, play_out
from scenarios.supervised import SupervisedSystem

UNDER_LAUNCH = Path(__file__).parent / 'scenarios' / 'under_launch.py'
TIMEOUT = 420.0  # s, for all scenarios of a system
LAUNCH_IS_INSTALLED = all(
    importlib.util.find_spec(name) for name in ('launch', 'launch_ros', 'launch_testing')
)

pytestmark = pytest.mark.ros
without_launch = pytest.mark.skipif(
    LAUNCH_IS_INSTALLED, reason='launch is installed: the scenarios run under it'
)
under_launch = pytest.mark.skipif(
    not LAUNCH_IS_INSTALLED, reason='needs the launch of a ROS 2 distribution: the scenarios run without it'
)


class Stage:
    """Has one system running at a time, for as many scenarios as it is good for."""

    def __init__(self, make):
        self._make = make  # system -> what has rigs, processes, start() and stop()
        self._system = None
        self._running = None
        self._measured = None  # for which system the machine was measured, with nothing started since
        self.ended = {}  # system -> what was wrong with how each of its runs ended; '' where nothing was

    def make_room(self, system):
        """End what runs, if it is another system, and ask how fast the machine is, with nothing running on it."""
        if system not in (self._system, self._measured):
            self.end()
            measure_again(others=system.needs_all_cores)
            self._measured = system

    def start(self, system):
        if self._system is not system:
            self.end()
            self._measured = None
            self._running, self._system = self._make(system), system
            self._running.start()

    def play(self, scenario):
        before = measured()
        try:
            play(scenario, self._running.rigs)
        except Exception as failure:
            # In what state it has left the system is not known: the next scenario gets one of its own.
            wrong = self.end()
            if scenario in SCALED and not wrong and not isinstance(failure, InvariantViolation):
                now = measure_again()
                if now.tick_s > SLOWER * before.tick_s:
                    raise Slowed(f'the machine has become slower: before, {before}; now, {now}; {failure}') from failure
                if not isinstance(failure, Missed):  # which stalls may explain
                    raise Unexplained(f'{failure}; before, {before}; now, {now}') from failure
            raise_worst([failure, *([InvariantViolation(f'at the end of the system: {wrong}')] if wrong else [])])

    def end(self):
        """Stop the system, if one runs; return what is wrong with how its processes ended, '' where nothing is."""
        if self._running is None:
            return ''
        running, system = self._running, self._system
        self._running = self._system = None
        running.stop()
        wrong = ''
        try:
            ended_in_good_order(running.processes, system.nodes(), running.processes.kills)
        except InvariantViolation as violation:
            wrong = str(violation)
        self.ended.setdefault(system.name, []).append(wrong)
        return wrong


@pytest.fixture(scope='module')
def stage(tmp_path_factory):
    stage = Stage(lambda system: SupervisedSystem(system, tmp_path_factory.mktemp(system.name)))
    yield stage
    stage.end()


@without_launch
@pytest.mark.parametrize(
    'system, scenario',
    [
        pytest.param(system, scenario, id=f'{system.name}-{scenario.__name__}')
        for system in SYSTEMS
        for scenario in system.scenarios
    ],
)
def test_scenario(stage, system, scenario):
    stage.make_room(system)
    if lacking := system.lacks():
        pytest.skip(lacking)
    play_out(lambda: stage.play(scenario), f'{system.name}: {scenario.__name__}', lambda: stage.start(system))


@without_launch
@pytest.mark.parametrize('system', SYSTEMS, ids=lambda system: system.name)
def test_every_process_ends_with_code_0(stage, system):
    """In each run of the system, of those in which a scenario failed too."""
    stage.end()
    if system.name not in stage.ended:
        stage.start(system)
        stage.end()
    assert not any(stage.ended[system.name]), stage.ended[system.name]


@under_launch
@pytest.mark.parametrize('system', SYSTEMS, ids=lambda system: system.name)
def test_scenarios_under_launch(system):
    measure_again()
    environment = {
        **os.environ,
        'SCENARIO_SYSTEM': system.name,
        # The executables begin with ``/usr/bin/env python3``, which is to be this one.
        'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
    }
    environments.run(
        [sys.executable, '-m', 'launch_testing.launch_test', UNDER_LAUNCH], env=environment, timeout=TIMEOUT
    )

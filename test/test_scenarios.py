"""
Integration scenarios on the real processes: the simulated robot, the trained model, the gate.

Where the launch system of a distribution is installed it starts them, and elsewhere the package's own
supervisor; the scenarios are the same, and never skipped in both.

A scenario that fails is a failure, with two exceptions. Where the machine stood still meanwhile, which another process
has seen (scenarios/stalls.py), it is played again, with a warning, up to three times in all. And what fails on a slow
machine is skipped where a tick alone, measured at once and with nothing beside it, takes too long for two steps, or of two
robots on one server, for two cores to do all that (scenarios/speed.py).
"""

import importlib.util
import os
import sys
from pathlib import Path

import environments
import pytest

from scenarios.catalogue import SYSTEMS, play
from scenarios.checks import ended_in_good_order
from scenarios.speed import NO_ROOM, SLOW, excuse
from scenarios.stalls import failure_of
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

    def __init__(self, factory):
        self._factory = factory
        self._system = None
        self._running = None
        self._kills = {}
        self.ended = {}  # system -> (processes, kills), of runs in which no scenario failed

    def start(self, system):
        if self._system is not system:
            self.end()
            self._running = SupervisedSystem(system, self._factory.mktemp(system.name))
            self._system, self._kills = system, {}
            self._running.start()

    def play(self, scenario):
        try:
            play(scenario, self._running.rigs)
        except BaseException:
            # Who knows in what state the failure has left it: the next scenario gets a system of its own.
            self._running.stop()
            self._system = self._running = None
            raise
        for node, count in self._system.kills([scenario]).items():
            self._kills[node] = self._kills.get(node, 0) + count

    def end(self):
        if self._running is not None:
            self._running.stop()
            self.ended[self._system.name] = self._running.processes, self._kills
            self._system = self._running = None


@pytest.fixture(scope='module')
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory)
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
    failure = failure_of(lambda: stage.play(scenario), scenario.__name__, prepare=lambda: stage.start(system))
    if failure is None:
        return
    if reason := excuse(SLOW if system.name == 'two_robots_one_server' else NO_ROOM):
        pytest.skip(f'{reason}: {failure}')
    raise failure


@without_launch
@pytest.mark.parametrize('system', SYSTEMS, ids=lambda system: system.name)
def test_every_process_ends_with_code_0(stage, system):
    stage.end()
    if system.name not in stage.ended:
        stage.start(system)
        stage.end()
    processes, kills = stage.ended[system.name]
    ended_in_good_order(processes, system.nodes(), kills)


@under_launch
@pytest.mark.parametrize('system', SYSTEMS, ids=lambda system: system.name)
def test_scenarios_under_launch(system):
    environment = {
        **os.environ,
        'SCENARIO_SYSTEM': system.name,
        # The executables begin with `/usr/bin/env python3`, which is to be this one.
        'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
    }
    environments.run(
        [sys.executable, '-m', 'launch_testing.launch_test', UNDER_LAUNCH], env=environment, timeout=TIMEOUT
    )

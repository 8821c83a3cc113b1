"""
Starts a system with a launch file, and plays its scenarios.

    SCENARIO_SYSTEM=one_robot python3 -m launch_testing.launch_test test/scenarios/under_launch.py

For the launch system of a ROS 2 distribution (docs/installing.md). test_scenarios.py runs it, once for each system.
SCENARIOS names those to be played, of one system; without it all are.

How fast the machine is, is measured before anything is launched, and printed with the time that predictions get for it. A
scenario that fails leaves the system to the next one as it is; nothing is played again.
"""

import os
import sys
import threading
import unittest
from pathlib import Path

import launch_testing.actions
import launch_testing.markers
import rclpy
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription, RegisterEventHandler
from launch.event_handlers import OnProcessExit, OnProcessStart
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import Node
from rclpy.context import Context

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))  # launch_test, unlike pytest, does not

from scenarios.catalogue import PARAMETERS, SYSTEMS, play, wait_until_up  # noqa: E402
from scenarios.checks import ended_in_good_order  # noqa: E402
from scenarios.processes import kill  # noqa: E402
from scenarios.rig import Rig  # noqa: E402
from scenarios.speed import budget, measured  # noqa: E402

SYSTEM = next(system for system in SYSTEMS if system.name == os.environ.get('SCENARIO_SYSTEM', 'one_robot'))
CHOSEN = os.environ.get('SCENARIOS', '').split()
UNKNOWN = set(CHOSEN) - {scenario.__name__ for scenario in SYSTEM.scenarios}
if UNKNOWN:
    raise SystemExit(f'SCENARIOS: {SYSTEM.name} has no {", ".join(sorted(UNKNOWN))}')
SCENARIOS = [scenario for scenario in SYSTEM.scenarios if not CHOSEN or scenario.__name__ in CHOSEN]


class LaunchedProcesses:
    """The processes of a launch, as scenarios see them; ``handlers`` tell it of their starts and ends."""

    def __init__(self) -> None:
        self.kills: dict[str, int] = {}  # by the full name of the node
        self._pids: dict[str, int] = {}
        self._exit_codes: dict[str, list[int]] = {}
        self._lock = threading.Lock()  # launch has a thread of its own
        self.handlers = [
            RegisterEventHandler(OnProcessStart(on_start=self._on_start)),
            RegisterEventHandler(OnProcessExit(on_exit=self._on_exit)),
        ]

    def pid(self, node: str) -> int | None:
        with self._lock:
            return self._pids.get(node)

    def exit_codes(self, node: str) -> list[int]:
        with self._lock:
            return list(self._exit_codes.get(node, ()))

    def kill(self, node: str) -> None:
        self.kills[node] = self.kills.get(node, 0) + 1
        kill(self.pid(node))

    def _on_start(self, event, context) -> None:
        with self._lock:
            self._pids[_name(event)] = event.pid

    def _on_exit(self, event, context) -> None:
        with self._lock:
            name = _name(event)
            self._exit_codes.setdefault(name, []).append(event.returncode)
            if self._pids.get(name) == event.pid:
                del self._pids[name]


def _name(event) -> str:
    """Return the full name of a node, or, of a process that is none, its own, which launch has numbered."""
    action = event.action
    return action.node_name if isinstance(action, Node) else '/' + event.process_name.rpartition('-')[0]


@launch_testing.markers.keep_alive
def generate_test_description():
    print(f'{measured()}; what wants predictions in time gets {budget(len(SYSTEM.namespaces))}. Load average: '
          f'{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores', flush=True)
    processes = LaunchedProcesses()
    arguments = {**SYSTEM.arguments, 'allow_faults': 'true', 'params_file': str(PARAMETERS)}
    if len(SYSTEM.namespaces) > 1:
        arguments['robots'] = ' '.join(SYSTEM.namespaces)
    path = str(TESTS.parent / 'launch' / SYSTEM.launch_file)
    return LaunchDescription(
        [
            *processes.handlers,
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(path), launch_arguments=list(arguments.items())
            ),
            launch_testing.actions.ReadyToTest(),
        ]
    ), {'processes': processes}


class TestScenarios(unittest.TestCase):
    def test_scenarios(self, processes):
        if lacking := SYSTEM.lacks():
            self.skipTest(lacking)
        context = Context()
        rclpy.init(args=[], context=context)
        self.addCleanup(rclpy.try_shutdown, context=context)
        rigs = []
        for namespace in SYSTEM.namespaces:
            rigs.append(Rig(processes, context, namespace))
            self.addCleanup(rigs[-1].close)
        wait_until_up(rigs)
        for scenario in SCENARIOS:
            with self.subTest(scenario.__name__):
                play(scenario, rigs)


@launch_testing.post_shutdown_test()
class TestShutdown(unittest.TestCase):
    def test_every_process_ends_with_code_0(self, processes):
        ended_in_good_order(processes, SYSTEM.nodes(), processes.kills)

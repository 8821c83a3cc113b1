"""The systems that faults happen to: real nodes under the package's own supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import rclpy
from rclpy.context import Context

from faults.shim import Shim
from faults.tmpfs import SmallDisk
from scenarios.catalogue import PARAMETERS, SEED, SOCKET, wait_until_up
from scenarios.rig import GATE, MODEL, ROBOT, START_TIMEOUT, Rig
from scenarios.server import SERVER
from scenarios.supervised import SupervisedProcesses
from worldmodel_ros.bringup.description import load
from worldmodel_ros.bringup.shared_memory import owned_segments, remove_segments
from worldmodel_ros.bringup.supervisor import Supervisor

DISK_SIZE = 24  # MiB


@dataclass(frozen=True)
class Plan:
    """
    What runs: ``arguments`` of the description, one robot for each namespace. ``parameters`` returns those by node, and may
    make files for them in a directory.

    ``shimmed``: its nodes have the shim (faults/shim.c), whose faults are then chosen while they run.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    parameters: Callable[[Path], Mapping[str, Mapping]] = lambda directory: {}
    namespaces: tuple[str, ...] = ('',)
    shimmed: bool = False


def _divided(directory: Path) -> Mapping[str, Mapping]:
    from faults.ranks import parameters
    return parameters(directory)


def _two_networks(directory: Path) -> Mapping[str, Mapping]:
    from faults.network import overlay
    return overlay(directory)


ONE_ROBOT = 'one_robot'
SHIMMED = 'one_robot_shimmed'
TWO_ROBOTS = 'two_robots_one_server'
DIVIDED = 'one_robot_divided_model'
TWO_NETWORKS = 'one_robot_two_networks'
PLANS = {plan.name: plan for plan in (
    Plan(ONE_ROBOT),
    Plan(SHIMMED, shimmed=True),
    Plan(TWO_ROBOTS, {'server': SOCKET}, namespaces=('robot1', 'robot2')),
    Plan(DIVIDED, parameters=_divided),
    Plan(TWO_NETWORKS, parameters=_two_networks),
)}


class Running:
    """
    A running system. ``rigs`` has one for each robot, ``disk`` is a small disk of its own, on which sessions are kept.

    Nodes are named by their full names.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.disk = SmallDisk(directory / 'disk', DISK_SIZE)
        self.domain_id = int(os.environ['ROS_DOMAIN_ID'])
        self._shims: dict[str, Shim] = {}
        self._segments: list[Path] = []
        description = load()
        self._supervisor = Supervisor(description.environment, directory / 'log', self.domain_id)
        self.environment = self._supervisor.environment
        given = plan.parameters(directory)
        for k, namespace in enumerate(plan.namespaces):
            parameters = {**given, MODEL: {'session_directory': str(self.disk.path), **given.get(MODEL, {})}}
            nodes = description.resolve('sim', {**plan.arguments, 'allow_faults': 'true', 'seed': str(SEED + k)},
                                        [PARAMETERS], parameters)
            self._supervisor.add([self._shimmed(node, namespace) for node in nodes], namespace)
        self.processes = SupervisedProcesses(self._supervisor)
        self._context = Context()
        rclpy.init(args=[], context=self._context, domain_id=self.domain_id)
        self.rigs = [Rig(self.processes, self._context, namespace) for namespace in plan.namespaces]

    @property
    def rig(self) -> Rig:
        """The robot that things happen to."""
        return self.rigs[0]

    def start(self) -> None:
        """Start the nodes, and wait until all are up."""
        self._supervisor.start()
        self._supervisor.wait_ready(START_TIMEOUT)
        wait_until_up(self.rigs)

    def stop(self) -> None:
        """Stop the nodes and the rigs, and leave nothing behind."""
        try:
            self.restore()
        except AssertionError:
            pass  # a node that does not answer is told to end all the same
        self._supervisor.stop()
        for rig in self.rigs:
            rig.close()
        rclpy.try_shutdown(context=self._context)
        for shim in self._shims.values():
            shim.close()
        self.disk.close()

    def restore(self) -> None:
        """Undo what a case has set: parameters, stopped processes, faults of the shim; clear the disk."""
        for pid in filter(None, self.pids().values()):
            _send(pid, signal.SIGCONT)
        for shim in self._shims.values():
            shim.clear()
        self.disk.clear()  # what earlier cases have left there would fill it in a long run
        for rig in self.rigs:
            rig.restore()
        remove_segments(self._segments)
        self._segments.clear()

    def pids(self) -> dict[str, int | None]:
        """Return the present process of each node."""
        return {name: process.pid for name, process in self._supervisor.processes.items()}

    def send(self, name: str, number: int) -> float:
        """Send a signal to a node's process as somebody else on the machine would; return the steady time just before."""
        pid = self.processes.pid(name)
        assert pid is not None, f'{name} does not run'
        self._segments += owned_segments(pid)  # that a killed process leaves; nobody removes them before the case is over
        before = time.monotonic()
        _send(pid, number)
        return before

    def start_again(self, name: str) -> None:
        """Start a node that is not described to come back, as a person would."""
        process = self._supervisor.processes[name]
        end = time.monotonic() + START_TIMEOUT
        while process.pid is not None and time.monotonic() < end:
            time.sleep(0.01)
        process.start()

    def shim(self, name: str) -> Shim:
        """Return the shim of a node."""
        return self._shims[name]

    def shims(self) -> list[Shim]:
        """Return the shims of all nodes of the robot."""
        return [self._shims[name] for name in self.pids()]

    def own_shim(self, name: str) -> Shim:
        """Return a shim for a process that a case starts itself."""
        return self._shims.setdefault(name, Shim(self.directory / f'{name}.shim'))

    def log(self, name: str) -> str:
        """Return what a node has printed so far."""
        return (self.directory / 'log' / f'{name.strip("/").replace("/", ".")}.log').read_text(errors='replace')

    def _shimmed(self, node, namespace):
        if not self.plan.shimmed:
            return node
        shim = self._shims[node.full_name(namespace)] = Shim(self.directory / f'{node.name}.shim')
        return replace(node, environment={**node.environment, **shim.environment})


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


__all__ = ['DIVIDED', 'GATE', 'MODEL', 'ONE_ROBOT', 'PLANS', 'ROBOT', 'SERVER', 'SHIMMED', 'TWO_NETWORKS', 'TWO_ROBOTS',
           'Plan', 'Running']

"""Starts a system with the package's own supervisor."""

import os
from pathlib import Path

import rclpy
from rclpy.context import Context

from scenarios.catalogue import PARAMETERS, System, wait_until_up
from scenarios.rig import START_TIMEOUT, Rig
from worldmodel_ros.bringup.description import load
from worldmodel_ros.bringup.supervisor import Supervisor


class SupervisedProcesses:
    """The processes of a supervisor, as scenarios see them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.kills: dict[str, int] = {}  # by the full name of the node

    def pid(self, node: str) -> int | None:
        return self._supervisor.processes[node].pid

    def exit_codes(self, node: str) -> list[int]:
        return self._supervisor.processes[node].exit_codes

    def kill(self, node: str) -> None:
        self.kills[node] = self.kills.get(node, 0) + 1
        self._supervisor.kill(node)


class SupervisedSystem:
    """A system with its logs in a directory; ``rigs`` has one for each robot."""

    def __init__(self, system: System, directory: Path) -> None:
        description = load()
        domain_id = int(os.environ['ROS_DOMAIN_ID'])
        self._supervisor = Supervisor(description.environment, directory, domain_id)
        for k, namespace in enumerate(system.namespaces):
            arguments = {**system.arguments, 'allow_faults': 'true', 'seed': str(int(system.arguments['seed']) + k)}
            self._supervisor.add(description.resolve('sim', arguments, [PARAMETERS]), namespace)
        self.processes = SupervisedProcesses(self._supervisor)
        self._context = Context()
        rclpy.init(args=[], context=self._context, domain_id=domain_id)
        self.rigs = [Rig(self.processes, self._context, namespace) for namespace in system.namespaces]

    def start(self) -> None:
        """Start the nodes, and wait until all are up."""
        try:
            self._supervisor.start()
            self._supervisor.wait_ready(START_TIMEOUT)
            wait_until_up(self.rigs)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the nodes, and the rigs."""
        self._supervisor.stop()
        for rig in self.rigs:
            rig.close()
        rclpy.try_shutdown(context=self._context)

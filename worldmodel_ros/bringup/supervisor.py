"""Runs the described nodes of one or several robots without ``ros2 launch``."""
from __future__ import annotations

import threading
import time
from pathlib import Path
from collections.abc import Callable, Iterable, Mapping

from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT
from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.environment import free_domain_id, node_environment
from worldmodel_ros.bringup.process import NodeProcess

_POLL = 0.1  # s


class Supervisor:
    """
    Starts, watches and stops the processes of nodes; as a context manager it stops them all on exit.

        description = load()
        with Supervisor(description.environment, 'out/log') as supervisor:
            supervisor.add(description.resolve('sim', {'seed': 7}))
            supervisor.start()
            supervisor.wait_ready(timeout=60.0)
            ...
            supervisor.kill('/world_model_node')

    Nodes are identified by full name. They start in the order in which they were added and stop in reverse order.
    """

    def __init__(self, environment: Mapping[str, str], log_directory: str | Path,
                 domain_id: int | None = None, grace: float = 5.0, *, this_machine_only: bool = True,
                 activation_timeout: float = ACTIVATION_TIMEOUT) -> None:
        """
        :param environment: variables for all nodes, unless the user has set them (Description.environment).
        :param log_directory: for one file per node, and ROS's own logs; created if missing.
        :param domain_id: ROS domain of the nodes; None takes a free one.
        :param grace: time from SIGINT to SIGKILL when a node stops [s], unless its description has another.
        :param this_machine_only: see ``node_environment``.
        :param activation_timeout: time for a lifecycle node to become active after a start [s].
        """
        self._log_directory = Path(log_directory).absolute()
        self._log_directory.mkdir(parents=True, exist_ok=True)
        self._grace = grace
        self.domain_id = free_domain_id() if domain_id is None else domain_id
        self._shared = dict(environment)
        self._activation_timeout = activation_timeout
        self.environment = node_environment(environment, self.domain_id, str(self._log_directory / 'ros'),
                                            this_machine_only=this_machine_only)
        self.processes: dict[str, NodeProcess] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def add(self, nodes: Iterable[NodeDescription], namespace: str = '') -> None:
        """
        Add one robot's nodes without starting them. A shared process that was added before is skipped.

        :raises ValueError: if a node of that name and namespace exists already.
        :raises NotInstalledError: if an executable cannot be found.
        """
        for node in nodes:
            own = node.own_environment(self.environment, self._shared)
            process = NodeProcess(node, namespace, {**self.environment, **own}, self._log_directory,
                                  self._activation_timeout)
            if node.shared and process.name in self.processes:
                continue
            if process.name in self.processes:
                raise ValueError(f'{process.name} is there already: give each robot a namespace of its own')
            self.processes[process.name] = process

    def start(self) -> None:
        """Start all nodes that are not running."""
        for process in self.processes.values():
            process.start()

    def wait_ready(self, timeout: float, progress: Callable[[str], None] = lambda text: None) -> None:
        """
        Wait until all processes run and all lifecycle nodes are active.

        :param progress: called from time to time with a message while waiting.
        :raises RuntimeError: if one fails or takes longer than ``timeout`` seconds, with the end of its log.
        """
        deadline = time.monotonic() + timeout
        for process in self.processes.values():
            process.wait_ready(max(0.0, deadline - time.monotonic()), progress)

    def failures(self) -> dict[str, str]:
        """Return the reasons for which nodes have failed for good, by node name."""
        return {name: process.failure for name, process in self.processes.items() if process.failure}

    def wait_for_end(self) -> int:
        """Wait until a ``required`` node has ended, and return its exit code. Raises ValueError if no node is required."""
        required = [process for process in self.processes.values() if process.required]
        if not required:
            raise ValueError('no node here is required, so nothing would ever end this')
        while True:
            for process in required:
                if process.exit_codes:
                    return process.exit_codes[-1]
            time.sleep(_POLL)

    def kill(self, name: str) -> None:
        """Kill a node by SIGKILL, to simulate a crash; it comes back if its description says to respawn."""
        self._process(name).kill()

    def restart(self, name: str) -> None:
        """Stop a node cleanly and start it again."""
        process = self._process(name)
        process.stop(process.grace or self._grace)
        process.start()

    def stop(self) -> None:
        """Stop all nodes, in reverse order; those with a grace time of their own meanwhile, as no robot may wait for a disk."""
        processes = [*reversed(self.processes.values())]
        slow = [threading.Thread(target=process.stop, args=(process.grace,), daemon=True)  # a second Ctrl-C waits for none
                for process in processes if process.grace]
        for thread in slow:
            thread.start()
        for process in processes:
            if not process.grace:
                process.stop(self._grace)
        for thread in slow:
            thread.join()

    def _process(self, name: str) -> NodeProcess:
        try:
            return self.processes['/' + name.strip('/')]
        except KeyError:
            raise ValueError(f"no node '{name}' here: there are {', '.join(self.processes)}") from None

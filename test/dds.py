"""The transports of DDS in the processes that tests start."""
import os
from collections.abc import Mapping

from worldmodel_ros.bringup.description import load


def without_shared_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return an environment as the launch files have it for the gate.

    A process that joins with shared memory can hold up those that have it as well, the test's own among them
    (config/fastdds_commands.xml).
    """
    description = load()
    gate = next(node for node in description.nodes if node.name == 'command_gate')
    return {**environment, **gate.own_environment(environment, description.environment)}

"""DDS as tests have it: the transports of the processes that they start, and when a message was there."""
import os
from collections.abc import Mapping
from typing import Any

from worldmodel_ros.bringup.description import load
from worldmodel_ros.clocks import wall_minus_steady


def received_at(info: Mapping[str, Any]) -> float:
    """
    Return the steady time [s] at which DDS had a message, by what a callback is told of it.

    This process may pause, to collect its garbage for one, before it comes to it.
    """
    return (info['received_timestamp'] - wall_minus_steady()) * 1e-9


def without_shared_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return an environment as the launch files have it for the gate.

    A process that joins with shared memory can hold up those that have it as well, the test's own among them
    (config/fastdds_commands.xml).
    """
    description = load()
    gate = next(node for node in description.nodes if node.name == 'command_gate')
    return {**environment, **gate.own_environment(environment, description.environment)}

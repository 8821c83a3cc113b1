"""DDS as tests have it: the transports of the processes that they start, and when a message was there."""
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rclpy.executors import Executor

from worldmodel_ros.bringup.description import load
from worldmodel_ros.clocks import wall_minus_steady

_PRIORITY = 35  # above all nodes: a late onlooker would take their commands for late ones


def received_at(info: Mapping[str, Any]) -> float:
    """
    Return the steady time [s] at which DDS had a message, by what a callback is told of it.

    This process may pause, to collect its garbage for one, before it comes to it.
    """
    return (info['received_timestamp'] - wall_minus_steady()) * 1e-9


def raise_receiving_threads() -> None:
    """Put the threads with which DDS receives under SCHED_FIFO, where that is permitted; they are there with the first node."""
    raise_threads(int(task.name) for task in Path('/proc/self/task').iterdir()
                  if task.joinpath('comm').read_text().startswith('dds.'))


def raise_threads(threads: Iterable[int]) -> None:
    """Put threads, by their native ids, under SCHED_FIFO, where that is permitted."""
    for thread in threads:
        try:
            # What a thread starts is not to be of this priority.
            os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
        except PermissionError:
            return


def on_its_thread(executor: Executor, function: Callable[..., object], *arguments: object) -> None:
    """
    Have the thread that spins an executor call a function.

    Such as what destroys a client: where another thread does, rclpy may just be collecting what it waits for, and raises
    InvalidHandle out of spin_once, which ends that thread.
    """
    done, end = executor.create_task(function, *arguments), time.monotonic() + 20.0
    while not done.done():
        assert time.monotonic() < end, 'nothing spins this executor'
        time.sleep(0.001)


def without_shared_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return an environment as the launch files have it for the gate.

    A process that joins with shared memory can hold up those that have it as well, the test's own among them
    (config/fastdds_commands.xml).
    """
    description = load()
    gate = next(node for node in description.nodes if node.name == 'command_gate')
    return {**environment, **gate.own_environment(environment, description.environment)}

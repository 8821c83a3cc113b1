"""DDS helpers for tests: transports of the processes that they start, arrival times of messages, thread priorities."""
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rclpy.executors import Executor

from worldmodel_ros.bringup.description import load
from worldmodel_ros.clocks import wall_minus_steady

_PRIORITY = 35  # above all nodes: a delayed onlooker would count their commands as late


def received_at(info: Mapping[str, Any]) -> float:
    """
    Return the steady time [s] at which DDS received a message, from a callback's message info.

    This process may pause, for example for garbage collection, before it handles the message.
    """
    return (info['received_timestamp'] - wall_minus_steady()) * 1e-9


def raise_receiving_threads() -> None:
    """Put DDS's receiving threads under SCHED_FIFO, where permitted; they exist from the first node on."""
    raise_threads(int(task.name) for task in Path('/proc/self/task').iterdir()
                  if task.joinpath('comm').read_text().startswith('dds.'))


def raise_threads(threads: Iterable[int]) -> None:
    """Put threads, by their native ids, under SCHED_FIFO, where permitted."""
    for thread in threads:
        try:
            # Children of a thread must not inherit this priority.
            os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
        except PermissionError:
            return


def on_its_thread(executor: Executor, function: Callable[..., object], *arguments: object) -> None:
    """
    Call a function on the thread that spins an executor.

    For example to destroy a client: on another thread that may coincide with rclpy collecting what it waits for, which raises
    InvalidHandle from spin_once and ends the spinning thread.
    """
    done, end = executor.create_task(function, *arguments), time.monotonic() + 20.0
    while not done.done():
        assert time.monotonic() < end, 'nothing spins this executor'
        time.sleep(0.001)


def without_shared_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """
    Return an environment as the launch files set it for the gate.

    A process that joins with shared memory can block others that use it, including the test's own
    (config/fastdds_commands.xml).
    """
    description = load()
    gate = next(node for node in description.nodes if node.name == 'command_gate')
    return {**environment, **gate.own_environment(environment, description.environment)}

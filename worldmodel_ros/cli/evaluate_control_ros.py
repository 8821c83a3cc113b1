"""``worldmodel evaluate control --ros``: the same tasks with the real nodes and topics, in real time."""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT
from worldmodel_ros.bringup.description import load
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.evaluate.control.episode import Episode
from worldmodel_ros.evaluate.control.summary import DEFINITIONS, table
from worldmodel_ros.evaluate.control.tasks import TASKS

if TYPE_CHECKING:
    from worldmodel_ros.nodes.judging.listener import Heard

ROBOT = 'robot'  # name of the controller in the result
_PATIENCE = 20.0  # s, for an episode in addition to its time limit


def drive(tasks: tuple[str, ...], seeds: range, bringup: dict[str, str], log: Path, progress: Callable[[float], None]) -> dict:
    """Run each task in the rooms of ``seeds``; return the result. ``bringup``: values of bring-up arguments. Raises
    RuntimeError if an episode does not end."""
    episodes: dict[tuple[str, str], list[Episode]] = {}
    served: dict[str, dict] = {}
    shutil.rmtree(log, ignore_errors=True)
    for number, task in enumerate(tasks):
        heard = listen(task, seeds, bringup, log / task,
                       lambda share, before=number: progress((before + share) / len(tasks)))
        episodes[task, ROBOT] = judged(heard, len(seeds))
        served[task] = summary(heard)
    return {'seeds': f'{seeds.start}:{seeds.stop}', 'bringup': bringup, 'definitions': DEFINITIONS, 'tasks': table(episodes),
            'served': served}


def judged(heard: Heard, count: int) -> list[Episode]:
    """Return the first ``count`` judged episodes."""
    return [Episode(each['seed'], each['succeeded'], each['contacts'], each['seconds'], each['arrivals'], each['reason'])
            for each in heard.ended[:count]]


def listen(task: str, seeds: range, bringup: dict[str, str], log: Path, progress: Callable[[float], None]) -> Heard:
    """Start the nodes, run a task in the rooms of ``seeds``, and return what was received. Raises RuntimeError if an episode
    does not end."""
    description = load()
    nodes = description.resolve('sim', {**bringup, 'task': task, 'seed': seeds.start})
    with Supervisor(description.environment, log) as supervisor:
        supervisor.add(nodes)
        os.environ.update(supervisor.environment)  # before loading rclpy, so that this process joins the nodes' graph
        from worldmodel_ros.nodes.judging.listener import listening
        with listening('') as listener:
            supervisor.start()
            supervisor.wait_ready(ACTIVATION_TIMEOUT)
            # Start over: rooms that have passed while the model was loading do not count.
            supervisor.restart('/sim_robot')
            listener.begin()
            for count in range(1, len(seeds) + 1):
                if not listener.wait(count, TASKS[task].seconds + _PATIENCE):
                    raise RuntimeError(f'episode {count} of {task} did not end in time; logs of the nodes: {log}')
                progress(count / len(seeds))
            return listener.heard


def summary(heard: Heard) -> dict:
    """Return the shares of tiers, the latencies, the choices and the share of vetoed candidates."""
    ticks = sum(count for tier, count in heard.tiers.items() if tier != 'none')
    # None without a command: JSON has no NaN.
    latencies = ([round(float(each), 1) for each in np.percentile(np.array(heard.latencies) * 1e3, (50, 99, 100))]
                 if heard.latencies else [None] * 3)
    return {'ticks': {tier: round(count / max(1, ticks), 4) for tier, count in heard.tiers.most_common() if tier != 'none'},
            'camera_to_command_ms': {**dict(zip(('p50', 'p99', 'max'), latencies, strict=True)), 'n': len(heard.latencies)},
            'chosen': dict(heard.chosen.most_common()),
            'vetoed': round(heard.vetoed / max(1, heard.compared), 4)}

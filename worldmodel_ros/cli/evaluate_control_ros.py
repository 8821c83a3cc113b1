"""``worldmodel evaluate control --ros``: the same tasks, driven by the nodes over real topics, in real time."""
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
_PATIENCE = 20.0  # s, for an episode besides its own time


def drive(tasks: tuple[str, ...], seeds: range, bringup: dict[str, str], log: Path, progress: Callable[[float], None]) -> dict:
    """The result of so many rooms of each task. ``bringup``: values of its arguments. Raises RuntimeError where an episode
    does not end."""
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
    """Return the first ``count`` rooms that were judged."""
    return [Episode(each['seed'], each['succeeded'], each['contacts'], each['seconds'], each['arrivals'], each['reason'])
            for each in heard.ended[:count]]


def listen(task: str, seeds: range, bringup: dict[str, str], log: Path, progress: Callable[[float], None]) -> Heard:
    """Return what was heard of so many rooms of a task, driven by nodes that are started for them. Raises RuntimeError where an
    episode does not end."""
    description = load()
    nodes = description.resolve('sim', {**bringup, 'task': task, 'seed': seeds.start})
    with Supervisor(description.environment, log) as supervisor:
        supervisor.add(nodes)
        os.environ.update(supervisor.environment)  # before rclpy is loaded: this process joins their graph
        from worldmodel_ros.nodes.judging.listener import listening
        with listening('') as listener:
            supervisor.start()
            supervisor.wait_ready(ACTIVATION_TIMEOUT)
            # The rooms that have passed while the model was loaded are not counted.
            supervisor.restart('/sim_robot')
            listener.begin()
            for count in range(1, len(seeds) + 1):
                if not listener.wait(count, TASKS[task].seconds + _PATIENCE):
                    raise RuntimeError(f'no end of episode {count} of {task} was heard; logs of the nodes: {log}')
                progress(count / len(seeds))
            return listener.heard


def summary(heard: Heard) -> dict:
    """Return by what rungs ticks were answered, after what time, and what was chosen."""
    ticks = sum(count for tier, count in heard.tiers.items() if tier != 'none')
    latencies = np.array(heard.latencies or [np.nan]) * 1e3
    p50, p99, greatest = np.percentile(latencies, (50, 99, 100))
    return {'ticks': {tier: round(count / max(1, ticks), 4) for tier, count in heard.tiers.most_common() if tier != 'none'},
            'camera_to_command_ms': {'p50': round(float(p50), 1), 'p99': round(float(p99), 1), 'max': round(float(greatest), 1),
                                     'n': len(heard.latencies)},
            'chosen': dict(heard.chosen.most_common()),
            'vetoed': round(heard.vetoed / max(1, heard.compared), 4)}

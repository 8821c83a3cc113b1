"""The real world model node with an engine of random weights, at a camera's rate; started by ros_tick.py."""
from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from worldmodel_ros.nodes.spin import run
from worldmodel_ros.nodes.world_model_node import WorldModelNode

ENGINE = 'ROS_TICK_ENGINE'  # environment variable: JSON with preset, backend, rate_hz, gpus, parallel


def load_engine(model: str, backend: str, threads: int) -> Any:
    """What ENGINE asks for; the node's own parameters know no random weights, and are not looked at."""
    from worldmodel_ros.engine.loading import load_random
    from worldmodel_ros.model.presets import PRESETS
    wanted = json.loads(os.environ[ENGINE])
    name = wanted['preset']
    # A model's step is the camera's: what it would learn from data of that rate.
    PRESETS[name] = replace(PRESETS[name], step_period=1.0 / wanted['rate_hz'])
    several = {'gpus': wanted['gpus'], 'parallel': wanted['parallel']} if wanted['gpus'] > 1 else {}
    return load_random(name, wanted['backend'], threads, sessions=1, **several)


if __name__ == '__main__':
    sys.setswitchinterval(0.0005)  # as the node's own main does, and for the same reason
    raise SystemExit(run(partial(WorldModelNode, load_engine=load_engine)))

#!/usr/bin/env python3
"""The real world model node, with an engine of random weights at a camera's rate, or of shipped ones; for ros_tick.py."""
from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from worldmodel_ros import realtime
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.nodes.world_model.node import WorldModelNode

ENGINE = 'ROS_TICK_ENGINE'  # environment variable: JSON with preset, trained, rate_hz and gathered


def load_engine(model: str, **chosen: Any) -> Any:
    """Load an engine by the node's parameters, except for the model: ENGINE names a preset, which may have random weights."""
    from worldmodel_ros.engine.loading import load, load_random
    from worldmodel_ros.model.presets import PRESETS
    wanted = json.loads(os.environ[ENGINE])
    name = wanted['preset']
    if wanted['trained']:
        return load(name, sessions=1, **chosen)
    # The model's step becomes the camera's, as if trained on data of that rate.
    PRESETS[name] = replace(PRESETS[name], step_period=1.0 / wanted['rate_hz'])
    if wanted['gathered']:
        from tick_measure import gathering_engine
        return gathering_engine(name, chosen['backend'])
    return load_random(name, sessions=1, **chosen)


if __name__ == '__main__':
    sys.setswitchinterval(realtime.SWITCH_INTERVAL)  # as the node's own main does
    raise SystemExit(run(partial(WorldModelNode, load_engine=load_engine)))

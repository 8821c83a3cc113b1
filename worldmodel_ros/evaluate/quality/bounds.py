"""What could be foreseen at best: the simulator itself, without the one or two things that no camera shows.

A command begins a random latency after its frame. A simulator that knows the room, the robot and every command, but not
the latencies, is what a perfect world model could be; with nominal motor gains, what one could be that does not learn
from its window how this robot's wheels differ.
"""
from __future__ import annotations

import numpy as np

from ...sim.rollout import MAX_LATENCY
from ...sim.scene import TRACK
from ...sim.world import World
from .drives import Drive

_LATENCY = MAX_LATENCY / 2  # s, the mean


def resimulate(drive: Drive, start: int, steps: list[int], period: float, nominal_gains: bool) -> np.ndarray:
    """Pictures (len(steps), H, W, 3), so many periods after frame `start`, under the commands that were executed."""
    world = World(drive.seed, drive.frames.shape[1:3])
    world.restore(drive.snapshots[start])
    gains = world.scene.wheel_gain if nominal_gains else (1.0, 1.0)
    frames = []
    for step in range(1, max(steps) + 1):
        world.step(_without_gains(drive.actions[start + step - 1], gains), _LATENCY)
        world.step(_without_gains(drive.actions[start + step], gains), period - _LATENCY)
        if step in steps:
            frames.append(world.render())
    return np.stack(frames)


def _without_gains(action: np.ndarray, gains: tuple[float, float]) -> np.ndarray:
    """The command whose wheel speeds, times the gains, are those of `action`."""
    v, w = action.tolist()
    left, right = (v - w * TRACK / 2) / gains[0], (v + w * TRACK / 2) / gains[1]
    return np.array([(left + right) / 2, (right - left) / TRACK])

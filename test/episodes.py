"""Episodes from which training can learn within seconds, without a simulator."""
from __future__ import annotations

import numpy as np
from small_model import SMALL

from worldmodel_ros.train.data.episodes import Episodes


def moving_squares(episodes=6, steps=40, seed=0) -> Episodes:
    """Return episodes of a bright square that moves by the action, with labels of the simulator's kinds."""
    rng = np.random.default_rng(seed)
    size = SMALL.image_size[0]
    actions = np.repeat(rng.uniform(-1, 1, (episodes, steps // 4, 2)), 4, 1).astype(np.float32)
    place = np.clip(np.cumsum(actions * 1.5, 1) + size / 2, 4, size - 5)
    grid = np.arange(size)
    row = np.abs(grid[None, None, :, None] - place[..., 0, None, None]) < 4
    column = np.abs(grid[None, None, None, :] - place[..., 1, None, None]) < 4
    goals = len(SMALL.goals)
    return Episodes.of_arrays({
        'frames': np.where((row & column)[..., None], 220, 40).astype(np.uint8).repeat(3, -1), 'actions': actions,
        'expert': np.repeat(actions[:, :, None], goals, 2) * 0.3, 'collided': rng.random((episodes, steps)) < 0.1,
        'visible': np.ones((episodes, steps, goals), bool),
        'goal_distance': rng.uniform(0.3, 4.0, (episodes, steps, goals)).astype(np.float32),
        'poses': np.concatenate([place, place[..., :1] / 10], -1).astype(np.float32) / 10})

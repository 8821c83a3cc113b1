"""Renders an episode of the simulator that is driven by the expert."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.demo.goals import GoalSequence
from worldmodel_ros.demo.recording import GoalAttempt
from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.expert import expert_action
from worldmodel_ros.sim.world import LIMITS, World

PERIOD = 0.1  # between actions, and between images [s]


def expert_episode(seed: int, goals: list[str], seconds: float, size: tuple[int, int],
                   top: bool) -> tuple[list[np.ndarray], list[GoalAttempt]]:
    """Drive to the goals in turn; return an image per action, uint8 (H, W or 2 W, 3), and the goal attempts.

    ``size``: (H, W) of the camera image; ``top``: add the view from above on its right.
    """
    world = World(seed, image_size=size)
    sequence = GoalSequence(goals)
    sequence.start(0.0)
    limiter, command = TwistLimiter(LIMITS), (0.0, 0.0)
    frames = []
    for _ in range(max(1, round(seconds / PERIOD))):
        views = [world.render(), world.render_top(size)] if top else [world.render()]
        frames.append(np.concatenate(views, axis=1))
        goal = sequence.current.goal
        command = limiter.limit(expert_action(world, goal).tolist(), command, PERIOD).twist
        world.step(command, PERIOD)
        sequence.update(world.time, world.goal_distance(goal))
    return frames, sequence.attempts

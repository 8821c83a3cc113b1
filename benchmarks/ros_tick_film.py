"""The images of the robot of ros_tick.py: a recording of a street in the simulator, at the rate of its camera."""
from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass

import numpy as np

SEED = 3_100_000  # of the street
SECONDS = 4.0
STEP = 0.005  # s, divides the simulator's times


@dataclass(frozen=True)
class Film:
    """``images`` uint8 (H, W, 3), and at each one, by wheel odometry, poses (3,), m and rad, and twists (2,), m/s and rad/s;
    it loops with a jump of the scene. ``goal``: the colour behind the street."""

    images: list[np.ndarray]
    poses: list[tuple[float, ...]]
    twists: list[tuple[float, ...]]
    goal: str


def film(size: tuple[int, int], rate: float) -> Film:
    """Record a film in a process of its own, so that the caller gets no context on a GPU."""
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        return pool.apply(_film, (size, rate))


def _film(size: tuple[int, int], rate: float) -> Film:
    from worldmodel_ros.sim.odometry import WheelOdometry
    from worldmodel_ros.sim.task_scenes import goal_colour, task_scene
    from worldmodel_ros.sim.world import World
    world = World(SEED, size)
    world.load(task_scene('street', SEED))
    wheels, images, poses, twists = WheelOdometry(world), [], [], []
    for number in range(round(SECONDS * rate)):
        # The robot looks to and fro, as if waiting at the roadside.
        action = np.array([0.0, 0.3 * math.sin(math.tau * number / (SECONDS * rate))])
        steps = round((number + 1) / rate / STEP) - round(number / rate / STEP)
        world.step(action, steps * STEP)
        wheels.update(world)
        images.append(world.render())
        poses.append(wheels.pose)
        twists.append(wheels.twist)
    return Film(images, poses, twists, goal_colour('street', SEED))

"""Drives simulated robots to a goal, without ROS: by the expert, by a model's policy, or by what a model imagines."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.control.planning import Planner
from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.expert import expert_action
from worldmodel_ros.sim.scene import COLOURS, GOAL_DISTANCE
from worldmodel_ros.sim.world import LIMITS, World
from .drives import execute

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine

SECONDS = 30.0  # that a robot has to reach its goal
PERIOD = 0.1    # s, between two commands

# Called once per tick with the world, its newest image, the command that was executed before it, and the goal; returns
# the commands (K, 2) for this tick and those after it, before any limits.
Driver = Callable[[World, np.ndarray, tuple[float, float], str], np.ndarray]


@dataclass(frozen=True)
class Episode:
    """``seconds``: to the goal, or all that were driven; ``start_distance`` in m; ``contacts``: steps with one.

    ``jumps`` (2,): mean absolute difference (m/s, rad/s) between the command of a tick and what the tick before had
    planned for the same moment; None for drivers without a plan.
    """

    seed: int
    goal: str
    start_distance: float
    seconds: float
    reached: bool
    contacts: int
    jumps: tuple[float, float] | None


def expert(world: World, frame: np.ndarray, executed: tuple[float, float], goal: str) -> np.ndarray:
    """Return the command of the rule that knows the true state."""
    return expert_action(world, goal)[None]


def policy(engine: Engine, steps: int) -> Driver:
    """Return the driver as deployed: plan, and check the plan by imagining it in ``steps``."""
    session = engine.open_session()

    def drive(world: World, frame: np.ndarray, executed: tuple[float, float], goal: str) -> np.ndarray:
        session.observe(frame, np.asarray(executed))
        return session.imagine(session.plan(goal), steps).actions
    return drive


def planner(engine: Engine) -> Driver:
    """Return the driver that takes the best of several imagined branches."""
    session = engine.open_session()
    planner = Planner(session)

    def drive(world: World, frame: np.ndarray, executed: tuple[float, float], goal: str) -> np.ndarray:
        session.observe(frame, np.asarray(executed))
        return planner.choose(goal).future.actions
    return drive


def drivers(engine: Engine) -> Mapping[str, Callable[[], Driver]]:
    """Return a factory of each driver, by name."""
    return {'expert': lambda: expert, 'two_step': lambda: policy(engine, 2), 'one_step': lambda: policy(engine, 1),
            'planner': lambda: planner(engine)}


def drive(seed: int, driver: Driver, image_size: tuple[int, int], seconds: float | None = None) -> Episode:
    """Drive one episode towards a goal drawn from ``seed``; it has SECONDS, or ``seconds``."""
    seconds = SECONDS if seconds is None else seconds
    world, limiter = World(seed=seed, image_size=image_size), TwistLimiter(LIMITS)
    goal = COLOURS[int(np.random.default_rng(seed).integers(len(COLOURS)))]
    distance, executed, contacts = world.goal_distance(goal), (0.0, 0.0), 0
    plans: list[np.ndarray] = []
    while len(plans) < round(seconds / PERIOD) and world.goal_distance(goal) >= GOAL_DISTANCE:
        plans.append(driver(world, world.render(), executed, goal))
        command = limiter.limit(tuple(plans[-1][0].tolist()), executed, PERIOD).twist
        contacts += execute(world, executed, command, PERIOD)
        executed = command
    return Episode(seed, goal, distance, len(plans) * PERIOD, world.goal_distance(goal) < GOAL_DISTANCE, contacts,
                   _jumps(plans))


def _jumps(plans: list[np.ndarray]) -> tuple[float, float] | None:
    pairs = [np.abs(new[0] - old[1]) for old, new in zip(plans, plans[1:]) if len(old) > 1]
    return tuple(np.mean(pairs, 0).tolist()) if pairs else None

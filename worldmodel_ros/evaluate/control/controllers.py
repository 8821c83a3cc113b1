"""The controllers: the planner with each of the forecasts, the reactive policy alone, and the shipped model."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from worldmodel_ros.control import reactive_policy as policy
from worldmodel_ros.control.deliberation import Deliberation, scene_of
from worldmodel_ros.control.scene_view import with_places
from worldmodel_ros.control.sight import Sight
from worldmodel_ros.control.terms import Reach, Term, has_places
from worldmodel_ros.motion import PERIOD
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import Scene
from worldmodel_ros.sim.world import World
from .forecast import LONG_MEMORY, SHORT_MEMORY, Forecast, Frozen, Memory, Oracle, Tracker, from_start
from .tasks import Task

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.forecast.loading import Forecasts
    from worldmodel_ros.model.cloned_policy import ClonedPolicy

Look = Callable[[World, tuple[int, int]], np.ndarray]  # what a camera sees of a world, uint8 (H, W, 3), at a size (H, W)
# Steps of comparing candidates, for controllers with a learned forecast.
STEPS: Mapping[str, int] = {'still': 0, 'none': 0, 'one_step': 1, 'two_step': 2, 'motion_unseen': 1, 'another_future': 1}


ANOTHER = 'another_future'


class Controller(Protocol):
    """Decides once per tick; one for each episode."""

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        """Return the command (2,), m/s and rad/s, before any limits.

        ``terms``: what is asked for. ``sent``: commands (2,) in force until this one takes effect, each with its duration in
        seconds. ``executed`` (2,): the command in force at the observation.
        """


class Planning:
    """The planner with a forecast; the command's delay is compensated by rolling robot and scene forward."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast, self._planner = forecast, Deliberation()
        self._start: tuple[float, float, float] | None = None

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        self._start = self._start or world.pose
        self._forecast.update(world, odometry)
        view = self._forecast.view(self._planner.times(sum(seconds for seconds, _ in sent)))
        if has_places(terms) and not isinstance(self._forecast, Tracker):
            view = from_start(view, self._start)
        return self._planner.choose(terms, view, sent, sent[-1][1] if sent else executed).command


class Reactive:
    """The policy alone, on where things were last seen; neither motion nor delay is accounted for."""

    def __init__(self) -> None:
        self._forecast = Frozen(Memory(SHORT_MEMORY, SHORT_MEMORY))
        self._search = policy.Search()
        self._start: tuple[float, float, float] | None = None

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        self._start = self._start or world.pose
        self._forecast.update(world, odometry)
        view = self._forecast.view(np.zeros(1))
        if has_places(terms):
            view = with_places(from_start(view, self._start), terms, 1)
        aim = policy.Aim.of(terms, view.things)
        if aim.target not in view.things:
            places = np.array([thing.path[0] for thing in view.things.values()]).reshape(-1, 2)
            radii = np.array([thing.radius for thing in view.things.values()])
            return self._search.command(view.pose, places, radii, view.walls, PERIOD)
        self._search.found()
        path, others, radii = scene_of(aim, view)
        return policy.drive(aim, view.pose[None], path, others[:, 0], radii, view.walls)[0]


class Shipped:
    """B1: the policy of a shipped model, from its camera alone; for tasks that are a goal that it knows."""

    def __init__(self, engine: Engine, look: Look = World.render) -> None:
        self._session, self._look = engine.open_session(), look

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        goal = next(term.target for term in terms if isinstance(term, Reach))
        self._session.observe(self._look(world, self._session.spec.image_size), np.asarray(executed, np.float32))
        return self._session.plan(goal)[0]


CONTROLLERS: Mapping[str, Callable[[], Controller]] = {
    'oracle': lambda: Planning(Oracle(Memory(LONG_MEMORY, math.inf))),
    'oracle_full_view': lambda: Planning(Oracle(Memory(math.inf, math.inf, all_known=True))),
    'oracle_short_memory': lambda: Planning(Oracle(Memory(SHORT_MEMORY, SHORT_MEMORY))),
    'tracker': lambda: Planning(Tracker(Memory(LONG_MEMORY, math.inf))),
    'frozen': lambda: Planning(Frozen(Memory(LONG_MEMORY, math.inf))),
    'reactive': Reactive}
SHIPPED = 'b1'
CLONED: Mapping[str, int] = {'b2': 0, 'b2_seed_1': 1, 'b2_seed_2': 2}  # training seed of its weights
NAMES = (*CONTROLLERS, SHIPPED, *CLONED, *STEPS)
MEANINGS = {
    'oracle': 'planner on the true future of what the camera sees or saw: movers for 6 s, standing things for good',
    'oracle_full_view': 'the same, knowing everything from the beginning',
    'oracle_short_memory': 'the same as oracle, remembering 1.6 s',
    'tracker': 'the same planner and memory; constant velocity fitted to noisy sightings over 0.8 s, odometry from encoders',
    'frozen': 'the same planner and memory; everything stays where it was last seen',
    'reactive': 'the policy of the planner alone, on what was seen in the last 1.6 s',
    'b1': 'the shipped model, its policy alone; only tasks that are a goal which it knows',
    'b2': 'a policy cloned from the oracle, on what the network of a learned forecast has seen, without what it forecasts',
    'b2_seed_1': 'the same, of another training', 'b2_seed_2': 'the same, of a third one',
    'still': 'the planner on a learned forecast: what the newest frame shows stays where it is',
    'none': 'the policy of the planner alone, on what the head on the newest frame tells: the rung without imagination',
    'one_step': 'the planner on a learned forecast',
    'two_step': 'the same, with three rounds of candidates, each around the best of those before, or 3 s ahead instead of 2',
    'motion_unseen': 'ablation: one_step, whose every window is the newest frame repeated',
    'another_future': 'ablation: one_step, in whose forecast things move as those of another room of the kind do'}


def applies(name: str, task: Task) -> bool:
    """Return whether a controller can be given a task: ``b1`` knows only goal objects."""
    return name != SHIPPED or (not task.to_places and any(isinstance(term, Reach) for term in task.terms('red')))


def sees(name: str) -> bool:
    """Return whether a controller decides on images, so that its camera matters."""
    return name == SHIPPED or on_forecast(name)


def on_forecast(name: str) -> bool:
    """Return whether a controller needs a learned forecast."""
    return name in STEPS or name in CLONED


def make(name: str, engine: Engine | None = None, forecast: Forecasts | None = None, another: Scene | None = None,
         look: Look = World.render, image: np.ndarray | None = None, policy: ClonedPolicy | None = None) -> Controller:
    """Return a controller for an episode; ``b1`` needs an engine, those of STEPS a forecast, those of CLONED also its
    ``policy``, ``another_future`` a scene of ``another`` room. ``look``: its camera; ``image``: of that, the goal image of
    those of STEPS. Raises KeyError for an unknown name."""
    if name in CLONED:
        from .cloned import Cloned
        return Cloned(policy, forecast.open(), forecast.image_size, look)
    if name in STEPS:
        from .learned import AnotherFuture, Learned, MotionUnseen
        if name == 'motion_unseen':
            stream = MotionUnseen(forecast.open)
        elif name == ANOTHER:
            stream = AnotherFuture(forecast.open(), forecast.open(), another, forecast.image_size)
        else:
            stream = forecast.open()
        sight = None if image is None else Sight.of(forecast.open(), image)
        return Learned(stream, forecast.image_size, STEPS[name], name == 'still', look, sight)
    return Shipped(engine, look) if name == SHIPPED else CONTROLLERS[name]()

"""The tasks: what each asks for in the scene of a seed, and its time limit."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel_ros.control.task import to_place
from worldmodel_ros.control.terms import Avoid, Clearance, KeepDistance, PassBehind, Reach, Term, Touch
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.task_scenes import Variant, goal_colour, task_scene

_PLACES = 7  # keeps the random places independent of the scene of the same seed
_DRAWS = 200  # of a pose with something to see
_SEEN_WITHIN, _SEEN_TO_SIDE = 3.0, math.radians(36.0)  # m and rad: of a thing that an image must show
_RECALL_GOALS = 100  # drawn in advance: more than can be reached


@dataclass(frozen=True)
class Task:
    """One kind of task.

    ``seconds``: the time limit. ``terms``: what is asked for, given the colour of the goal object. ``contact_fails``: whether
    any contact that is not asked for ends the episode. ``goals_follow``: whether a new goal is given at each arrival, until
    the time is over. ``to_places``: ``terms`` are given a place instead, x and y in m in the frame of the robot's odometry,
    which begins where it does; ``by_image``: and the yaw there, for which a robot that sees gets its camera's image there
    instead; not ``shows_thing``: even one of walls alone. ``told``: one of the combinations that no policy may be trained for.
    """

    name: str
    scene: str
    seconds: float
    terms: Callable[[Any], tuple[Term, ...]]
    contact_fails: bool = False
    goals_follow: bool = False
    told: bool = False
    to_places: bool = False
    by_image: bool = False
    shows_thing: bool = True

    def setup(self, seed: int, variant: Variant = Variant()) -> Setup:
        """Return the episode of a seed."""
        if self.to_places:
            scene = task_scene(self.scene, seed, variant)
            return Setup(self, seed, scene, (self._goal(scene),))
        goals = [goal_colour(self.scene, seed)]
        if self.goals_follow:
            rng = np.random.default_rng([seed, len(COLOURS)])
            while len(goals) < _RECALL_GOALS:
                others = [colour for colour in COLOURS if colour != goals[-1]]
                goals.append(others[int(rng.integers(len(others)))])
        return Setup(self, seed, task_scene(self.scene, seed, variant), tuple(goals))

    def _goal(self, scene: Scene) -> tuple[float, ...]:
        if not self.by_image:
            return _free_place(scene)
        return _pose_to_see(scene) if self.shows_thing else _any_pose(scene)


@dataclass(frozen=True)
class Setup:
    """An episode of a task before it begins; ``goals``: colours of the goal objects, or places, in the order in which they are
    given."""

    task: Task
    seed: int
    scene: Scene
    goals: tuple[str | tuple[float, ...], ...]

    def terms(self, arrivals: int = 0) -> tuple[Term, ...]:
        """Return the terms after so many arrivals."""
        return self.task.terms(self.goals[min(arrivals, len(self.goals) - 1)])


def to_world(scene: Scene, pose: tuple[float, ...]) -> tuple[float, float, float]:
    """Return a pose in the frame of the robot's start as one in the world frame."""
    x0, y0, yaw = scene.start
    cos, sin = math.cos(yaw), math.sin(yaw)
    x, y, turn = pose
    return x0 + cos * x - sin * y, y0 + sin * x + cos * y, math.remainder(yaw + turn, math.tau)


def _pose_to_see(scene: Scene) -> tuple[float, float, float]:
    """A free place, and a yaw with which a goal object is in unobstructed view, in the frame of the robot's start. Images of
    walls alone fit many places."""
    for draw in range(_DRAWS):
        pose = _any_pose(scene, draw)
        x, y, yaw = to_world(scene, pose)
        for prop in scene.props:
            way = np.array([prop.x - x, prop.y - y])
            away, bearing = float(np.hypot(*way)), math.remainder(math.atan2(way[1], way[0]) - yaw, math.tau)
            others = [np.array([other.x - x, other.y - y]) for other in scene.props if other is not prop]
            hidden = any(np.hypot(*other) < away and abs(other[0] * way[1] - other[1] * way[0]) / away < 2.0 * prop.radius
                         and other @ way > 0.0 for other in others)
            if away < _SEEN_WITHIN and abs(bearing) < _SEEN_TO_SIDE and not hidden:
                return pose
    raise ValueError(f'scene {scene.seed} shows nothing from any of {_DRAWS} poses')


def _any_pose(scene: Scene, draw: int = 0) -> tuple[float, float, float]:
    """A free place and any yaw, in the frame of the robot's start."""
    rng = np.random.default_rng([scene.seed, _PLACES, draw, 1])
    return (*_free_place(scene, draw), float(rng.uniform(-math.pi, math.pi)))


def _free_place(scene: Scene, draw: int = 0) -> tuple[float, float]:
    """A place where a robot can stand, a metre or more from its start, in the frame of its start."""
    rng = np.random.default_rng([scene.seed, _PLACES, draw] if draw else [scene.seed, _PLACES])
    x0, y0, yaw = scene.start
    half = np.array([scene.width, scene.depth]) / 2 - 0.4
    while True:
        place = rng.uniform(-half, half)
        apart = min(math.dist(place, (prop.x, prop.y)) - prop.radius for prop in scene.props)
        if apart > 0.35 and math.dist(place, (x0, y0)) > 1.0:
            dx, dy = place - (x0, y0)
            return (float(math.cos(yaw) * dx + math.sin(yaw) * dy), float(math.cos(yaw) * dy - math.sin(yaw) * dx))


def _reach(goal: str) -> tuple[Term, ...]:
    return Reach(goal), Clearance(0.05)  # to the goal too: a robot that rushes at it cannot stop for the next one


def _street(goal: str) -> tuple[Term, ...]:
    return Reach(goal), Clearance(0.12, weight=2.0, but=(goal,))


TASKS: Mapping[str, Task] = {task.name: task for task in (
    Task('intercept', 'intercept', 4.0, lambda goal: (Touch('ball'), Clearance(0.03, weight=0.3, but=('ball',)))),
    Task('street', 'street', 20.0, _street, contact_fails=True),
    Task('recall', 'recall', 60.0, _reach, goals_follow=True),
    Task('rooms', 'rooms', 30.0, _reach),
    Task('places', 'rooms', 30.0, lambda place: to_place(place).terms, to_places=True),
    Task('images', 'rooms', 30.0, lambda pose: to_place(pose).terms, to_places=True, by_image=True),
    Task('any_images', 'rooms', 30.0, lambda pose: to_place(pose).terms, to_places=True, by_image=True, shows_thing=False),
    Task('follow', 'follow', 12.0,
         lambda goal: (KeepDistance('ball', 1.0), Clearance(0.12, weight=2.0)), contact_fails=True, told=True),
    Task('second_ball', 'second_ball', 4.0,
         lambda goal: (Touch('second ball'), Avoid('first ball', 0.0, weight=2.0),
                       Clearance(0.03, weight=0.3, but=('first ball', 'second ball'))), told=True),
    Task('avoid_red', 'avoid_red', 15.0,
         lambda goal: (Reach(goal), Avoid('red', 0.25, weight=2.0), Clearance(0.05, but=(goal,))), contact_fails=True,
         told=True),
    Task('pass_behind', 'pass_behind', 20.0,
         lambda goal: (Reach(goal), PassBehind('mover', weight=3.0), Clearance(0.12, weight=2.0, but=(goal,))),
         contact_fails=True, told=True))}
GOALS = {'pose': 'places', 'image': 'images', 'colour': 'rooms'}  # tasks that are only a goal, by its kind
RUN_TIME_TASKS = tuple(name for name, task in TASKS.items() if task.told)


def expand(names: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of tasks, ``runtime`` replaced by all of RUN_TIME_TASKS. Raises ValueError for an unknown one."""
    found: list[str] = []
    for name in names:
        if name != 'runtime' and name not in TASKS:
            raise ValueError(f'unknown task {name!r}: choose from {", ".join((*TASKS, "runtime"))}')
        found.extend(RUN_TIME_TASKS if name == 'runtime' else (name,))
    return tuple(dict.fromkeys(found))

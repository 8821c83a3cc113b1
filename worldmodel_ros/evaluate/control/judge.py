"""Judges whether a driven episode succeeds or fails, by the terms of its task."""
from __future__ import annotations

import math

import numpy as np

from worldmodel_ros.control.terms import KEPT, REACHED, ROBOT_RADIUS, Avoid, KeepDistance, PassBehind, Reach, StayIn, Touch
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import World
from .tasks import Setup

AT_PLACE = 0.3      # m, between the robot's centre and a place to reach: by its own odometry it goes nearer
LOOKS_AT = math.radians(20.0)  # from the yaw of a place to reach with one
KEPT_SHARE = 0.6    # of the time after SETTLE_S, for which a distance has to be kept
SETTLE_S = 3.0      # s, to get to the distance
_EVERY = 0.1        # s, between two checks of a distance


class Judge:
    """Checks the true world after each piece of an episode.

    An episode fails as soon as a term is violated: too near to what is to be avoided, crossed ahead of what is to be passed
    behind, out of the region, a contact that the task does not allow. It succeeds once all that is to be touched or reached
    was; without such a term, if it has not failed when its time is over and each distance was kept to +-KEPT m for KEPT_SHARE
    of the time. ``succeeded`` is None until then; ``contacts``: checks with a contact that no term asks for, such as with a
    goal that is to be reached; ``arrivals``: goals reached, of tasks with successive goals.
    """

    def __init__(self, setup: Setup, world: World) -> None:
        self._setup, self._world = setup, world
        self._done: set[str] = set()
        self._kept: list[bool] = []
        self._looked = world.time
        self._before = self._places()
        self._start = world.pose
        self.succeeded: bool | None = None
        self.reason = ''
        self.contacts = 0
        self.arrivals = 0

    @property
    def terms(self) -> tuple:
        """The terms currently in force."""
        return self._setup.terms(self.arrivals)

    def look(self) -> None:
        """Check what the last step of the world, of 0.1 s at most, has led to."""
        world, task = self._world, self._setup.task
        terms = self.terms
        wanted = {term.target for term in terms if isinstance(term, Touch)}
        unwanted = world.touched - wanted
        self.contacts += bool(unwanted)
        if failure := self._failure(terms, unwanted):
            self._end(False, failure)
            return
        self._done |= world.touched & wanted
        self._done |= {term.target for term in terms if isinstance(term, Reach) and self._is_reached(term)}
        aims = {term.target for term in terms if isinstance(term, Touch | Reach)}
        if aims and aims <= self._done:
            if task.goals_follow:
                self.arrivals, self._done = self.arrivals + 1, set()
            else:
                self._end(True, 'done')
                return
        if world.time - self._looked >= _EVERY - 1e-6:
            self._looked, self._before = world.time, self._places()
            if world.time > SETTLE_S:
                self._kept += [abs(world.goal_distance(term.target) - term.distance) <= KEPT
                               for term in terms if isinstance(term, KeepDistance)]
        if world.time >= task.seconds - 1e-6:
            kept = bool(self._kept) and float(np.mean(self._kept)) >= KEPT_SHARE
            self._end(task.goals_follow or (not aims and kept), 'time over')

    def _is_reached(self, term: Reach) -> bool:
        if term.place is None:
            return self._world.goal_distance(term.target) < REACHED
        x, y, *yaw = term.place
        turned = self._world.pose[2] - self._start[2]
        faces = not yaw or abs(math.remainder(turned - yaw[0], math.tau)) < LOOKS_AT
        return faces and math.dist(self._from_start(), (x, y)) < AT_PLACE

    def _failure(self, terms: tuple, unwanted: frozenset[str]) -> str:
        world = self._world
        if unwanted and self._setup.task.contact_fails:
            return f'touched {min(unwanted)}'
        for term in terms:
            match term:
                case Avoid():
                    for name, shape in self._things():
                        gap = world.goal_distance(name) - shape.radius - ROBOT_RADIUS
                        if term.concerns(name, shape.colour) and (name in world.touched or gap < term.clearance):
                            return f'too near to {name}'
                case PassBehind() if self._crossed_ahead(term.target):
                    return f'crossed ahead of {term.target}'
                case StayIn():
                    x, y = self._from_start()
                    if not (term.x_min <= x <= term.x_max and term.y_min <= y <= term.y_max):
                        return 'left the region'
        return ''

    def _crossed_ahead(self, name: str) -> bool:
        now = self._places()
        steps = np.array([[self._before[key], now[key]] for key in ('', name)])
        return bool(PassBehind.crosses_ahead(steps[None, 0], steps[1], np.array([self._looked, self._world.time])).any())

    def _things(self) -> list:
        scene = self._world.scene
        return [*zip(COLOURS, scene.props, strict=True), *((mover.name, mover) for mover in scene.movers)]

    def _places(self) -> dict[str, tuple[float, float]]:
        """Where the robot ('') and everything else are."""
        world = self._world
        return {'': world.pose[:2]} | {name: world.position(name) for name, _ in self._things()}

    def _from_start(self) -> tuple[float, float]:
        """Where the robot is, in the frame whose origin is its start."""
        x0, y0, yaw = self._start
        dx, dy = self._world.pose[0] - x0, self._world.pose[1] - y0
        return math.cos(yaw) * dx + math.sin(yaw) * dy, math.cos(yaw) * dy - math.sin(yaw) * dx

    def _end(self, succeeded: bool, reason: str) -> None:
        if self.succeeded is None:
            self.succeeded, self.reason = succeeded, reason

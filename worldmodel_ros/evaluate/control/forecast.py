"""Forecasts for a planner: where things are, and where those that move by themselves will be, whatever the robot does.

A learned model replaces these baselines: anything with ``update`` and ``view`` is a forecast.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from worldmodel_ros.control.scene_view import View
from worldmodel_ros.control.terms import Thing
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import World

SHORT_MEMORY = 1.6   # s: what ``tiny`` sees at once
LONG_MEMORY = 6.0    # s, for movers; standing objects are then remembered for good


class Forecast(Protocol):
    """A source of views. One for each episode."""

    def update(self, world: World, odometry: WheelOdometry) -> None:
        """Take the observation of a tick; only the baselines may read the state of ``world``."""

    def view(self, times: np.ndarray) -> View:
        """Return what is known, with things forecast for ``times`` (T,), s from the newest observation on."""


class Memory:
    """Remembers what a camera has seen: movers for ``movers`` s, standing things for ``still`` s."""

    def __init__(self, movers: float, still: float, all_known: bool = False) -> None:
        self._spans, self._all = (movers, still), all_known
        self._seen: dict[str, float] = {}
        self.visible: set[str] = set()

    def look(self, world: World) -> None:
        """Record what the camera sees."""
        names = [*COLOURS, *(mover.name for mover in world.scene.movers)]
        self.visible = set(names) if self._all else {name for name in names if world.visible(name)}
        self._seen |= dict.fromkeys(self.visible, world.time)

    def known(self, time: float) -> list[str]:
        """Return the names of what is remembered at ``time``."""
        return [name for name, seen in self._seen.items() if time - seen <= self._spans[name in COLOURS] + 1e-6]


class Oracle:
    """The true future of what is remembered, including bounces and stops, but not what the robot will push."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._future = memory, TrueFuture()

    def update(self, world: World, odometry: WheelOdometry) -> None:
        self._world = world
        self._memory.look(world)

    def view(self, times: np.ndarray) -> View:
        paths = self._future.paths(self._world, times)
        return _true_view(self._world, {name: paths[name] for name in self._memory.known(self._world.time)})


class Frozen:
    """Everything stays at its true place when it was last seen."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._places: dict[str, tuple[float, float]] = {}

    def update(self, world: World, odometry: WheelOdometry) -> None:
        self._world = world
        self._memory.look(world)
        self._places |= {name: world.position(name) for name in self._memory.visible}

    def view(self, times: np.ndarray) -> View:
        return _true_view(self._world, {name: np.tile(self._places[name], (len(times), 1))
                                        for name in self._memory.known(self._world.time)})


class Tracker:
    """Constant velocity, by least squares over the sightings of FIT_S, with a prior of SPEED (ridge regression); in the
    odometry's frame, whose errors it shares.

    A sighting is the true bearing and range of a visible thing with errors as large as those of a learned head in a pilot
    study (1.2 degrees; 6 % of the range), so that this is not just an oracle without bounces.
    """

    FIT_S = 0.8
    SPEED = 0.45       # m/s, standard deviation of each component of a mover's velocity, before anything was seen
    BEARING, RANGE = math.radians(1.2), 0.06
    _FEWEST, _STREAM = 4, 31

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._sightings: dict[str, list[tuple[float, float, float]]] = {}

    def update(self, world: World, odometry: WheelOdometry) -> None:
        self._world, self._pose, self._twist = world, np.array(odometry.pose), np.array(odometry.twist)
        self._memory.look(world)
        rng = np.random.default_rng([world.seed, self._STREAM, round(world.time * 1e6)])
        x, y, yaw = odometry.pose
        for name in sorted(self._memory.visible):
            bearing = yaw + world.goal_bearing(name) + self.BEARING * rng.standard_normal()
            away = world.goal_distance(name) * (1.0 + self.RANGE * rng.standard_normal())
            seen = self._sightings.setdefault(name, [])
            seen.append((world.time, x + away * math.cos(bearing), y + away * math.sin(bearing)))

    def view(self, times: np.ndarray) -> View:
        things = {}
        for name in self._memory.known(self._world.time):
            shape = _shape(self._world, name)
            things[name] = Thing(self._path(name, times), shape.radius, shape.colour, name not in COLOURS)
        return View(self._pose, self._twist, things, self._walls())

    def _path(self, name: str, times: np.ndarray) -> np.ndarray:
        seen = np.array(self._sightings[name])
        fit = seen[seen[:, 0] >= seen[-1, 0] - self.FIT_S - 1e-6]
        if name in COLOURS or len(fit) < self._FEWEST:
            return np.tile(fit[:, 1:].mean(0), (len(times), 1))
        middle = fit[:, 0].mean()
        since = fit[:, 0] - middle
        error = self.RANGE * math.dist(fit[-1, 1:], self._pose[:2])  # m, of a sighting
        velocity = since @ fit[:, 1:] / (since @ since + (error / self.SPEED) ** 2)
        return fit[:, 1:].mean(0) + (self._world.time + times - middle)[:, None] * velocity

    def _walls(self) -> np.ndarray:
        """The true walls as seen from the robot, moved into the odometry's frame."""
        tx, ty, tyaw = self._world.pose
        x, y, yaw = self._pose
        turn = yaw - tyaw
        cos, sin = math.cos(turn), math.sin(turn)
        walls = _room_walls(self._world)
        normals = walls[:, :2] @ np.array([[cos, sin], [-sin, cos]])
        distance = walls[:, 2] - walls[:, :2] @ (tx, ty)
        return np.column_stack([normals, distance + normals @ (x, y)])


class TrueFuture:
    """Where everything will be without the robot: simulated once, and again when something deviates from it."""

    STEP = 0.05        # s, between samples
    TOLERANCE = 0.02   # m, of a deviation after which it is simulated again

    def __init__(self) -> None:
        self._fork: World | None = None
        self._samples: list[np.ndarray] = []

    def paths(self, world: World, times: np.ndarray) -> dict[str, np.ndarray]:
        """Return places (T, 2) of all things at ``times`` (T,) from now, by name."""
        names = [*COLOURS, *(mover.name for mover in world.scene.movers)]
        now = np.array([world.position(name) for name in names])
        if self._fork is None or np.abs(self._at(world.time - self._start, names) - now).max() > self.TOLERANCE:
            self._fork, self._start, self._samples = world.fork(), world.time, [now]
            self._fork.move_robot((100.0, 100.0, 0.0))
        offset = world.time - self._start
        return self._sampled(offset + times, names)

    def _sampled(self, times: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
        self._extend(float(times[-1]), names)
        index = np.minimum((times / self.STEP).astype(int), len(self._samples) - 2)
        share = (times / self.STEP - index)[:, None, None]
        samples = np.array(self._samples[:int(index[-1]) + 2])
        places = (1.0 - share) * samples[index] + share * samples[index + 1]
        return {name: places[:, i] for i, name in enumerate(names)}

    def _at(self, time: float, names: list[str]) -> np.ndarray:
        return np.array(list(self._sampled(np.array([time, time]), names).values()))[:, 0]

    def _extend(self, time: float, names: list[str]) -> None:
        while (len(self._samples) - 1) * self.STEP < time + self.STEP:
            self._fork.step((0.0, 0.0), self.STEP)
            self._samples.append(np.array([self._fork.position(name) for name in names]))


def from_start(view: View, start: tuple[float, float, float]) -> View:
    """Return a view in the world frame as one in the frame of a robot's odometry, which began at ``start``."""
    cos, sin = math.cos(start[2]), math.sin(start[2])
    turn = np.array([[cos, -sin], [sin, cos]])
    things = {name: replace(thing, path=(thing.path - start[:2]) @ turn) for name, thing in view.things.items()}
    walls = np.column_stack([view.walls[:, :2] @ turn, view.walls[:, 2] - view.walls[:, :2] @ start[:2]])
    pose = np.array([*(view.pose[:2] - start[:2]) @ turn, math.remainder(view.pose[2] - start[2], math.tau)])
    return View(pose, view.twist, things, walls)


def _true_view(world: World, paths: Mapping[str, np.ndarray]) -> View:
    things = {}
    for name, path in paths.items():
        shape = _shape(world, name)
        things[name] = Thing(path, shape.radius, shape.colour, name not in COLOURS)
    return View(np.array(world.pose), np.array(world.twist), things, _room_walls(world))


def _shape(world: World, name: str):
    return next(thing for key, thing in (*zip(COLOURS, world.scene.props, strict=True),
                                         *((mover.name, mover) for mover in world.scene.movers)) if key == name)


def _room_walls(world: World) -> np.ndarray:
    half_x, half_y = world.scene.width / 2, world.scene.depth / 2
    return np.array([[1.0, 0.0, half_x], [0.0, 1.0, half_y], [-1.0, 0.0, half_x], [0.0, -1.0, half_y]])

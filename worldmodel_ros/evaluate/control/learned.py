"""The planner on a learned scene forecast, which sees the camera and the wheels alone.

What a name looks like is told with the task (the ball of this colour); where it is, whether it is there, and where it will
be, the network says. The walls are the network's, too.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from worldmodel_ros.control.terms import Term, Thing
from worldmodel_ros.model.scene_forecast import HORIZONS, SLOTS, ForecastStream, SceneForecast
from worldmodel_ros.sim.movers import BALL_RADIUS, Ball
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.world import World
from .forecast import View
from .motion import PERIOD
from .planner import Planner

BALLS = ('magenta', 'cyan', 'red')  # colours of the slots after the goal objects'
_LIKELY = 0.5
_OBJECT_RADIUS, _SHUTTLE_RADIUS = 0.16, 0.135  # m, the middle of what the scenes have
_TIMES = np.array([0.0, *(PERIOD * frames for frames in HORIZONS)])


def slots(scene: Scene) -> list[str | None]:
    """Name of the thing in each slot of a forecast, None where there is none; the order of the shuttles is the scene's."""
    names: list[str | None] = [*COLOURS] + [None] * (SLOTS - len(COLOURS))
    shuttle = len(COLOURS) + len(BALLS)
    for mover in scene.movers:
        if isinstance(mover, Ball):
            names[len(COLOURS) + BALLS.index(mover.colour)] = mover.name
        else:
            names[shuttle] = mover.name
            shuttle += 1
    return names


class Learned:
    """Plans on the forecast of a network, by so many `passes`; `still`: as if everything stayed where it is."""

    def __init__(self, forecast: SceneForecast, passes: int, still: bool = False) -> None:
        self._stream, self._still, self._planner = ForecastStream(forecast, passes), still, Planner()
        self._size = forecast.preset.image_size

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        presence, places, walls = self._stream.observe(world.render(self._size), executed, np.array(odometry.twist))
        times = self._planner.times(sum(seconds for seconds, _ in sent))
        pose = np.array(odometry.pose)
        if self._still:
            places = np.broadcast_to(places[:1], places.shape)
        view = View(pose, np.array(odometry.twist), self._things(world.scene, presence, _from_base(places, pose), times),
                    _planes(walls, pose))
        return self._planner.choose(terms, view, sent, sent[-1][1] if sent else executed).command

    @staticmethod
    def _things(scene: Scene, presence: np.ndarray, places: np.ndarray, times: np.ndarray) -> dict[str, Thing]:
        names, first, things = slots(scene), len(COLOURS) + len(BALLS), {}
        colours = {mover.name: mover.colour for mover in scene.movers} | {colour: colour for colour in COLOURS}
        for slot in np.flatnonzero(presence > _LIKELY).tolist():
            name = names[slot]
            if name is None and slot < first:
                continue  # a ball that the task's scene does not have has no name
            name = name or f'mover {slot - first + 1}'
            path = np.stack([np.interp(times, _TIMES, places[:, slot, axis]) for axis in range(2)], 1)
            radius = _OBJECT_RADIUS if slot < len(COLOURS) else BALL_RADIUS if slot < first else _SHUTTLE_RADIUS
            things[name] = Thing(path, radius, colours.get(name, 'violet'), slot >= len(COLOURS))
        return things


def _from_base(places: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Places (..., 2) in base_link to the frame of the pose (3,)."""
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return places @ np.array([[cos, sin], [-sin, cos]]) + pose[:2]


def _planes(walls: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Walls as a forecast gives them, (6,), to rows of unit normal and offset, (4, 3), in the frame of the pose."""
    angles = math.atan2(walls[1], walls[0]) / 4.0 + np.arange(4) * math.pi / 2 + pose[2]
    normals = np.stack([np.cos(angles), np.sin(angles)], 1)
    return np.column_stack([normals, walls[2:] + normals @ pose[:2]])

"""Whether a robot's camera sees what an image of walls alone shows, by the true world, be it from elsewhere along them."""
from __future__ import annotations

import math

import numpy as np

from worldmodel_ros.control import wall_colours
from worldmodel_ros.control.localisation import QUARTER
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.world import World
from .judge import AT_PLACE, LOOKS_AT
from .tasks import Setup, to_world

_COLUMNS = 64  # of an image


class View:
    """What the camera shows at the pose of a setup's image. ``walls_alone``: whether no goal object is in it."""

    def __init__(self, setup: Setup, world: World) -> None:
        """``world``: loaded with the scene, and left as it is."""
        self._pose = to_world(setup.scene, setup.goals[0])
        there = world.fork()
        there.move_robot(self._pose)
        self.walls_alone = not _things(there)
        self._distances = _distances(setup.scene, self._pose)
        first = round(self._pose[2] / QUARTER)  # number of the wall that is most ahead
        angle = first * QUARTER - self._pose[2]
        walls = np.array([math.cos(4 * angle), math.sin(4 * angle), *np.roll(self._distances, -first)])
        self._shown = [(first + number) % 4 for number in wall_colours.shown(walls, _COLUMNS)]

    def is_seen(self, world: World) -> bool:
        """Return whether the image shows walls alone, and the robot looks at the same walls, at the same distance within
        AT_PLACE m and heading within LOOKS_AT, with no goal object in view."""
        turned = abs(math.remainder(world.pose[2] - self._pose[2], math.tau))
        farther = np.abs(_distances(world.scene, world.pose) - self._distances)[self._shown]
        return self.walls_alone and turned < LOOKS_AT and bool((farther < AT_PLACE).all()) and not _things(world)


def _things(world: World) -> list[str]:
    return [colour for colour in COLOURS if world.visible(colour)]


def _distances(scene: Scene, pose: tuple[float, float, float]) -> np.ndarray:
    """Return metres to the walls at +x, +y, -x and -y."""
    x, y, _ = pose
    return np.array([scene.width / 2 - x, scene.depth / 2 - y, scene.width / 2 + x, scene.depth / 2 + y])

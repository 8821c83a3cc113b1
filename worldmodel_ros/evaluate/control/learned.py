"""The robot's own decisions on a learned scene forecast, which sees the camera and the wheels alone.

What a name looks like is told with the task (the ball of this colour); where it is, whether it is there, and where it will
be, the network says. The walls are the network's, too.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from worldmodel_ros.control import pilot
from worldmodel_ros.control.pilot import Forecast, Pilot
from worldmodel_ros.control.scene_view import Slot
from worldmodel_ros.control.terms import Term
from worldmodel_ros.sim.movers import Ball
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.world import World

BALLS = ('magenta', 'cyan', 'red')  # colours of the slots after the goal objects'
_STEPS = 4  # that the policy is asked for, of which the first counts


def slots(scene: Scene) -> list[str | None]:
    """Name of the thing in each slot of a forecast, None where there is none; the order of the shuttles is the scene's."""
    names: list[str | None] = [*COLOURS] + [None] * (len(pilot.SLOTS) - len(COLOURS))
    shuttle = len(COLOURS) + len(BALLS)
    for mover in scene.movers:
        if isinstance(mover, Ball):
            names[len(COLOURS) + BALLS.index(mover.colour)] = mover.name
        else:
            names[shuttle] = mover.name
            shuttle += 1
    return names


def named_slots(scene: Scene) -> list[Slot | None]:
    """The robot's slots by the names of a scene; a ball that it does not have has none."""
    first = len(COLOURS) + len(BALLS)
    return [replace(slot, name=name) if name else slot if number >= first else None
            for number, (name, slot) in enumerate(zip(slots(scene), pilot.SLOTS, strict=True))]


class Learned:
    """Decides as the robot does on its rungs: by a forecast of one or two ``passes``, or by reacting to what the newest frame
    shows, with none. ``still``: the planner, as if everything stayed where the newest frame shows it."""

    def __init__(self, forecast: Forecast, size: tuple[int, int], passes: int, still: bool = False,
                 look: Callable[[World, tuple[int, int]], np.ndarray] = World.render) -> None:
        """``size``: of the images, (H, W); ``look``: the camera."""
        self._forecast, self._size, self._passes, self._still, self._look = forecast, size, passes, still, look
        self._pilot: Pilot | None = None

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        decider = self._pilot = self._pilot or Pilot(self._forecast, named_slots(world.scene))
        decider.odometry.measured(odometry.pose, odometry.twist)
        decider.observe(self._look(world, self._size), executed, self._passes)
        previous = sent[-1][1] if sent else executed
        if self._passes or self._still:
            return decider.decide(terms, sent, previous, still=self._still).command
        return decider.react(terms, previous, _STEPS).command

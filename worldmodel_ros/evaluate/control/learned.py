"""The robot's own decisions on a learned scene forecast, from the camera and the wheels alone.

The task says what a named thing looks like (the ball of this colour); the network says whether it is there, where it is and
where it will be, and where the walls are.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from worldmodel_ros.control import pilot
from worldmodel_ros.control.deliberation import Deliberation, Effort
from worldmodel_ros.control.pilot import STANDING, Forecast, Pilot
from worldmodel_ros.control.scene_view import Slot
from worldmodel_ros.control.sight import Sight
from worldmodel_ros.control.task import to_sight
from worldmodel_ros.control.terms import Term
from worldmodel_ros.motion import PERIOD
from worldmodel_ros.sim.movers import Ball
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.world import World

BALLS = ('magenta', 'cyan', 'red')  # colours of the slots after the goal objects'
_STEPS = 4  # that the policy is asked for; only the first is used


def slots(scene: Scene) -> list[str | None]:
    """Return the name of the thing in each slot of a forecast, None without one; the order of the shuttles is the scene's."""
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
    """Return the robot's slots with the names of a scene; None for a ball that it lacks."""
    first = len(COLOURS) + len(BALLS)
    return [replace(slot, name=name) if name else slot if number >= first else None
            for number, (name, slot) in enumerate(zip(slots(scene), pilot.SLOTS, strict=True))]


class Learned:
    """Decides as the robot does on its rungs: in one or two ``steps`` of comparing candidates on a forecast or, in none, by
    reacting to what the newest frame shows. ``still``: plan as if everything stayed where the newest frame shows it.
    ``pilot``: the robot's own, after its first decision."""

    def __init__(self, forecast: Forecast, size: tuple[int, int], steps: int, still: bool = False,
                 look: Callable[[World, tuple[int, int]], np.ndarray] = World.render, sight: Sight | None = None,
                 deliberation: Deliberation | None = None) -> None:
        """``size``: of the images, (H, W); ``look``: the camera; ``sight``: the view to reach, whatever the terms;
        ``deliberation``: in place of the robot's."""
        self._forecast, self._size, self._steps, self._still, self._look = forecast, size, steps, still, look
        self.pilot: Pilot | None = None
        self._sent: list[tuple[float, np.ndarray]] = []
        self._deliberation = deliberation
        self._terms: Sequence[Term] = to_sight(sight, STANDING).terms if sight else ()
        self._told = sight is None

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        decider = self.pilot = self.pilot or Pilot(self._forecast, named_slots(world.scene), self._deliberation)
        decider.odometry.measured(odometry.pose, odometry.twist)
        decider.observe(self._look(world, self._size), executed, min(self._steps, 1),
                        commanded=mean_command(self._sent, executed))
        self._sent = sent
        if self._told and tuple(terms) != self._terms:
            self._terms = tuple(terms)  # the same object as long as they hold
        terms = self._terms
        previous = sent[-1][1] if sent else executed
        if self._steps or self._still:
            return decider.decide(terms, sent, previous, still=self._still,
                                  effort=Effort.of(terms, max(1, self._steps))).command
        return decider.react(terms, previous, _STEPS).command


def mean_command(sent: list[tuple[float, np.ndarray]], then: np.ndarray) -> np.ndarray:
    """Return the mean of the commands (2,) in force over a period: those ``sent`` before, each with its duration in s, and
    ``then`` for what these leave of it."""
    shares = np.diff(np.minimum(np.cumsum([seconds for seconds, _ in sent]), PERIOD), prepend=0.0) / PERIOD
    return then * (1.0 - shares.sum()) + sum(share * command for share, (_, command) in zip(shares, sent, strict=True))


class MotionUnseen:
    """A forecast whose windows repeat the newest frame: an ablation, which has to fail where motion matters."""

    _FRAMES = 4

    def __init__(self, open_stream: Callable[[], Forecast]) -> None:
        self._open = open_stream
        self.times = open_stream().times

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stream, still = self._open(), np.zeros(2)
        for _ in range(self._FRAMES):
            found = stream.observe(image, still, still, passes)
        return found


class AnotherFuture:
    """A forecast that knows where things are, but moves them like those of another room, where a robot stands and looks: an
    ablation, which has to fail where the future matters."""

    def __init__(self, forecast: Forecast, other: Forecast, scene: Scene, size: tuple[int, int]) -> None:
        """``other``: a stream for the other room, whose ``scene`` is of the same kind; ``size`` of images, (H, W)."""
        self._forecast, self._other, self._size = forecast, other, size
        self._world = World()
        self._world.load(scene)
        self.times = forecast.times

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        presence, places, walls = self._forecast.observe(image, executed, measured, passes)
        still = np.zeros(2)
        there, others, _ = self._other.observe(self._world.render(self._size), still, still, passes)
        self._world.step(still, PERIOD)
        moved = (others - others[0]) * (there > 0.5)[:, None]
        return presence, places[0] + moved, walls

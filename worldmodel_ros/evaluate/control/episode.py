"""One closed-loop episode of one task: the world moves on while the controller decides."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from worldmodel_ros.motion import PERIOD
from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.world import LIMITS, TIMESTEP, World
from .controllers import Controller
from .judge import Judge
from .tasks import Setup
from .views import View

_TIMES = Path(__file__).with_name('rung_times.json')
_STANDS = 0.05  # m/s and rad/s
_TICK = round(PERIOD / TIMESTEP)  # physics steps between two decisions


@cache
def rung_seconds() -> Mapping[str, float]:
    """Return the seconds from an image to its command on each rung, from the committed table of measured times."""
    table = json.loads(_TIMES.read_text())
    return {name: row['seconds'] for name, row in table.items() if 'seconds' in row}


@dataclass(frozen=True)
class Episode:
    """``seconds``: driven, to success, failure or the end of the time. ``contacts``: checks, two or three per tick, with a
    contact that no term asks for. ``arrivals``: of tasks with successive goals. ``reason``: why it ended. For tasks by an
    image: ``walls_alone``, whether that shows no goal object; ``alike``, whether the robot reached its pose or, if it shows
    walls alone, stood in the end where it sees the same."""

    seed: int
    success: bool
    contacts: int
    seconds: float
    arrivals: int
    reason: str
    walls_alone: bool | None = None
    alike: bool | None = None


def drive(setup: Setup, controller: Controller, delay: float, world: World) -> Episode:
    """Drive an episode in ``world``, which is loaded with its scene; a command takes effect ``delay`` s after its image.

    The delay is rounded up to physics steps of 5 ms, and may be longer than the time between two decisions.
    """
    world.load(setup.scene)
    judge, odometry, limiter = Judge(setup, world), WheelOdometry(world), TwistLimiter(LIMITS)
    view = View(setup, world) if setup.task.by_image else None
    late = math.ceil(delay / TIMESTEP - 1e-9)
    commands = [(0, (0.0, 0.0))]  # physics step at which each takes effect; the first is in force
    now = 0
    while judge.succeeded is None:
        executed = np.array(commands[0][1])
        choice = controller.decide(world, odometry, judge.terms, _sent(commands, now, late), executed)
        commands.append((now + late, limiter.limit(choice.tolist(), commands[-1][1], PERIOD).twist))
        for end in (now + _TICK // 2, now + _TICK):  # two checks per tick: no robot rolls through a goal in between
            while now < end and judge.succeeded is None:
                if len(commands) > 1 and commands[1][0] <= now:
                    commands.pop(0)
                    continue
                until = min(end, commands[1][0]) if len(commands) > 1 else end
                world.step(commands[0][1], (until - now) * TIMESTEP)
                now = until
                judge.look()
        odometry.update(world)
    stands = max(map(abs, world.twist)) < _STANDS
    alike = view and (bool(judge.succeeded) or (stands and view.is_seen(world)))
    return Episode(setup.seed, bool(judge.succeeded), judge.contacts, round(now * TIMESTEP, 3), judge.arrivals, judge.reason,
                   view and view.walls_alone, alike)


def _sent(commands: list[tuple[int, tuple[float, float]]], now: int, late: int) -> list[tuple[float, np.ndarray]]:
    """The commands in force from ``now`` until the next one takes effect, each with its duration in seconds."""
    ends = [begin for begin, _ in commands[1:]] + [now + late]
    begins = [now] + ends[:-1]
    return [((end - begin) * TIMESTEP, np.array(command))
            for (_, command), begin, end in zip(commands, begins, ends, strict=True)]

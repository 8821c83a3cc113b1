"""Drivers for collecting training data: each chooses the commands of an episode, step by step."""
from collections.abc import Callable, Mapping
import math

import numpy as np

from worldmodel_ros.sim.expert import search_action
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import LIMITS, World

# Called once per step with the world and the expert's commands for the goals, (4, 2); returns the next target.
Driver = Callable[[World, np.ndarray], np.ndarray]

_LOW = np.array([LIMITS.v_min, -LIMITS.w_max])
_HIGH = np.array([LIMITS.v_max, LIMITS.w_max])
# Commands typical of people and what-if questions: one constant speed, straight or in a curve.
_PLAIN_V = (-0.3, -0.2, 0.0, 0.0, 0.2, 0.3, 0.4, 0.4, 0.6)
_PLAIN_W = (-1.5, -1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5)
APART = 8  # steps without a contact after which ``Touch`` drives up to the next object
MEMORY = 17  # steps that ``Searcher`` remembers: what a policy sees at once, a window of ``tiny`` plus the newest image


class Expert:
    """Drives to one goal after another, with bursts of noise, whose errors it corrects."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._goal = int(rng.integers(len(COLOURS)))
        self._rest = 0  # steps to stay at a reached goal
        self._burst = 0
        self._noise = np.zeros(2)

    @property
    def goal(self) -> int:
        """Index in COLOURS of the present goal."""
        return self._goal

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        rng = self._rng
        command = self._command(world, expert)
        if not command.any():
            self._rest += 1
        if self._rest > 5 and rng.random() < 0.3:
            self._goal, self._rest = (self._goal + int(rng.integers(1, len(COLOURS)))) % len(COLOURS), 0
        if self._burst == 0 and rng.random() < 0.04:
            self._burst = int(rng.integers(4, 16))
        self._burst = max(0, self._burst - 1)
        scale = np.array([0.25, 0.9]) if self._burst else np.zeros(2)
        self._noise = 0.8 * self._noise + 0.6 * scale * rng.standard_normal(2)
        return command + self._noise

    def _command(self, world: World, expert: np.ndarray) -> np.ndarray:
        return expert[self._goal]


class Searcher(Expert):
    """An expert that searches for a goal it has not seen for MEMORY steps, and so visits the states that a policy visits
    that learns to search."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._unseen = np.full(len(COLOURS), MEMORY)  # steps since each goal was in view

    def _command(self, world: World, expert: np.ndarray) -> np.ndarray:
        self._unseen = np.where([world.visible(colour) for colour in COLOURS], 0, self._unseen + 1)
        return expert[self._goal] if self._unseen[self._goal] < MEMORY else search_action(world)


class Smooth:
    """Wanders: an Ornstein-Uhlenbeck process, mostly forward, at times in reverse."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._mean = np.array([rng.uniform(-0.15, 0.4), 0.0])
        self._value = self._mean + rng.standard_normal(2) * (0.2, 0.6)

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        if self._rng.random() < 0.03:
            self._mean = self._rng.uniform((-0.25, -0.5), (0.5, 0.5))
        self._value += 0.12 * (self._mean - self._value) + self._rng.standard_normal(2) * (0.08, 0.30)
        return self._value


class Steps:
    """Holds random commands, each for a random time; half of them are plain manoeuvres."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._left = 0
        self._command = np.zeros(2)

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        rng = self._rng
        if self._left == 0:
            self._left = int(rng.integers(4, 20))
            if rng.random() < 0.5:
                self._command = np.array([rng.choice(_PLAIN_V), rng.choice(_PLAIN_W)])
            else:
                self._command = rng.uniform(_LOW, _HIGH)
        self._left -= 1
        return self._command


class Ram:
    """Drives into an object and pushes it, perhaps to the wall; then backs off and picks another."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._choose()

    def _choose(self) -> None:
        self._target = COLOURS[int(self._rng.integers(len(COLOURS)))]
        self._speed = self._rng.uniform(0.2, LIMITS.v_max)
        self._push, self._back = int(self._rng.integers(5, 30)), int(self._rng.integers(5, 20))

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        if self._push > 0:
            self._push -= world.collided
            return _towards(world, self._target, self._speed)
        if self._back > 0:
            self._back -= 1
            return np.array([-0.2, 0.4 * math.sin(self._back)])
        self._choose()
        return np.zeros(2)


class Touch:
    """Drives up to an object until it touches it, then does what ``Steps`` does: turns, pushes, backs off, stands. Once it
    has touched nothing for a while, it picks another."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._steps = rng, Steps(rng)
        self._choose()

    def _choose(self) -> None:
        self._target = COLOURS[int(self._rng.integers(len(COLOURS)))]
        self._speed = self._rng.uniform(0.2, LIMITS.v_max)
        self._free = APART  # steps without a contact

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        if world.collided:
            self._free = 0
        elif self._free < APART:
            self._free += 1
            if self._free == APART:
                self._choose()
        return self._steps(world, expert) if self._free < APART else _towards(world, self._target, self._speed)


class LookAway:
    """Turns away from what it sees, stays away for a while, at times driving, and turns back to what it saw before."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pieces: list[tuple[int, tuple[float, float]]] = []  # steps and command of each piece ahead, the last one first

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        if not self._pieces:
            self._pieces = self._plan()
        left, command = self._pieces.pop()
        if left > 1:
            self._pieces.append((left - 1, command))
        return np.array(command)

    def _plan(self) -> list[tuple[int, tuple[float, float]]]:
        rng = self._rng
        speed = rng.choice((-1.0, 1.0)) * rng.uniform(0.6, LIMITS.w_max)
        turn = max(1, round(rng.uniform(1.2, 3.6) / abs(speed) / 0.1))
        # Some turn back at once, from full speed: a body that is still turning overshoots what its wheels report.
        away = int(rng.integers(1, 8)) if rng.random() < 0.3 else int(rng.integers(2, 60))
        drive = (0.0, 0.0) if rng.random() < 0.6 else (rng.uniform(-0.2, 0.3), rng.uniform(-0.2, 0.2))
        look = int(rng.integers(3, 20)), (rng.choice((0.0, 0.0, 0.2)), 0.0)
        back = turn, (0.0, -speed)
        if rng.random() < 0.25:  # all around instead
            back = max(1, round(math.tau / abs(speed) / 0.1) - turn), (0.0, speed)
        return [look, back, (away, drive), (turn, (0.0, speed))]


def _towards(world: World, colour: str, speed: float) -> np.ndarray:
    """Return the command straight at an object, at most at ``speed``."""
    bearing = world.goal_bearing(colour)
    turn = min(max(2.5 * bearing, -LIMITS.w_max), LIMITS.w_max)
    return np.array([speed * max(0.0, math.cos(bearing)) ** 3, turn])


DRIVERS: Mapping[str, Callable[[np.random.Generator], Driver]] = {
    'expert': Expert, 'searcher': Searcher, 'smooth': Smooth, 'steps': Steps, 'ram': Ram, 'touch': Touch,
    'look_away': LookAway}
DEFAULT_MIX: Mapping[str, float] = {'expert': 0.5, 'smooth': 0.18, 'steps': 0.2, 'ram': 0.12}

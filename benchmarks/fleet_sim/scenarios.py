"""Scenarios of the fleet: which robots are on which GPU, from when to when, and which GPUs fail or slow down."""
from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

from worldmodel_ros.serving.fleet.router import Demand, NoRoom, Router

PERIOD = 0.1  # s between the ticks of a robot
DETECTION = 0.25  # s from the loss of a GPU until the router knows, and has placed its sessions again
WINDOW = 16  # frames that a session without its cache must commit again
RACK = 16    # GPUs
COST = 0.1 / 11.3  # s of a GPU that a tick in two steps takes, in the best batches (fleet_sim.json)


@dataclass(frozen=True)
class Stay:
    """
    A robot on a GPU from ``start`` to ``end`` [s]. Its first frame there is at ``start`` + ``phase``; ``warm_up`` older ones
    are to be committed again.
    """

    robot: int
    start: float
    end: float
    phase: float
    warm_up: int = 0


@dataclass(frozen=True)
class Gpu:
    """History of one GPU. From ``slow_from`` [s] on everything takes ``slowdown`` times as long; lost at ``dies``."""

    stays: tuple[Stay, ...] = ()
    slowdown: float = 1.0
    slow_from: float = 0.0
    dies: float = float('inf')


@dataclass(frozen=True)
class Scenario:
    """A fleet's history over ``seconds``. ``staggered``: each robot takes the phase that its scheduler advises."""

    name: str
    robots: int
    gpus: int
    seconds: float
    burst: float = 0.0  # s within which all robots start and tick; 0: at random phases
    staggered: bool = False
    lost: int = 0  # GPUs lost at a third of the time
    slow: int = 0  # GPUs that become slower at a third of the time
    slowdown: float = 1.75
    router: bool = False    # the fleet's router places sessions, by phase and feasibility; else: where the fewest are
    restored: float = 0.0   # s to read a session from a store; 0: its frames are committed again

    def scaled(self, factor: float) -> Scenario:
        """Return the same with fewer robots and GPUs, for a trial run."""
        return replace(self, robots=max(1, round(self.robots * factor)), gpus=max(2, round(self.gpus * factor)),
                       lost=self.lost and max(1, round(self.lost * factor)),
                       slow=self.slow and max(1, round(self.slow * factor)))


def scenarios(gpus: int = 128) -> list[Scenario]:
    """Return all scenarios of the benchmark."""
    return [*(Scenario('steady', robots, gpus, 60.0 if robots == 1500 else 20.0)
              for robots in (1000, 1500, 3000, 5000, 10_000)),
            Scenario('start together', 1500, gpus, 20.0, burst=0.005),
            Scenario('start together, staggered', 1500, gpus, 20.0, burst=0.005, staggered=True),
            Scenario('loss of 16 GPUs', 1500, gpus, 20.0, lost=16),
            Scenario('router', 1000, gpus, 20.0, router=True),
            Scenario('loss of a rack, committed again', 1000, gpus, 20.0, lost=RACK, router=True),
            Scenario('loss of a rack, from the store', 1000, gpus, 20.0, lost=RACK, router=True, restored=0.1),
            Scenario('6 GPUs 1.75 times slower', 1500, gpus, 20.0, slow=6)]


@dataclass
class _Fewest:
    """Places each session on the GPU with the fewest."""

    gpus: list[int]
    _heap: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._heap = [(0, gpu) for gpu in self.gpus]
        heapq.heapify(self._heap)

    def place(self, robot: int, phase: float, now: float) -> int:
        count, gpu = self._heap[0]
        heapq.heapreplace(self._heap, (count + 1, gpu))
        return gpu

    def lose(self, lost: set[int]) -> None:
        self._heap = [(count, gpu) for count, gpu in self._heap if gpu not in lost]
        heapq.heapify(self._heap)


class _Routed:
    """Places sessions as a fleet does."""

    def __init__(self, gpus: int) -> None:
        self._router = Router([1.0] * gpus, [gpu // RACK for gpu in range(gpus)])

    def place(self, robot: int, phase: float, now: float) -> int | None:
        """Return a GPU; None if none has time for the robot, which then uses its own model."""
        try:
            return self._router.route(robot, Demand(COST, PERIOD, phase / PERIOD % 1.0), now).server
        except NoRoom:
            return None

    def lose(self, lost: set[int]) -> None:
        self._router.lose(lost)


def histories(scenario: Scenario, seed: int) -> list[Gpu]:
    """Let a router place the robots; return the history of each GPU."""
    rng = random.Random(seed)
    router = _Routed(scenario.gpus) if scenario.router else _Fewest(list(range(scenario.gpus)))
    stays: list[list[Stay]] = [[] for _ in range(scenario.gpus)]
    for robot in range(scenario.robots):
        phase = rng.random() * (scenario.burst or PERIOD)
        place = router.place(robot, phase, 0.0)
        if place is not None:
            stays[place].append(Stay(robot, 0.0, scenario.seconds, phase))
    event = scenario.seconds / 3
    lost, slow = set(range(scenario.lost)), set(range(scenario.lost, scenario.lost + scenario.slow))
    router.lose(lost)
    for gpu in sorted(lost):
        moved = event + DETECTION
        for stay in stays[gpu]:
            # The camera keeps its timing: the phase is from the start of the stay.
            start = moved + scenario.restored
            later = Stay(stay.robot, start, scenario.seconds, (stay.phase - start) % PERIOD,
                         0 if scenario.restored else WINDOW)
            place = router.place(stay.robot, stay.phase, moved)
            if place is not None:
                stays[place].append(later)
        stays[gpu] = [replace(stay, end=moved) for stay in stays[gpu]]
    return [Gpu(tuple(stays[gpu]), scenario.slowdown if gpu in slow else 1.0, event,
                event if gpu in lost else float('inf')) for gpu in range(scenario.gpus)]

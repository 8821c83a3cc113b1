"""A load of robots for a service in real time: periodic ticks of recorded episodes, and their outcomes.

The generator is one light thread of the service's process: it sleeps, submits frames that were rendered before, and
notes the replies; its own lateness is part of the result.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from worldmodel_ros.realtime import apply
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.messages import Picture, Reply, Tick
from worldmodel_ros.serving.service.service import Service

FIRST_SEED = 3_500_000
WARM_UP = 1.0  # s of each level that are not counted: windows fill, the ladder settles
LAST_REPLIES = 0.4  # s to wait after the last tick; later replies are far too late


@dataclass(frozen=True)
class Times:
    """``budget``: camera stamp to robot; ``allowance``: the part of it outside the service; ``jitter``: standard deviation of
    the time of a tick, clipped at three of them. All in s."""

    budget: float = 0.050
    allowance: float = 0.015
    jitter: float = 0.001


@dataclass
class Offered:
    """One tick and its outcome: ``due`` and ``finish`` are steady times."""

    arrival: float
    due: float
    counted: bool
    refused: bool = False
    tier: Tier | None = None  # None: never answered
    finish: float = float('inf')


class Robot:
    """One robot: the listener of its session."""

    def __init__(self, phase: float, frames: np.ndarray, actions: np.ndarray, goal: str):
        self.phase, self.frames, self.actions, self.goal = phase, frames, actions, goal
        self.ticks: list[Offered] = []
        self.arriving: tuple[int, int] | None = None  # thread and number of the tick being submitted
        self.failures: list[str] = []

    def replied(self, reply: Reply) -> None:
        tick = self.ticks[reply.sequence]
        if reply.tier is Tier.NONE:
            tick.refused = self.arriving == (threading.get_ident(), reply.sequence)
        else:
            tick.tier, tick.finish = reply.tier, time.monotonic()

    def pictured(self, picture: Picture) -> None:
        pass

    def failed(self, reason: str, error: Exception) -> None:
        self.failures.append(reason)


@dataclass
class Load:
    """Ticks of many robots at once, with random phases, against one service."""

    service: Service
    drives: dict[str, np.ndarray]
    times: Times = field(default_factory=Times)
    priority: int = 0  # of the generating thread, under SCHED_FIFO
    robots: list[Robot] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)  # of this generator, s
    admission: list[float] = field(default_factory=list)  # s that the service blocked it

    def open(self, count: int, seed: int, apart: bool = False) -> None:
        """Open ``count`` robots; the same seed gives the same episodes and phases. ``apart``: evenly spaced phases."""
        rng, spec = np.random.default_rng(seed), self.service.spec
        for index in range(count):
            frames, actions = (self.drives[name][index % len(self.drives[name])] for name in ('frames', 'actions'))
            shift = rng.integers(len(frames))
            phase = index / count * spec.step_period if apart else rng.uniform(0.0, spec.step_period)
            self.robots.append(Robot(phase, np.roll(frames, shift, 0), np.roll(actions, shift, 0),
                                     spec.goals[index % len(spec.goals)]))
            self.sessions.append(self.service.open(self.robots[-1], seed=index))

    def run(self, seconds: float, seed: int, meanwhile=None) -> None:
        """Submit ticks for ``seconds``, after WARM_UP. ``meanwhile`` is called between ticks, and must return at once."""
        apply(logging.getLogger(__name__), self.priority)
        rng, spec = np.random.default_rng(seed), self.service.spec
        begin = time.monotonic() + 0.05
        schedule = []
        for index, robot in enumerate(self.robots):
            first = begin + (robot.phase - begin) % spec.step_period
            count = int((WARM_UP + seconds) / spec.step_period)
            jitter = np.clip(rng.standard_normal(count), -3, 3) * self.times.jitter
            schedule += [(first + k * spec.step_period + jitter[k], index, k) for k in range(count)]
        for at, index, k in sorted(schedule):
            while (left := at - time.monotonic()) > 0:
                time.sleep(min(left, 0.01))
                if meanwhile:
                    meanwhile()
            self._offer(index, k, at, counted=at >= begin + WARM_UP)
        time.sleep(LAST_REPLIES)

    def close(self) -> None:
        for session in self.sessions:
            self.service.close(session)

    def counted(self) -> list[Offered]:
        return [tick for robot in self.robots for tick in robot.ticks if tick.counted]

    def _offer(self, index: int, number: int, at: float, counted: bool) -> None:
        robot = self.robots[index]
        # The stamp is when the tick should have come: lateness of this thread counts against the service.
        due = at + self.times.budget - self.times.allowance
        robot.ticks.append(Offered(at, due, counted))
        frame = number % len(robot.frames)
        robot.arriving = threading.get_ident(), number
        begun = time.monotonic()
        self.service.tick(self.sessions[index], Tick(robot.frames[frame], robot.actions[frame], due, number, number + 1,
                                                     goal=robot.goal))
        robot.arriving = None
        self.lateness.append(begun - at)
        self.admission.append(time.monotonic() - begun)


def row(load: Load, seconds: float) -> dict:
    """Summarise a load: late is whatever was not refused at arrival and not answered by its deadline, whether it
    was answered later, given up or superseded by a newer tick. Milliseconds are from arrival to reply."""
    ticks, stats = load.counted(), load.service.stats()
    answered = [tick for tick in ticks if tick.tier is not None]
    late = [tick for tick in ticks if not tick.refused and tick.finish > tick.due]
    latency = np.array([tick.finish - tick.arrival for tick in answered]) * 1e3
    return {'sessions': len(load.robots), 'offered_hz': round(len(ticks) / seconds, 2), 'ticks': len(ticks),
            'late_ratio': round(len(late) / len(ticks), 5),
            'refused_ratio': round(sum(tick.refused for tick in ticks) / len(ticks), 5),
            'never_answered_ratio': round(1 - (len(answered) + sum(tick.refused for tick in ticks)) / len(ticks), 5),
            'tiers': dict(Counter(tick.tier.name for tick in answered)),
            'p50_ms': _quantile(latency, 0.5), 'p99_ms': _quantile(latency, 0.99),
            'prediction_error': stats['prediction_error'], 'step_time_error': stats['step_time_error'],
            'frames_taken_in_later': stats['frames_taken_in_later'], 'busy': stats['busy'],
            'lowered': stats['lowered'], 'generator_late_p99_ms': _quantile(np.array(load.lateness) * 1e3, 0.99),
            'admission_p99_ms': _quantile(np.array(load.admission) * 1e3, 0.99),
            'failures': [reason for robot in load.robots for reason in robot.failures][:3]}


def film(size: tuple[int, int], episodes: int, steps: int) -> dict[str, np.ndarray]:
    """Return episodes in different rooms: frames uint8 (E, T, H, W, 3) and actions (E, T, A)."""
    from worldmodel_ros.sim.rollout import collect  # needs MuJoCo, which a machine with a GPU may lack

    arrays = collect(range(FIRST_SEED, FIRST_SEED + episodes), steps, size)
    return {name: np.array(arrays[name]) for name in ('frames', 'actions')}


def _quantile(values: np.ndarray, level: float) -> float | None:
    return round(float(np.quantile(values, level)), 3) if len(values) else None

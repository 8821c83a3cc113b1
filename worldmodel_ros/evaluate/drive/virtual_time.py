"""Virtual clock, and a stand-in for a model that only takes time."""
from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.engine.session import Future, LookAhead
from worldmodel_ros.engine.network_calls import BEFORE_DENOISING, StepTimes
from .step_times import MeasuredTimes

if TYPE_CHECKING:
    from worldmodel_ros.model.presets import Preset


class VirtualClock:
    """A steady clock [s]; while it advances, scheduled calls are made at their times, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule ``call`` for ``time``, as another thread would make it."""
        heapq.heappush(self._events, (time, self._count, call))
        self._count += 1

    def advance(self, seconds: float) -> None:
        """Advance by ``seconds``."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            time, _, call = heapq.heappop(self._events)
            self.now = max(self.now, time)
            call()
        self.now = end

    def next_event(self) -> float | None:
        """Return the time of the next scheduled call, None without one."""
        return self._events[0][0] if self._events else None


class TimedEngine:
    """What the engine's worker needs of an engine, with measured times in place of a model.

    Each observation takes the times of one measured tick as a whole, drawn with a seed; they are recorded in the
    engine's own ``StepTimes``, so that the ladder predicts from them as on the robot.
    """

    def __init__(self, spec: Preset, measured: MeasuredTimes, clock: VirtualClock, seed: int = 0) -> None:
        self.spec, self.clock, self.measured = spec, clock, measured
        self.step_times = StepTimes()
        self._rng = np.random.default_rng(seed)
        for row in measured.ticks:  # the warm-up
            self.record(row, 2)

    def draw(self) -> dict[str, float]:
        return self.measured.ticks[int(self._rng.integers(len(self.measured.ticks)))]

    def record(self, row: dict[str, float], steps: int) -> None:
        for part, seconds in row.items():
            self.step_times.record(part, seconds)
        self.step_times.record_tick(sum(row[part] for part in BEFORE_DENOISING) + steps * row['denoise'], steps)

    def open_session(self) -> TimedSession:
        return TimedSession(self)


class TimedSession:
    """The calls of a session, which only take time."""

    def __init__(self, engine: TimedEngine) -> None:
        self._engine, self.spec = engine, engine.spec
        self._row = engine.draw()
        self.timings: dict[str, float] = {}

    def reset(self) -> None:
        """There is nothing to reset."""

    def observe(self, frame: np.ndarray, executed: np.ndarray) -> None:
        self._row = self._engine.draw()
        self._spend('encode')
        self._spend('commit')

    def plan(self, goal: str) -> np.ndarray:
        self._spend('policy')
        return np.zeros((self.spec.chunk_frames, self.spec.actions), np.float32)

    def imagine(self, actions: np.ndarray, steps: int = 2) -> Future:
        for _ in range(steps):
            self._spend('denoise')
        spent = sum(self._row[part] for part in BEFORE_DENOISING) + steps * self._row['denoise']
        self._engine.step_times.record_tick(spent, steps)
        none = np.zeros(0, np.float32)
        return Future(actions, none, np.zeros(len(actions), np.float32), dict.fromkeys(self.spec.goals, 0.0), none)

    def look_ahead(self, goal: str, steps: int = 2) -> LookAhead:
        plan = functools.cache(lambda: self.plan(goal))
        return LookAhead(plan, lambda: self.imagine(plan(), steps))

    def decode(self, future: Future) -> None:
        self._spend('decode')

    def _spend(self, part: str) -> None:
        self._engine.clock.advance(self._row[part])
        self.timings[part] = self._row[part]
        self._engine.step_times.record(part, self._row[part])

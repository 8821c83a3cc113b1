"""Runs the demo's episode: sets goals, sends what-if requests, kills the model if asked, and keeps the time."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from worldmodel_ros.demo.goals import GoalSequence
from worldmodel_ros.demo.live import LiveView, view
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import NS, Recording
from worldmodel_ros.demo.summary import Kill

WHAT_IF_PERIOD = 3.0        # [s]
LOOK_PERIOD = 0.02         # between two checks of the recording [s]


class NothingDriven(RuntimeError):
    """No command came from the model."""


class Observer(Protocol):
    """What ``drive`` requires of the observing node."""

    recording: Recording

    def begin(self) -> None:
        """Begin the recording with the next command that answers an observation."""

    def set_goal(self, goal: str) -> None:
        """Send the robot to a goal."""

    def wait_for_command(self, timeout: float) -> bool:
        """Wait for the first command that answers an observation; return False if none came."""

    def ask_what_if(self, names: tuple[str, ...], goal: str, horizon: float) -> None:
        """Ask the model, then the simulator, without blocking; the answer is added to the recording."""

    def now(self) -> int:
        """Return ROS time [ns]."""


@dataclass(frozen=True)
class Plan:
    """What to do in a run: objects to go to in turn, or a ``task`` that the simulated robot publishes and judges."""

    seconds: float
    goals: list[str] = field(default_factory=list)
    task: str = ''
    deadline: float = 0.05                          # camera stamp to command received [s]
    patience: float = 20.0                          # with one goal [s]
    what_if: tuple[str, ...] = ('forward', 'left', 'right', 'stop')
    horizon: float = 0.0                            # of the what-if questions [s]; 0: the model's own
    kill_at: list[float] = field(default_factory=list)  # [s]
    first_command_timeout: float = 30.0             # [s]


def drive(plan: Plan, observer: Observer, kill_model: Callable[[], None], live: LiveView,
          scorer: PredictionScorer, clock: Callable[[], float] = time.monotonic,
          sleep: Callable[[float], None] = time.sleep) -> tuple[float, list[Kill]]:
    """Drive for ``plan.seconds`` from the first command; return the time driven [s] and the outcomes of the kills.

    Raises NothingDriven if no command comes.
    """
    recording = observer.recording
    goals = None if plan.task else GoalSequence(plan.goals, plan.patience)
    observer.begin()
    if goals:
        recording.goals = goals.attempts
        observer.set_goal(goals.start(0.0))
    if not observer.wait_for_command(plan.first_command_timeout):
        raise NothingDriven('no command answered a camera image within '
                            f'{plan.first_command_timeout:.0f} s of the first goal')
    start = clock()
    kills: list[tuple[float, int]] = []
    to_kill = sorted(plan.kill_at)
    next_question, next_view = 1.0, 0.0
    while (elapsed := clock() - start) < plan.seconds:
        goal = goals.current.goal if goals else recording.target
        distance = goal_distance(recording, goal)
        following = goals.update(elapsed, distance) if goals else None
        if following is not None:
            observer.set_goal(following)
        if to_kill and elapsed >= to_kill[0]:
            to_kill.pop(0)
            kills.append((elapsed, observer.now()))
            live.note(f'  killing the model\'s process at {elapsed:.1f} s')
            kill_model()
        if plan.what_if and elapsed >= next_question:
            next_question += WHAT_IF_PERIOD
            observer.ask_what_if(plan.what_if, goals.current.goal if goals else '', plan.horizon)
        if elapsed >= next_view:
            next_view += live.period
            scorer.advance()
            live.show(view(recording, elapsed, plan.seconds, plan.deadline, distance, scorer.scores()))
        sleep(LOOK_PERIOD)
    return elapsed, [outcome(recording, at, stamp) for at, stamp in kills]


def goal_distance(recording: Recording, goal: str) -> float:
    """Return the true distance from the robot's centre to the goal object's [m]; infinite while either is unknown."""
    thing = next((t for t in recording.things.values() if t.name == goal), None)
    if thing is None or not recording.poses:
        return math.inf
    pose = recording.poses[-1]
    return math.hypot(thing.x - pose.x, thing.y - pose.y)


def outcome(recording: Recording, at: float, killed: int) -> Kill:
    """Return the outcome of killing the model at ROS time ``killed`` [ns], ``at`` seconds into the run."""
    after = [c for c in recording.commands if c.received >= killed]
    stop = next((i for i, c in enumerate(after) if not c.stamp), None)
    again = None if stop is None else next((c for c in after[stop:] if c.stamp), None)
    return Kill(at, None if stop is None else (after[stop].received - killed) / NS,
                None if again is None else (again.received - killed) / NS)

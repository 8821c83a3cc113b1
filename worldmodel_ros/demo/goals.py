"""The sequence of goals for the robot, and when a goal counts as reached."""
from __future__ import annotations

from worldmodel_ros.demo.recording import GoalAttempt
from worldmodel_ros.sim.scene import GOAL_DISTANCE as REACHED_DISTANCE

REACHED_HOLD = 0.3  # time the robot has to stay there [s]


class GoalSequence:
    """Cycles through the goals; continues when one is reached or has taken too long.

    With a single goal, the robot stays there.
    """

    def __init__(self, goals: list[str], patience: float = 20.0) -> None:
        """``goals``: at least one name; ``patience``: time after which a goal is given up [s]."""
        if not goals:
            raise ValueError('no goal given: name at least one, as in --goal red,blue')
        self._goals = goals
        self._patience = patience
        self._inside_since: float | None = None
        self.attempts: list[GoalAttempt] = []

    @property
    def current(self) -> GoalAttempt:
        """The current goal; call ``start`` first."""
        return self.attempts[-1]

    def start(self, now: float) -> str:
        """Give the first goal at time ``now`` [s]; return its name."""
        return self._give(now)

    def update(self, now: float, distance: float) -> str | None:
        """Update with the distance to the goal [m] at ``now`` [s]; return the next goal when it is due, else None."""
        goal = self.current
        goal.closest = min(goal.closest, distance)
        if goal.reached is not None or goal.abandoned is not None:
            return None
        if distance < REACHED_DISTANCE:
            if self._inside_since is None:
                self._inside_since = now
            if now - self._inside_since >= REACHED_HOLD:
                goal.reached = now
                return self._give_next(now)
        else:
            self._inside_since = None
        if now - goal.given >= self._patience:
            goal.abandoned = now
            return self._give_next(now)
        return None

    def _give_next(self, now: float) -> str | None:
        return self._give(now) if len(set(self._goals)) > 1 else None

    def _give(self, now: float) -> str:
        self._inside_since = None
        goal = self._goals[len(self.attempts) % len(self._goals)]
        self.attempts.append(GoalAttempt(goal, given=now))
        return goal

"""
Chooses what each observation is answered with, so that the answer is never late.

Quality is given up before punctuality: the two-step model, the one-step model, the newest plan's action for the
present moment, a stop. Times are steady-clock seconds and are passed in; nothing here waits, measures or computes.
"""
from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NS = 1_000_000_000


class Tier(enum.IntEnum):
    """
    What an observation was answered with, best first; the values are those of ActionChunk.

    The first three imagine the future of their plan before they answer. PLAN_ONLY is a plan for this observation
    without that, LAST_PLAN the rest of an earlier one. NONE: nothing was commanded; from a server, refused.
    """

    NONE = 0
    TWO_STEP = 1
    ONE_STEP = 2
    SMALLER = 3  # only from a server for several robots: its smaller model, one step
    PLAN_ONLY = 4
    LAST_PLAN = 5
    STOP = 6


class Verdict(enum.IntEnum):
    """Outcome of a tick with respect to its deadline; the values are those of DeadlineStatus."""

    ON_TIME = 0
    DEGRADED = 1
    LATE = 2
    STALE_INPUT = 3
    INVALID = 4
    IDLE = 5


STEPS = {Tier.TWO_STEP: 2, Tier.ONE_STEP: 1}  # denoising steps of the tiers that predict
MODEL_TIERS = (*STEPS, Tier.SMALLER)  # answer only once the future has been imagined


@dataclass(frozen=True)
class Settings:
    """
    ``reserve``: kept free before the deadline, for what comes after publishing the command [s].
    ``headroom``: spare time that a better tier must have before it is used again [s].
    ``recovery_ticks``: so many ticks in a row must have been on time, with that headroom, before it is.
    """

    reserve: float = 0.012
    headroom: float = 0.003
    recovery_ticks: int = 3

    def __post_init__(self) -> None:
        if self.reserve < 0.0 or self.headroom < 0.0 or self.recovery_ticks < 1:
            raise ValueError(
                f'reserve and headroom must be at least 0 and recovery_ticks at least 1, got {self}')


class Decision(NamedTuple):
    """
    ``finish``: predicted time of the answer. ``limit``: latest time of the answer. ``headroom``: whether the next
    better tier would have fitted too, with room to spare.
    """

    tier: Tier
    finish: float
    limit: float
    headroom: bool
    reason: str


@dataclass
class Counts:
    """Ticks by tier; ``late``: those that the model did not finish in time."""

    two_step: int = 0
    one_step: int = 0
    smaller: int = 0
    plan_only: int = 0
    last_plan: int = 0
    stop: int = 0
    late: int = 0

    def served(self, tier: Tier) -> None:
        if tier is not Tier.NONE:
            name = tier.name.lower()
            setattr(self, name, getattr(self, name) + 1)


class Recovery:
    """
    The best tier allowed at present, and the number of good ticks in a row since it last changed.

    It drops at once and climbs by one after some good ticks, so that it does not flicker.
    """

    def __init__(self) -> None:
        self.best = Tier.TWO_STEP
        self.streak = 0

    def allow(self, best: Tier) -> None:
        """Allow nothing better than ``best`` until enough ticks have been good."""
        self.best, self.streak = best, 0

    def ended(self, good: bool) -> None:
        """Count a tick; ``good``: it was in time, with room to spare for the next better tier."""
        self.streak = self.streak + 1 if good else 0

    def climb(self, better: Tier, ticks: int) -> bool:
        """Allow a better tier if the last ``ticks`` were good; return whether it is allowed now."""
        if self.streak < ticks:
            return False
        self.allow(better)
        return True


class Ladder:
    """
    A state machine, whose state is the best tier allowed at present: TWO_STEP, ONE_STEP or STOP.

    It drops as soon as a tier does not fit, and climbs by one after ``recovery_ticks`` good ticks. PLAN_ONLY and
    LAST_PLAN are not states: they bridge a tick for which no prediction fits, with the plan for this observation if
    it is in time, else with the last one, until the one-step model fits again with headroom. Not thread-safe.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.counts = Counts()
        self._recovery = Recovery()
        self._bridging = False
        self._cause = ''

    @property
    def best(self) -> Tier:
        """The best tier allowed at present."""
        return self._recovery.best

    def decide(self, now: float, due: float, predict: Callable[[int], float], has_plan: bool) -> Decision:
        """
        Choose the tier for an observation whose work can start ``now`` and whose answer is ``due`` at the robot.

        ``predict`` returns the duration of an answer with so many denoising steps [s], 0 for a plan alone;
        ``has_plan`` tells whether an earlier plan has an action for this observation.
        """
        limit = due - self.settings.reserve
        finish = {tier: now + predict(steps) for tier, steps in STEPS.items()}
        spare = {tier: at + self.settings.headroom <= limit for tier, at in finish.items()}
        self._climb(spare)
        if self.best is Tier.STOP:
            return Decision(Tier.STOP, now, limit, True, self._recovering())
        for tier in (Tier.TWO_STEP, Tier.ONE_STEP):
            fits = spare[tier] if self._bridging else finish[tier] <= limit
            if tier >= self.best and fits:
                self._bridging = False
                return self._model(tier, finish, limit, spare)
        missing = (finish[Tier.ONE_STEP] - limit) * 1e3
        reason = f'one step would be ready {missing:.1f} ms after the limit'
        if missing <= 0.0:
            reason = f'one step would be ready only {-missing:.1f} ms before the limit'
        planned = now + predict(0)
        return self._bridge(has_plan, min(planned, limit), limit, reason, in_time=planned <= limit)

    def relay(self, tier: Tier, now: float, due: float, reason: str) -> Decision:
        """
        Adopt what the ladder of a remote engine has decided and done, unless the robot is kept at a stop until the
        model has been good again.
        """
        limit = due - self.settings.reserve
        self._climb(dict.fromkeys(STEPS, True))
        if self.best is Tier.STOP:
            return Decision(Tier.STOP, now, limit, True, self._recovering())
        self._bridging = False
        return Decision(tier, now, limit, True, reason)

    def bridge(self, now: float, reason: str) -> Decision:
        """Continue the last plan, which has an action for an observation that a remote engine has no time for."""
        return self._bridge(True, now, now, reason)

    def finished(self, decision: Decision, at: float) -> None:
        """
        Note that at time ``at`` the model had done what the answer needs or, for a STOP, what would have been enough
        to move: a plan.
        """
        if decision.tier in (Tier.PLAN_ONLY, Tier.LAST_PLAN):
            return
        good = decision.headroom and at <= decision.limit
        self._recovery.ended(good)

    def overrun(self, decision: Decision | None, now: float, has_plan: bool) -> Decision:
        """
        Choose what to answer now that the limit has passed and ``decision`` was not carried out (None: not made).
        """
        if decision and decision.tier is Tier.LAST_PLAN and has_plan:
            return decision
        self.counts.late += 1
        return self._bridge(has_plan, now, now, 'the model did not finish in time')

    def fault(self, reason: str) -> None:
        """Stop, after the model failed or its output was unusable, until it has been good for a while."""
        self._fall(Tier.STOP, reason)

    def _model(self, tier: Tier, finish: dict[Tier, float], limit: float,
               spare: dict[Tier, bool]) -> Decision:
        if tier is Tier.TWO_STEP:
            return Decision(tier, finish[tier], limit, True, '')
        if finish[Tier.TWO_STEP] > limit:
            missing = (finish[Tier.TWO_STEP] - limit) * 1e3
            self._fall(Tier.ONE_STEP, f'two steps would be ready {missing:.1f} ms after the limit')
        return Decision(tier, finish[tier], limit, spare[Tier.TWO_STEP], self._recovering())

    def _recovering(self) -> str:
        return f'{self._cause}; on time again for {self._recovery.streak} of {self.settings.recovery_ticks} ticks'

    def _bridge(self, has_plan: bool, finish: float, limit: float, reason: str,
                in_time: bool = False) -> Decision:
        """``in_time``: whether a plan for this observation is expected before the limit."""
        if (has_plan or in_time) and self.best is not Tier.STOP:
            self._fall(Tier.ONE_STEP, reason)
            self._bridging = True
            return Decision(Tier.PLAN_ONLY if in_time else Tier.LAST_PLAN, finish, limit, False, reason)
        if self.best is not Tier.STOP:
            reason += ', and no plan has an action left'
        self._fall(Tier.STOP, reason)
        return Decision(Tier.STOP, finish, limit, False, self._cause)

    def _fall(self, tier: Tier, cause: str) -> None:
        self._recovery.allow(max(self.best, tier))
        self._cause = cause

    def _climb(self, spare: dict[Tier, bool]) -> None:
        # A stop ends once plans were in time, whatever is predicted: while stopped, no plan can come late.
        if self.best is Tier.STOP or (self.best is Tier.ONE_STEP and spare[Tier.TWO_STEP]):
            better = Tier.ONE_STEP if self.best is Tier.STOP else Tier.TWO_STEP
            if self._recovery.climb(better, self.settings.recovery_ticks):
                self._bridging = False


class LastPlan:
    """The newest plan that was made in time, and which of its actions is due at an observation."""

    def __init__(self, step_period: float) -> None:
        self._period = round(step_period * NS)
        self.forget()

    def remember(self, actions: np.ndarray, stamp: int) -> None:
        """Store ``actions`` (T, A) as the newest plan; the first one is for the observation ``stamp`` [ns]."""
        self._actions, self._stamp, self._index, self._served = actions, stamp, 0, stamp

    def forget(self) -> None:
        """Drop the plan, which was for another goal or episode."""
        self._actions: np.ndarray | None = None

    def is_of(self, stamp: int) -> bool:
        """Return whether it was made for the observation ``stamp`` [ns] itself."""
        return self._actions is not None and stamp == self._stamp

    def has_action(self, stamp: int) -> bool:
        """Return whether there is an action for the observation ``stamp`` [ns]."""
        return self._actions is not None and self._due(stamp) < len(self._actions)

    def rest(self, stamp: int) -> np.ndarray | None:
        """
        Return the actions from the observation ``stamp`` [ns] on, (1 to T, A), or None if the plan is used up.

        No action serves two observations, however close they are.
        """
        if not self.has_action(stamp):
            return None
        self._index, self._served = self._due(stamp), stamp
        return self._actions[self._index:]

    def _due(self, stamp: int) -> int:
        if stamp == self._served:
            return self._index
        return max(self._index + 1, round((stamp - self._stamp) / self._period))

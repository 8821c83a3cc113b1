"""One client of the service: its state, its sessions on the models, and what the robot did between two frames."""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

import cv2
import numpy as np

from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.futures import Moment
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.session_store import StoredSession
from .messages import ServiceListener
from .states import Event, State, after

_PERIODS = 9  # of a client's ticks, by whose shortest it is known to be slower than the model


class ActionTotal:
    """What a robot had done by one of its ticks: the sum of its actions (A,), and the number of its ticks."""

    def __init__(self, actions: np.ndarray | float = 0.0, ticks: int = 0):
        self.actions, self.ticks = actions, ticks

    def plus(self, executed: np.ndarray) -> ActionTotal:
        """The total one tick later; ``executed`` (A,) is the mean action of that tick."""
        return ActionTotal(self.actions + np.asarray(executed, np.float64), self.ticks + 1)


@dataclass(frozen=True)
class Continuity:
    """What a client's next answer depends on besides its session, so that another service can go on: the seed of the
    noise, what the robot had done by its newest tick and by the newest frame that was taken in (sums of actions, ticks),
    and the identities of the newest tick. As JSON values, which hold a float exactly."""

    seed: int
    episode: int | None
    sequence: int | None
    stamp: int
    actions: tuple[float, ...]
    ticks: int
    seen_actions: tuple[float, ...]
    seen_ticks: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Continuity:
        """Raise ValueError for what is none."""
        try:
            found = cls(**{**values, 'actions': tuple(values['actions']), 'seen_actions': tuple(values['seen_actions'])})
            sums = np.array([*found.actions, *found.seen_actions], np.float64)
            counts = [found.seed, found.stamp, found.ticks, found.seen_ticks]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f'it does not say how a session goes on: {error}') from error
        if not np.isfinite(sums).all() or not all(isinstance(count, int) for count in counts):
            raise ValueError('it does not say how a session goes on: sums must be finite, counts whole')
        return found


class TickTiming:
    """When a client's next tick can come at the earliest, by how early its last ones were."""

    def __init__(self, period: float):
        """``period`` [s]: that of the model, and of the client until it has shown to take longer ones."""
        self._period = period
        self._last = self._due = -math.inf
        self._took: deque[float] = deque(maxlen=_PERIODS)
        self._early: deque[float] = deque(maxlen=50)

    def ticked(self, now: float) -> float:
        """Take a tick; the steady time [s] before which the next one is not to be expected."""
        if self._last > -math.inf:
            self._took.append(now - self._last)
            self._early.append(self._due - now)
        # A camera may be slower than the model. Images that did not come say nothing of the next, however many they are.
        period = max(self._period, min(self._took)) if len(self._took) == _PERIODS else self._period
        self._last, self._due = now, now + period
        # One that comes a quarter of a period early is no sign of the next one's doing so.
        return self._due - min(max([0.0, *self._early]), period / 4)


class ModelSession:
    """A client's session on one of the models, which need not see every frame. Belongs to the service's thread.

    ``reach``: after a gap of more ticks than this it begins again, since what it saw before is of no use any more.
    """

    def __init__(self, engine: Engine, seed: int, reach: int):
        self._engine, self.seed, self._reach = engine, seed, reach
        self.session: Session | None = engine.open_session(seed)  # None after a failure
        self.stamp = 0  # of its newest frame, ns
        self.kept: Moment | None = None  # the end of a branch of its newest frame, to go on from
        self._generation = 0
        self._seen: ActionTotal | None = None  # when its newest frame came
        self._away = False  # what it has seen is in a store

    def begin(self, generation: int, total: ActionTotal) -> None:
        """Make ready for a frame: begins again if the client has, or if the gap before it is too long."""
        if self.session is None:
            self.session = self._engine.open_session(self.seed)
            self._seen, self._away = None, False  # who wants it to go on has it come back before
        gap = self._seen and total.ticks - self._seen.ticks > self._reach
        if gap or generation != self._generation:
            self.session.reset()
            self._generation, self._seen, self.stamp, self.kept = generation, None, 0, None

    def current(self, generation: int) -> bool:
        """Whether it has seen a frame since the client has begun again."""
        return generation == self._generation and self._seen is not None and self.session is not None

    @property
    def seen(self) -> ActionTotal | None:
        """What the robot had done by the newest frame."""
        return self._seen

    def saw(self, total: ActionTotal) -> bool:
        """Whether its newest frame is the one that came at ``total``."""
        return self._seen is total

    def executed(self, newest: np.ndarray, total: ActionTotal) -> np.ndarray:
        """Mean action (A,) since its newest frame, where ``newest`` was the mean since the last tick."""
        if self._seen is None or total.ticks - self._seen.ticks == 1:
            return newest
        return ((total.actions - self._seen.actions) / (total.ticks - self._seen.ticks)).astype(np.float32)

    def frame(self, image: np.ndarray) -> np.ndarray:
        """An image (H, W, 3) for the best model in the size of this one's."""
        height, width = self._engine.spec.image_size
        return image if image.shape[:2] == (height, width) else cv2.resize(image, (width, height),
                                                                           interpolation=cv2.INTER_AREA)

    def observed(self, total: ActionTotal, stamp: int) -> None:
        """Its session has taken in the frame of a tick, or another session from a file."""
        self._seen, self.stamp, self.kept = total, stamp, None

    def leave(self) -> None:
        """Give its pages back: what it has seen is in a store."""
        self.session.close()
        self.session, self.kept, self._away = None, None, True

    def come_back(self, stored: StoredSession | None) -> None:
        """Go on from what was stored when it left; None: it had seen nothing. Raises OutOfPages, SessionFileError."""
        if not self._away:
            return  # it has begun again meanwhile
        session = self._engine.open_session(self.seed)
        try:
            if stored:
                session.restore(stored)
        except Exception:
            session.close()  # as of ``discard``
            raise
        self.session, self._away = session, False

    def discard(self) -> None:
        """After a failure. Not a reset: whatever is broken in the session is to be gone."""
        if self.session:
            self.session.close()  # the error's traceback holds it, and is garbage some time later
        self.session = self._seen = self.kept = None


class Client:
    """Belongs to the service, under its lock; but for the ``models``, the best one's first."""

    def __init__(self, number: int, listener: ServiceListener, engines: list[Engine], seed: int, account: Hashable):
        self.number, self.listener = number, listener
        self.account = account  # whose quotas and share of the device it is served from
        self.state = State.EMPTY
        self.generation = 0  # counts how often it began again: what was in flight before is stale
        self.reason = ''  # why it last did
        self.episode: int | None = None
        self.sequence: int | None = None  # the highest of the episode
        self.total = ActionTotal()
        self.moved = 0.0  # s, by which its ticks have come earlier as they were offered
        self.timing = TickTiming(engines[0].spec.step_period)
        self.ticks = self.questions = 0  # in flight
        # Newest request of a kind of which only the newest is of use, and since when one has waited [s]
        self.latest: dict[str, tuple[Hashable, float]] = {}
        # The best model may miss frames as long as its window reaches over them; another sees whole runs, or nothing.
        self.models = [ModelSession(engine, seed, 1 if index else engine.spec.context_frames)
                       for index, engine in enumerate(engines)]

    def event(self, event: Event) -> None:
        """Go on to the state that ``event`` leads to; raise SessionError."""
        self.state = after(self.number, self.state, event)

    def continuity(self) -> Continuity:
        """How another service would go on. For the service's thread."""
        model, total = self.models[0], self.total
        seen = model.seen or total
        return Continuity(model.seed, self.episode, self.sequence, model.stamp, _floats(total.actions), total.ticks,
                          _floats(seen.actions), seen.ticks)

    def go_on(self, continuity: Continuity) -> ActionTotal:
        """Become the client that another service had, which has seen nothing of its own yet; return what the robot had
        done by the newest frame of the session that comes with it."""
        self.episode, self.sequence = continuity.episode, continuity.sequence
        self.total = ActionTotal(np.array(continuity.actions), continuity.ticks)
        if continuity.seen_ticks == continuity.ticks:
            return self.total
        return ActionTotal(np.array(continuity.seen_actions), continuity.seen_ticks)

    def begin_anew(self, event: Event, reason: str) -> None:
        """Leave all that is in flight behind."""
        self.event(event)
        self.generation += 1
        self.reason = reason
        self.sequence = None
        self.ticks = self.questions = 0
        self.latest.clear()

    def discard(self) -> None:
        """Give up its sessions after a failure, and their pages. For the service's thread."""
        for model in self.models:
            model.discard()

    def tick_ended(self) -> None:
        self.ticks -= 1
        if self.ticks == 0:
            self.event(Event.SETTLED)

    def question_ended(self) -> None:
        self.questions -= 1
        if self.questions == 0:
            self.event(Event.ANSWERED)


def _floats(actions: np.ndarray | float) -> tuple[float, ...]:
    return tuple(map(float, np.atleast_1d(actions)))

"""One client of the service: its state, its sessions on the models, and the robot's actions between two frames."""
from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

import cv2
import numpy as np

from worldmodel_ros.control.worker import Cadence
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.futures import Moment
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.session_store import StoredSession
from .messages import ServiceListener
from .states import Event, State, after


class ActionTotal:
    """A robot's total up to one of its ticks: the sum of its actions (A,), and the number of its ticks."""

    def __init__(self, actions: np.ndarray | float = 0.0, ticks: int = 0):
        self.actions, self.ticks = actions, ticks

    def plus(self, executed: np.ndarray) -> ActionTotal:
        """Return the total one tick later; ``executed`` (A,) is the mean action of that tick."""
        return ActionTotal(self.actions + np.asarray(executed, np.float64), self.ticks + 1)


@dataclass(frozen=True)
class Continuity:
    """What a client's next answer depends on besides its session, for another service to continue it: the seed of the
    noise, the totals (sum of actions, ticks) at its newest tick and at the newest frame that was taken in, and the
    identity of the newest tick. As JSON values, which hold a float exactly."""

    seed: int
    episode: int | None
    sequence: int | None
    stamp: int
    actions: tuple[float, ...]
    ticks: int
    seen_actions: tuple[float, ...]
    seen_ticks: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Continuity:
        """Return the continuity of ``to_dict``; raises ValueError for other values."""
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
    """Predicts when a client's next tick can come at the earliest, by how early its last ones were."""

    def __init__(self, period: float):
        """``period`` [s]: the model's, assumed for the client until its ticks turn out to be slower."""
        self._period, self._cadence = period, Cadence(period)
        self._due: float | None = None
        self._early: deque[float] = deque(maxlen=50)

    def ticked(self, now: float) -> float:
        """Record a tick; return the steady time [s] before which the next one is not expected."""
        if self._due is not None:
            self._early.append(self._due - now)
        period = self._cadence.arrived(now)
        self._due = now + period
        # A tick more than a quarter of a period early does not mean that the next one will be.
        return self._due - min(max([0.0, *self._early]), period / 4)


class ModelSession:
    """A client's session on one of the models, which need not see every frame. Used by the service's thread.

    ``reach``: after a gap of more ticks than this it begins again, since what it saw before is no longer of use.
    """

    def __init__(self, engine: Engine, seed: int, reach: int):
        self._engine, self.seed, self._reach = engine, seed, reach
        self.session: Session | None = engine.open_session(seed)  # None after a failure
        self.stamp = 0  # of its newest frame, ns
        self.kept: Moment | None = None  # end of a branch from its newest frame, to be continued
        self._generation = 0
        self._seen: ActionTotal | None = None  # total at its newest frame
        self._away = False  # its cache is in a store

    def begin(self, generation: int, total: ActionTotal) -> None:
        """Prepare for a frame: begin again if the client has, or if the gap before the frame is too long."""
        if self.session is None:
            self.session = self._engine.open_session(self.seed)
            self._seen, self._away = None, False  # to continue it, ``come_back`` is called first
        gap = self._seen and total.ticks - self._seen.ticks > self._reach
        if gap or generation != self._generation:
            self.session.reset()
            self._generation, self._seen, self.stamp, self.kept = generation, None, 0, None

    def current(self, generation: int) -> bool:
        """Return whether it has seen a frame since the client began again."""
        return generation == self._generation and self._seen is not None and self.session is not None

    @property
    def seen(self) -> ActionTotal | None:
        """The robot's total at the newest frame."""
        return self._seen

    def saw(self, total: ActionTotal) -> bool:
        """Return whether its newest frame is the one that came at ``total``."""
        return self._seen is total

    def executed(self, newest: np.ndarray, total: ActionTotal) -> np.ndarray:
        """Return the mean action (A,) since its newest frame; ``newest`` is the mean since the last tick."""
        if self._seen is None or total.ticks - self._seen.ticks == 1:
            return newest
        return ((total.actions - self._seen.actions) / (total.ticks - self._seen.ticks)).astype(np.float32)

    def frame(self, image: np.ndarray) -> np.ndarray:
        """Return an image (H, W, 3) for the best model, resized for this one."""
        height, width = self._engine.spec.image_size
        return image if image.shape[:2] == (height, width) else cv2.resize(image, (width, height),
                                                                           interpolation=cv2.INTER_AREA)

    def observed(self, total: ActionTotal, stamp: int) -> None:
        """Note that its session has taken in the frame of a tick, or was replaced by another one."""
        self._seen, self.stamp, self.kept = total, stamp, None

    def leave(self) -> None:
        """Free its pages: its cache is in a store."""
        self.session.close()
        self.session, self.kept, self._away = None, None, True

    def come_back(self, stored: StoredSession | None) -> None:
        """Continue from what was stored when it left; None: it had seen nothing. Raises OutOfPages, SessionFileError."""
        if not self._away:
            return  # it has begun again meanwhile
        session = self._engine.open_session(self.seed)
        try:
            if stored:
                session.restore(stored)
        except Exception:
            session.close()  # as in ``discard``
            raise
        self.session, self._away = session, False

    def discard(self) -> None:
        """Drop the session after a failure. A reset could keep whatever is broken in it."""
        if self.session:
            self.session.close()  # the error's traceback refers to it until it is collected
        self.session = self._seen = self.kept = None


class Client:
    """A client. Used by the service under its lock, except ``models`` (best first), which belong to the service's thread."""

    def __init__(self, number: int, listener: ServiceListener, engines: list[Engine], seed: int, account: Hashable):
        self.number, self.listener = number, listener
        self.account = account  # the one whose quotas and share of the device it is served from
        self.state = State.EMPTY
        self.generation = 0  # counts how often it began again: what was in flight before is stale
        self.reason = ''  # why it last did
        self.episode: int | None = None
        self.sequence: int | None = None  # the highest of the episode
        self.total = ActionTotal()
        self.moved = 0.0  # s by which its ticks have moved earlier after offers
        self.timing = TickTiming(engines[0].spec.step_period)
        self.ticks = self.questions = 0  # in flight
        # By kind of work of which only the newest is of use: the newest request, and since when one has waited [s]
        self.latest: dict[str, tuple[Hashable, float]] = {}
        # The best model may miss as many frames as its window spans; the smaller one begins again after any gap.
        self.models = [ModelSession(engine, seed, 1 if index else engine.spec.context_frames)
                       for index, engine in enumerate(engines)]

    def event(self, event: Event) -> None:
        """Change to the state that ``event`` leads to; raises SessionError if it is illegal."""
        self.state = after(self.number, self.state, event)

    def continuity(self) -> Continuity:
        """Return what another service needs to continue. For the service's thread."""
        model, total = self.models[0], self.total
        seen = model.seen or total
        return Continuity(model.seed, self.episode, self.sequence, model.stamp, _floats(total.actions), total.ticks,
                          _floats(seen.actions), seen.ticks)

    def go_on(self, continuity: Continuity) -> ActionTotal:
        """Continue, as a client that has seen nothing yet, the client of another service; return the robot's total at the
        newest frame of the session that comes with it."""
        self.episode, self.sequence = continuity.episode, continuity.sequence
        self.total = ActionTotal(np.array(continuity.actions), continuity.ticks)
        if continuity.seen_ticks == continuity.ticks:
            return self.total
        return ActionTotal(np.array(continuity.seen_actions), continuity.seen_ticks)

    def begin_anew(self, event: Event, reason: str) -> None:
        """Begin again; everything in flight becomes stale."""
        self.event(event)
        self.generation += 1
        self.reason = reason
        self.sequence = None
        self.ticks = self.questions = 0
        self.latest.clear()

    def discard(self) -> None:
        """Drop its sessions after a failure, and free their pages. For the service's thread."""
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

"""Worker that chooses commands on a forecast of the scene; its world model shows what was decided."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from worldmodel_ros.engine.network_calls import StepTimes
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.session_transfer import PATIENCE
from worldmodel_ros.engine.what_if import Question
from worldmodel_ros.motion import LIMITS, PERIOD, Limits
from .deliberation import FEWEST, Decision as Choice, Effort
from .ladder import NS, STEPS, Decision, Tier
from .pilot import COUNTS, REACTING, Forecast, Known, Pilot, comparing
from .responder import Listener, Observation, Prediction, Responder, require_finite
from .scene_view import View
from .task import Task
from .terms import Term
from .worker import Worker, reason_of

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine

GATE = 0.002        # s, from publishing a command to its execution, besides the base's own delay
_REMEMBERED = 100   # frames that a what-if question may have started from

Reading = tuple[np.ndarray, np.ndarray]  # pose (3,), m and rad, and twist (2,), m/s and rad/s


class Executed(Protocol):
    """History of the commands given to the robot; stamps in ns."""

    def mean(self, start: int | None, end: int) -> np.ndarray:
        """Return the mean action (A,) between two stamps."""

    def held(self, start: int, end: int) -> list[tuple[float, np.ndarray]]:
        """Return the actions (A,) in force from ``start`` to ``end``, each with its duration in s."""


@dataclass(frozen=True)
class Decided:
    """How an observation's command was decided: with so many ``passes`` over the candidates, on ``view``, to take effect
    ``delay`` s after the observation; ``timings`` [s] by part."""

    observation: Observation
    tier: Tier
    passes: int
    choice: Choice
    view: View
    delay: float
    timings: dict[str, float]


class Imagines(Protocol):
    """A shared world model, which observes the frames and imagines what was decided, while it is ``here`` (available).

    ``backend``: what runs it; ``degraded_reason``: why it is not available; ``image_size``: of observations, for it and the
    local model.
    """

    here: bool
    backend: str
    degraded_reason: str
    image_size: tuple[int, int]

    def start(self) -> None:
        """Start looking for it."""

    def stop(self) -> None:
        """Disconnect from it."""

    def keep(self, observation: Observation) -> Observation:
        """Take an observation that will be shown; return it as the local model needs it."""

    def show(self, observation: Observation, plan: np.ndarray | None, decided: Decided | None) -> bool:
        """Have it observe a frame and imagine a plan (T, A), if there is one; return False if it is not available."""

    def ask(self, question: Question) -> Promise:
        """As ``Worker.ask``."""

    def save(self, name: str) -> str:
        """Have it write its session to a file of its own."""

    def load(self, name: str) -> str:
        """Have it replace its session by one from such a file."""


class DecidingListener(Listener, Protocol):
    """Where results go."""

    def decided(self, decided: Decided) -> None:
        """Called with how a command was decided, once it is published."""


class DecidingWorker(Worker):
    """
    A ``Worker`` whose robot acts on the forecast: a tick forecasts the scene, compares the outcomes of candidates,
    publishes the command, and only then has the world model observe the frame and imagine the images.

    Tiers: TWO_STEP compares three rounds of candidates, each around the best of those before, if the task wants something
    touched, else one round imagined farther ahead; ONE_STEP compares one round; PLAN_ONLY is the reactive policy on the
    present scene; LAST_PLAN and STOP are as everywhere. The tier is chosen again after the forecast, when most of a tick's
    jitter is over; if the work does not finish in time, the last plan is the answer.

    A ``shared`` world model, while it is available, observes and imagines in place of the local one; it decides nothing.
    """

    def __init__(self, engine: Engine, executed: Executed, responder: Responder, listener: DecidingListener,
                 forecast: Callable[[], Forecast], times: StepTimes, odometry: Callable[[int], Reading | None],
                 command_delay: float = 0.0, clock: Callable[[], float] = time.monotonic, rounds: int = 2,
                 shared: Imagines | None = None, candidates: int = COUNTS[-1], limits: Limits = LIMITS) -> None:
        """``forecast`` opens a stream; ``times``: of decisions, recorded here; ``odometry`` returns pose and twist at a stamp
        [ns], None if they were not measured; ``command_delay``: of the base [s]; ``rounds`` and ``candidates``: upper
        bounds; ``limits``: of the base, which may be changed from any thread, for the ticks to come."""
        super().__init__(engine, executed.mean, responder, listener, clock)
        self._held, self._open, self.times, self._odometry = executed.held, forecast, times, odometry
        self._base_delay, self._most_rounds, self._most, self._shared = command_delay, rounds, candidates, shared
        self._newest: int | None = None  # stamp of the episode's newest observation, ns; the session may not have seen it
        self._known: deque[tuple[int, Known]] = deque(maxlen=_REMEMBERED)
        self.measures_odometry = False  # whether the newest frame had a reading
        self.limits = limits
        self._pilot = self._new_pilot()

    def utilities(self, task: Task, actions: np.ndarray, stamp: int) -> np.ndarray:
        """Return the utility (K,) of each of a task's terms for ``actions`` (T, A) from the observation ``stamp`` [ns] on;
        empty if that is too long ago. Thread-safe."""
        known = next((known for at, known in list(self._known) if at == stamp), None)
        return known.utilities(task.terms, actions) if known and task.terms else np.zeros(0)

    @property
    def backend(self) -> str:
        return (self._shared and self._shared.backend) or super().backend

    @property
    def image_size(self) -> tuple[int, int]:
        return self._shared.image_size if self._shared else super().image_size

    @property
    def degraded_reason(self) -> str:
        return self._shared.degraded_reason if self._shared else ''

    def start(self) -> None:
        super().start()
        if self._shared:
            self._shared.start()

    def stop(self) -> None:
        if self._shared:
            self._shared.stop()
        super().stop()

    def submit(self, observation: Observation) -> bool:
        return super().submit(self._shared.keep(observation) if self._shared else observation)

    def ask(self, question: Question) -> Promise:
        return self._shared.ask(question) if self._shared and self._shared.here else super().ask(question)

    def save(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        shared = self._shared and self._shared.here
        return self._shared.save(name) if shared else super().save(folder, name, patience)

    def load(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        shared = self._shared and self._shared.here
        return self._shared.load(name) if shared else super().load(folder, name, patience)

    def _start_over(self) -> None:
        super()._start_over()
        self._pilot, self._newest = self._new_pilot(), None

    def _new_pilot(self) -> Pilot:
        return Pilot(self._open(), times=self.times, clock=self._clock, period=self._engine.spec.step_period)

    def _tick(self, observation: Observation) -> None:
        """Answer an observation: choose a tier, forecast, decide; then have the world model observe and imagine."""
        begun = self._clock()
        self._begin(observation)
        decision = self._responder.decide(observation, begun, partial(self._expected_time, observation.task.terms))
        if decision and decision.tier is Tier.TWO_STEP and self._newest is None:
            # There is no plan to fall back on, and a stop lasts for several ticks: not worth the risk of more rounds.
            decision = decision._replace(tier=Tier.ONE_STEP, reason='the first image of an episode')
        executed = self._executed(self._newest, observation.stamp)
        since = self._engine.spec.step_period if self._newest is None else (observation.stamp - self._newest) / NS
        self._feel(observation, executed, since)
        self._pilot.limits = self.limits
        # The forecast was trained on the command in force, the world model on the mean over the period.
        _, in_force = self._held(observation.stamp - 1, observation.stamp)[-1]
        self._pilot.observe(observation.image, in_force, 1, since, self._commanded(observation.stamp, executed))
        decided = None
        if decision and observation.task.terms and self._slot is None:
            decided = self._answer(observation, decision, begun)
        self._known.append((observation.stamp, self._pilot.known))
        answered = self._clock()
        self._newest, before = observation.stamp, self._newest
        if self._shared and self._imagined_elsewhere(observation, decision, decided):
            return
        try:
            self._session.observe(observation.image, executed if self._committed == before else
                                  self._executed(self._committed, observation.stamp))
            self._committed = observation.stamp
            if decision is not None:
                self._show(observation, decided, decision, begun, answered)
        except Exception as error:  # commands do not depend on it
            if self._replaces_session(error):
                self._committed = None
            self._listener.failed(f'imagining: {reason_of(error)}', error, False)

    def _imagined_elsewhere(self, observation: Observation, decision: Decision | None, decided: Decided | None) -> bool:
        """Return whether the shared model took the observation; the local session then starts over when it is needed."""
        plan = self._plan_of(decided.choice if decided else None) if decision else None
        if not self._shared.show(observation, plan, decided):
            return False
        if self._committed is not None:
            super()._start_over()
            self._committed = None
        return True

    def _expected_time(self, terms: Sequence[Term], steps: int) -> float:
        """Return how long a tick of so many steps is expected to take [s].

        Two steps must fit reliably (a high quantile), since the alternative is one step; one step only typically (the median),
        since the alternative is the last plan, which is served anyway if it does not fit."""
        effort = Effort.of(terms, steps)
        return self.times.predict(effort) if steps == 2 else self.times.typical_tick(effort)

    def _feel(self, observation: Observation, executed: np.ndarray, since: float) -> None:
        """Update the odometry to the moment of the observation, ``since`` s after the one before."""
        reading = self._odometry(observation.stamp)
        self.measures_odometry = reading is not None
        if reading:
            self._pilot.odometry.measured(*reading)
        else:
            self._pilot.odometry.executed(executed, since)

    def _commanded(self, stamp: int, executed: np.ndarray) -> np.ndarray:
        """Return the mean command that the base followed since the frame before; ``executed``: the mean one sent."""
        behind = round(self._base_delay * NS)
        if not behind:
            return executed
        return self._executed(None if self._newest is None else self._newest - behind, stamp - behind)

    def _answer(self, observation: Observation, decision: Decision, begun: float) -> Decided:
        """Decide and answer, within the time left after the forecast."""
        now = self._clock()
        terms = observation.task.terms
        decision = self._rung(decision, Effort.of(terms, 2), decision.limit - now)
        # A robot that is kept at a stop compares nothing: it only has to show that plans are in time.
        effort = Effort.of(terms, STEPS.get(decision.tier, 0))
        candidates = self._pilot.fitting(decision.limit - now, effort, self._most) if effort else ()
        part = comparing(len(candidates), effort) if effort else REACTING
        delay = now - observation.received + observation.age + self.times.typical(part) + GATE
        # Earlier commands take effect with the same delay as the new one.
        behind = round(self._base_delay * NS)
        sent = self._held(observation.stamp - behind, observation.stamp + round(delay * NS))
        previous = sent[-1][1]
        if effort:
            choice = self._pilot.decide(terms, sent, previous, candidates, effort=effort)
        else:
            choice = self._pilot.react(terms, previous, self._engine.spec.chunk_frames)
        plan = require_finite(self._plan_of(choice), 'the plan')
        self._responder.planned(observation, decision, plan)
        self._responder.finished(observation, decision, plan)
        # Predictions assume FEWEST candidates: leave out the time for more of them.
        more = self._pilot.last[part] - self.times.typical(comparing(FEWEST, effort)) if effort else 0.0
        self.times.record_tick(self._clock() - begun - more, effort)
        decided = Decided(observation, self._responder.served(observation) or Tier.NONE, effort.rounds if effort else 0, choice,
                          self._pilot.view, delay + self._base_delay, dict(self._pilot.last))
        self._listener.decided(decided)
        return decided

    def _rung(self, decision: Decision, effort: Effort, left: float) -> Decision:
        """Adapt a decision to the ``left`` s after the forecast: compare candidates if that is likely to fit, since the last
        plan continues if it does not."""
        if decision.tier is Tier.STOP:
            return decision
        if self._most_rounds == 0:
            return decision._replace(tier=Tier.PLAN_ONLY, reason=decision.reason or 'candidate_rounds is 0')
        if self.times.typical(comparing(FEWEST)) > left:
            return decision._replace(tier=Tier.PLAN_ONLY, headroom=False,
                                     reason=decision.reason or 'the forecast left no time to compare candidates')
        if decision.tier is Tier.TWO_STEP and self._most_rounds == 1:
            return decision._replace(tier=Tier.ONE_STEP, reason='candidate_rounds is 1')
        if decision.tier is Tier.TWO_STEP and self.times.typical(comparing(FEWEST, effort)) > left:
            return decision._replace(tier=Tier.ONE_STEP, headroom=False,
                                     reason='the forecast left no time for more than one round of candidates')
        if decision.tier in STEPS:
            return decision
        return decision._replace(tier=Tier.ONE_STEP, reason=f'{decision.reason}; it took less')

    def _show(self, observation: Observation, decided: Decided | None, decision: Decision, begun: float, answered: float
              ) -> None:
        """Imagine what the decision leads to, if that fits before the next observation or images are long overdue."""
        model = self._engine.step_times
        step = model.quantile('denoise')
        steps = 2 if self._background.fits(2 * step, self._expected) else 1
        if not self._background.starved and (self._slot is not None or not self._background.fits(step, self._expected)):
            return
        start = self._clock()
        future = self._session.imagine(self._plan_of(decided.choice if decided else None), steps)
        require_finite(future.collision_risk, 'the collision risk')
        measured = self._session.timings
        tier = next(tier for tier, count in STEPS.items() if count == steps)
        self._background.show(Prediction(observation, tier, self._responder.served(observation) or Tier.NONE, future, {
            'queue': begun - observation.received, 'encode': measured.get('encode', 0.0),
            'commit': measured.get('commit', 0.0), 'policy': answered - begun, 'denoise': self._clock() - start,
            'total': answered - observation.received, 'predicted': decision.finish - observation.received}, decided))

    def _plan_of(self, choice: Choice | None) -> np.ndarray:
        """Return the commands (T, A) of a chunk; zeros without a choice."""
        spec = self._engine.spec
        if choice is None:
            return np.zeros((spec.chunk_frames, len(spec.action_names)), np.float32)
        steps = (np.arange(spec.chunk_frames) * spec.step_period / PERIOD + 1e-6).astype(int)
        return np.asarray(choice.commands[np.minimum(steps, len(choice.commands) - 1)], np.float32)

    def _fail(self, observation: Observation, error: Exception) -> None:
        super()._fail(observation, error)
        self._pilot = self._new_pilot()

"""One robot's decisions on a forecast of the scene: frames in, commands chosen by their outcome out.

The upper tiers: candidates compared on a forecast, with an ``Effort``, and the reactive policy on the present scene.
The tiers below, the last plan and a stop, are in ``ladder``.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from worldmodel_ros.engine.network_calls import StepTimes
from worldmodel_ros.motion import LIMITS, PERIOD, Limits, along_arc, move
from .deliberation import FEWEST, Candidate, Decision, Deliberation, Effort, Settings, Veto, candidates_by_worth
from .localisation import Localiser
from .responder import require_finite
from .scene_view import OutOfView, Seen, Slot, StandingThings, View, with_places
from .task import to_goal
from .terms import Outcome, Term, place_thing, sights, utilities
from .wall_colours import WallColours

COUNTS = (FEWEST, 8, 16)  # numbers of candidates that a decision may compare
DECIDING = Settings(veto=Veto())
_BEFORE_BRAKING = 0.2  # s, until a base brakes: the veto's 0.6 s are for one that brakes from 0.6 m/s with 1.5 m/s2
SLOTS = (*(Slot(colour, colour, 0.16, False) for colour in ('red', 'green', 'blue', 'yellow')),
         *(Slot(f'{colour} ball', colour, 0.10, True) for colour in ('magenta', 'cyan', 'red')),
         *(Slot('mover' if k == 1 else f'mover {k}', 'violet', 0.135, True, alike=True) for k in range(1, 6)))
STANDING = [number for number, slot in enumerate(SLOTS) if not slot.moves]


class Forecast(Protocol):
    """A robot's forecasts, frame by frame; a new one knows nothing. ``times``: how far ahead its places are [s], from 0 on."""

    times: np.ndarray

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame uint8 (H, W, 3), the command (2,) in force at it, and the wheel velocities (2,) measured over the
        period before it, m/s and rad/s; ``passes`` is 0, 1 or 2. Return presence, places and walls as in ``Seen``."""


def deciding(limits: Limits = LIMITS, period: float = PERIOD) -> Settings:
    """Return DECIDING for a base with these limits and for a frame each ``period`` s. A base that brakes gently has to be
    warned earlier: its veto looks as far ahead as it needs to stop, up to the far horizon, which is all that is forecast."""
    braking = max(limits.high[0], -limits.low[0]) / limits.rate[0]
    within = max(DECIDING.veto.within, _BEFORE_BRAKING + braking)
    horizon = min(DECIDING.far_horizon, max(DECIDING.horizon, PERIOD * math.ceil(within / PERIOD)))
    return replace(DECIDING, veto=replace(DECIDING.veto, within=within), horizon=horizon, limits=limits, period=period)


class Odometry:
    """The robot's pose and velocities from its wheels or, if these are not measured, from the executed commands."""

    def __init__(self) -> None:
        self.pose, self.twist = np.zeros(3), np.zeros(2)

    def measured(self, pose: np.ndarray, twist: np.ndarray) -> None:
        """Take a pose (3,), m and rad, and velocities (2,), m/s and rad/s, as measured at the observation."""
        self.pose, self.twist = np.asarray(pose, float), np.asarray(twist, float)

    def executed(self, twist: np.ndarray, seconds: float) -> None:
        """Integrate velocities (2,) over so many seconds in place of a measurement."""
        self.twist = np.asarray(twist, float)
        self.pose, = along_arc(self.pose[None], self.twist[None], seconds)
        self.pose[2] = math.remainder(self.pose[2], math.tau)


SEEING = ('see', 'forecast')  # parts of a tick, by passes of the network
REACTING = 'react'


def deciding_times() -> StepTimes:
    """Return times whose ``predict`` takes an Effort, for a decision with the fewest candidates, or None, for a reaction to
    the present scene after one pass."""
    return StepTimes(lambda effort: {SEEING[1]: 1, REACTING if effort is None else comparing(FEWEST, effort): 1})


def comparing(count: int, effort: Effort = Effort.ONE_ROUND) -> str:
    """Return the name of the timed part: comparing so many candidates, rounded up to one of COUNTS, with that effort."""
    return f'compare {next((each for each in COUNTS if count <= each), COUNTS[-1])}{effort.value}'


class Pilot:
    """Decides for one robot: ``observe`` each frame, then ``decide`` or ``react``. Not thread-safe.

    ``times`` records the durations: SEEING, REACTING, and 'compare N', 'compare N twice' and 'compare N farther' for each of
    COUNTS. ``localiser``: where the robot is, by its commands, its odometry and what it saw.
    """

    def __init__(self, forecast: Forecast, slots: Sequence[Slot | None] = SLOTS, deliberation: Deliberation | None = None,
                 times: StepTimes | None = None, clock: Callable[[], float] = time.perf_counter, period: float = PERIOD
                 ) -> None:
        """``period``: s between two frames."""
        self._forecast, self._slots, self._clock, self._period = forecast, slots, clock, period
        self._deliberation = deliberation or Deliberation(deciding(period=period))
        self._standing, self._out_of_view = StandingThings(slots, period), OutOfView(slots, period)
        self.localiser = Localiser([number for number, slot in enumerate(slots) if slot and not slot.moves])
        self._wall_colours = WallColours()
        self._terms: Sequence[Term] | None = None
        self._times = times or deciding_times()
        self.known: Known | None = None  # at the newest frame
        self.view: View | None = None  # of the newest decision
        self.odometry = Odometry()
        self.last: dict[str, float] = {}  # s, of the parts of the newest tick

    @property
    def limits(self) -> Limits:
        """Within which candidates are imagined: those of the base. They may be changed between two decisions."""
        return self._deliberation.settings.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        if limits != self.limits:
            self._deliberation.settings = deciding(limits, self._period)

    def observe(self, image: np.ndarray, executed: np.ndarray, passes: int, seconds: float = 0.0,
                commanded: np.ndarray | None = None) -> None:
        """Take a frame, so many ``seconds`` after the one before (0: a period), and forecast from it in so many passes;
        ``odometry`` must be that of the frame. ``executed`` (2,): the command in force at the frame; ``commanded`` (2,): the
        mean of those since the frame before, by default ``executed``. Raises OutputError for a forecast that is not finite."""
        self.last = {}
        with self._measure(SEEING[passes]):
            seen = Seen(*self._forecast.observe(image, executed, self.odometry.twist, passes), self._forecast.times)
            for what, values in (('presence', seen.presence), ('places', seen.places), ('walls', seen.walls)):
                require_finite(values, f'the forecast of {what}')
            self.localiser.moved(self.odometry.pose, seconds or self._period, executed if commanded is None else commanded)
            self.localiser.saw(seen.presence, seen.places[0], seen.walls)
            direction, _ = self.localiser.walls()
            self._wall_colours.saw(image, seen.presence, seen.places[0], seen.walls, self.localiser.pose[2] - direction)
        remembered = self._standing.remember(seen, self.localiser.pose, self.localiser.things())
        seen = self._out_of_view.look(remembered, self.localiser.pose)
        self.known = Known(seen, self._slots, self.localiser.pose, self.odometry.twist, self._period)

    def _begin(self, terms: Sequence[Term]) -> None:
        """Switch to the odometry's frame as it is now if the task is new: it was given in that frame, so earlier drift does
        not matter."""
        if terms is not self._terms:
            self._terms = terms
            for kept in (self._standing, self._out_of_view):
                kept.move(self.localiser.pose, self.odometry.pose)
            self.localiser.start_at(self.odometry.pose)
            self.known = replace(self.known, pose=self.odometry.pose)
        if wanted := sights(terms):
            poses = {name: sight.pose(self.localiser, self._wall_colours) for name, sight in wanted.items()}
            self.known = replace(self.known, found={name: pose for name, pose in poses.items() if pose is not None})

    def decide(self, terms: Sequence[Term], sent: list[tuple[float, np.ndarray]], previous: np.ndarray,
               candidates: Sequence[Candidate] | None = None, still: bool = False, effort: Effort = Effort.ONE_ROUND
               ) -> Decision:
        """Return the best of the candidates on the newest forecast: arguments as for ``Deliberation.choose``. ``still``: as if
        everything stayed where it is."""
        with self._measure(comparing(len(candidates) if candidates else COUNTS[-1], effort)):
            self._begin(terms)
            self.view = self.known.view(self._deliberation.times(sum(seconds for seconds, _ in sent), effort), still)
            return self._deliberation.choose(terms, self.view, sent, previous, candidates, effort)

    def react(self, terms: Sequence[Term], previous: np.ndarray, steps: int) -> Decision:
        """Return what the policy does for so many steps, given the scene at the newest frame, without comparing anything."""
        with self._measure(REACTING):
            self._begin(terms)
            self.view = self.known.view(np.zeros(1))
            return self._deliberation.react(terms, self.view, previous, steps)

    def fitting(self, seconds: float, effort: Effort, most: int = COUNTS[-1]) -> tuple[Candidate, ...]:
        """Return the candidates that can be compared in so many seconds, by measured times: FEWEST at least, ``most`` at
        most."""
        fit = [count for count in COUNTS[1:] if self._times.quantile(comparing(count, effort)) <= seconds]
        return candidates_by_worth(min(most, fit[-1] if fit else FEWEST))

    @contextmanager
    def _measure(self, part: str) -> Iterator[None]:
        start = self._clock()
        yield
        self.last[part] = self._clock() - start
        self._times.record(part, self.last[part])


@dataclass(frozen=True)
class Known:
    """What is known at one frame: what was seen, by slots, the robot's pose (3,) and twist (2,), the ``period`` between two
    frames [s], and, by name, the poses (3,) that were ``found`` for goals given as images."""

    seen: Seen
    slots: Sequence[Slot | None]
    pose: np.ndarray
    twist: np.ndarray
    period: float = PERIOD
    found: Mapping[str, np.ndarray] = field(default_factory=dict)

    def view(self, times: np.ndarray, still: bool = False) -> View:
        """Return the view at ``times`` (T,), s from the frame on; ``still``: as if everything stayed where it is."""
        seen = self.seen.at_present() if still else self.seen
        view = seen.view(self.slots, self.pose, self.twist, times)
        view.things.update({name: place_thing(pose, len(times)) for name, pose in self.found.items()})
        return view

    def utilities(self, terms: Sequence[Term], actions: np.ndarray) -> np.ndarray:
        """Return the utility (K,) of each term for ``actions`` (T, 2), each held for a period, from the frame on."""
        poses, twists, found = self.pose[None], self.twist[None], [self.pose[None]]
        for action in np.asarray(actions, float):
            poses, twists = move(poses, twists, action[None], self.period)
            found.append(poses)
        times = self.period * np.arange(len(found))
        view = with_places(self.view(times), terms, len(times))
        return utilities(terms, Outcome(times, np.stack(found, 1), view.things, view.walls))[:, 0]


def warm_up(open_stream: Callable[[], Forecast], image_size: tuple[int, int], times: StepTimes, ticks: int = 12) -> None:
    """Run all tiers on noise, to get first calls over with and to measure their times."""
    rng = np.random.default_rng(0)
    terms = to_goal(SLOTS[0].name).terms
    still, sent = np.zeros(2), [(0.03, np.zeros(2))]
    for kept, count in ((deciding_times(), 2), (times, ticks)):
        forecast = open_stream()
        pilot = Pilot(forecast, times=kept)
        for _ in range(count):
            for passes in range(len(SEEING)):
                pilot.observe(rng.integers(0, 256, (*image_size, 3), dtype=np.uint8), still, passes)
                # Fill every slot: deciding on an empty scene takes no time.
                pilot.known = replace(pilot.known, seen=_full(pilot.known.seen))
                pilot.react(terms, still, 4)
                for candidates in COUNTS:
                    for effort in Effort:
                        pilot.decide(terms, sent, still, candidates_by_worth(candidates), effort=effort)


def _full(seen: Seen) -> Seen:
    """Return a scene with a thing in each slot, all ahead of the robot."""
    count, angles = len(seen.presence), np.linspace(-0.7, 0.7, len(seen.presence))
    places = np.stack([np.cos(angles), np.sin(angles)], 1) * np.linspace(1.0, 2.5, count)[:, None]
    return Seen(np.ones(count), np.tile(places, (len(seen.times), 1, 1)), np.array([1.0, 0.0, 4.0, 4.0, 4.0, 4.0]), seen.times,
                np.zeros(count))

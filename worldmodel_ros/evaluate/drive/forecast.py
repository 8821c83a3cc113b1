"""Runs a scene forecast along a recording: what it forecasts, what it sees later, and what it would have commanded.

A recording does not tell where things are. So a forecast place is compared with where the same forecast sees the thing at that
time, well within the camera's view: a forecast that knows a scene agrees with itself and, for what moves, more so than one in
which everything stands still. In a place that it was never trained for, it still sees things, but they do not stay where they
are.
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel_ros.control.pilot import Known, Pilot
from worldmodel_ros.control.reactive_policy import Aim
from worldmodel_ros.control.task import Task, to_goal
from worldmodel_ros.inputs.ticks import NS
from worldmodel_ros.model.checkpoint_description import ModelError
from .metrics import agreement

if TYPE_CHECKING:
    from worldmodel_ros.bags.drive import Tick
    from worldmodel_ros.engine.forecast.loading import Forecasts
    from worldmodel_ros.model.presets import Preset

AHEAD = (4, 8, 16)  # steps after which a forecast is judged
DELAY = 0.03  # s, from an image to its command, that decisions assume
_TOLERANCE = 0.5  # of a step period, by which an image may be off from the time that was forecast
_VIEW = np.radians(40.0)  # to either side, within which a thing is sure to be in the image
_NEAR = 0.4  # m: nearer things are cut off by the image's edge
_STRANGE = 0.2  # m, by which standing things seem to move in 0.8 s out of distribution: 0.02 m in distribution


@dataclass(frozen=True)
class _Moment:
    tick: Tick
    known: Known


class ForecastReplay:
    """Takes the ticks of a recording as they pass; ``numbers`` has what was found."""

    def __init__(self, forecasts: Forecasts, spec: Preset) -> None:
        """``spec``: of the model that the ticks are made for. Raises ModelError if they do not suit the forecast."""
        if forecasts.step_period != spec.step_period:
            raise ModelError(f'forecast {forecasts.name} needs images every {forecasts.step_period} s, and model {spec.name} '
                             f'every {spec.step_period} s: use a forecast and a model with the same step period')
        self._forecasts, self._spec = forecasts.fitted(spec.image_size, spec.step_period), spec
        self._pilot, self._episode = Pilot(self._forecasts.open()), -1
        self._past: deque[_Moment] = deque(maxlen=max(AHEAD) + 1)
        self._stamp: int | None = None
        self._task = Task()
        self._ticks = self._measured = self._things = 0
        self._seen: Counter[str] = Counter()
        self._errors: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self._commands: list[tuple[np.ndarray, np.ndarray]] = []
        self._candidates, self._vetoed = 0, 0
        self._seconds: list[float] = []

    def watch(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Yield the ticks, and process each on the way."""
        for tick in ticks:
            self._take(tick)
            yield tick

    def _take(self, tick: Tick) -> None:
        if tick.episode != self._episode:
            self._pilot, self._episode, self._stamp = Pilot(self._forecasts.open()), tick.episode, None
            self._past.clear()
            self._task = Task()
        pilot = self._pilot
        since = self._spec.step_period if self._stamp is None else (tick.stamp_ns - self._stamp) / NS
        if tick.wheels is not None:
            pilot.odometry.measured(*tick.wheels)
            self._measured += 1
        else:
            pilot.odometry.executed(tick.executed, since)
        self._stamp = tick.stamp_ns
        begun = time.perf_counter()
        pilot.observe(tick.image, tick.executed, 1, since)
        self._decide(tick)
        self._seconds.append(time.perf_counter() - begun)
        self._ticks += 1
        there = _in_view(pilot.known)
        self._things += len(there)
        self._seen.update(pilot.known.slots[slot].name for slot in there)
        self._past.append(_Moment(tick, pilot.known))
        self._judge(tick, there)

    def _decide(self, tick: Tick) -> None:
        """Decide what would have been commanded for the recorded goal."""
        if tick.goal != self._task.name:  # the same terms for the same goal: to a pilot, others are a new task
            self._task = to_goal(tick.goal)
        terms = self._task.terms
        if not terms or tick.recorded is None:
            return
        if Aim.of(terms).target not in self._pilot.known.view(np.zeros(1)).things:
            return
        decision = self._pilot.decide(terms, [(DELAY, tick.executed)], tick.executed)
        self._commands.append((decision.command, tick.recorded))
        self._candidates += len(decision.scores)
        self._vetoed += len(decision.vetoed)

    def _judge(self, tick: Tick, there: Sequence[int]) -> None:
        now = self._past[-1].known
        for steps in AHEAD:
            if len(self._past) <= steps:
                continue
            before = self._past[-1 - steps]
            late = (tick.stamp_ns - before.tick.stamp_ns) / NS / self._spec.step_period - steps
            if abs(late) > _TOLERANCE:
                continue
            j = int(np.abs(before.known.seen.times - steps * self._spec.step_period).argmin())
            said, stood = (_in_odom(before.known, before.known.seen.places[k]) for k in (j, 0))
            for slot in there:
                of = [slot]
                if now.slots[slot].alike:  # they come in any order: take the nearest one, of either
                    of = [k for k, other in enumerate(now.slots) if other.alike and before.known.seen.presence[k] > 0.5]
                if not of or not before.known.seen.presence[of].max() > 0.5:
                    continue
                place = _in_odom(now, now.seen.places[0])[slot]
                errors = tuple(float(np.linalg.norm(where[of] - place, axis=1).min()) for where in (said, stood))
                self._errors.setdefault(('moving' if now.slots[slot].moves else 'standing', steps), []).append(errors)

    def numbers(self) -> dict[str, Any]:
        """Return what was found; without ``tick_ms``, the same on every run.

        ``things``: in view, per tick; ``seen``: share of the ticks, by thing; ``odometry``: share of the ticks at which the
        wheels were measured. ``places``: by what moves and seconds ahead, the median error in m, and that of a forecast in
        which everything stays (``standing_still``). ``commands``: of the best candidate for the goal as set, compared with
        those recorded next, and the share of the candidates that were vetoed.
        """
        ticks = max(1, self._ticks)
        places: dict[str, dict] = {}
        for (kind, steps), errors in sorted(self._errors.items()):
            said, stood = np.median(errors, 0)
            places.setdefault(kind, {})[f'{steps * self._spec.step_period:.1f} s'] = {
                'error_m': round(float(said), 4), 'standing_still_m': round(float(stood), 4), 'n': len(errors)}
        commands = None
        if self._commands:
            decided, done = (np.array(part) for part in zip(*self._commands, strict=True))
            commands = {'ticks': len(decided), **agreement(decided, done, self._spec),
                        'vetoed': round(self._vetoed / max(1, self._candidates), 4)}
        return {'name': self._forecasts.name, 'backend': self._forecasts.backend, 'ticks': self._ticks,
                'odometry': round(self._measured / ticks, 4), 'things': round(self._things / ticks, 2),
                'seen': {name: round(count / ticks, 4) for name, count in sorted(self._seen.items())}, 'places': places,
                'commands': commands,
                'tick_ms': {f'p{q}': round(1e3 * float(np.percentile(self._seconds, q)), 2) for q in (50, 99)}
                if self._seconds else None}


def in_words(found: dict[str, Any]) -> str:
    """Return the numbers as one line of text."""
    wheels = '' if found['odometry'] > 0.5 else ', without odometry'
    text = f'forecast {found["name"]} on {found["backend"]}{wheels}: {found["things"]:.1f} objects in view per tick'
    if found['ticks'] <= AHEAD[-1]:  # few things or none were there 0.8 s before
        return f'{text}; the recording is too short to tell whether the forecast is at home here'
    stands = found['places'].get('standing', {}).get('0.8 s')
    if stands is None or stands['error_m'] > _STRANGE:
        why = 'no static object is seen again' if stands is None else \
            f'static objects are seen {stands["error_m"]:.2f} m from where they were forecast 0.8 s before'
        return f'{text}, and {why}: out of distribution, the forecast is not at home here; do not use it for decisions'
    for kind, rows in found['places'].items():
        if row := rows.get('0.8 s'):
            named = 'static' if kind == 'standing' else kind
            text += f'; {named} objects are seen {row["error_m"]:.2f} m from where they were forecast 0.8 s before'
            if kind == 'moving':
                text += f' ({row["standing_still_m"]:.2f} m for a forecast in which they stand still)'
    if commands := found['commands']:
        text += '; commands differ from the recorded ones by ' + ', '.join(
            f'{commands[name]["mae"]:.2f} in {name}' for name in commands if isinstance(commands[name], dict))
    return text


def _in_view(known: Known) -> list[int]:
    """Slots of the things that are present, and are where the camera must see them."""
    x, y = known.seen.places[0].T
    sure = (known.seen.presence > 0.5) & (np.abs(np.arctan2(y, x)) < _VIEW) & (np.hypot(x, y) > _NEAR)
    return [int(slot) for slot in np.flatnonzero(sure) if known.slots[slot]]


def _in_odom(known: Known, places: np.ndarray) -> np.ndarray:
    """Places (S, 2) in base_link of a moment, converted to the frame of the odometry."""
    x, y, yaw = known.pose
    turn = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
    return places @ turn + (x, y)

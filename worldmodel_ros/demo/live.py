"""Live view of the running demo: a redrawn table on a terminal, a line per second elsewhere."""
from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from worldmodel_ros.demo.recording import TIERS, Choice, Recording, Room
from worldmodel_ros.demo.summary import camera_to_command, tier_counts

RECENT = 5.0  # window of the rate [s]
RECENT_COMMANDS = 50
_SHORT = {'two_step': 'two', 'one_step': 'one', 'smaller': 'small', 'plan_only': 'plan', 'last_plan': 'last', 'stop': 'stop'}


@dataclass(frozen=True)
class View:
    """The state of the run at one moment, for display."""

    elapsed: float              # [s]
    total: float                # [s]
    rate: float                 # commands per second, recent
    p50: float                  # camera to command, recent [s]; NaN: none yet
    p99: float                  # camera to command, since the start [s]; NaN: none yet
    deadline: float             # [s]
    tiers: dict[str, int]
    late: int                   # commands over the deadline
    goal: str
    distance: float             # [m]
    reached: int
    psnr: float | None          # [dB]
    psnr_copy: float | None     # [dB]
    speed: tuple[float, float]  # [m/s], [rad/s]
    room: str = ''              # with a task: results of the rooms so far
    choice: str = ''            # with a task: how the newest command was decided


def view(recording: Recording, elapsed: float, total: float, deadline: float, distance: float,
         scores: dict) -> View:
    """Return the values to display, from a recording."""
    answers = [c for c in recording.commands if c.stamp]
    latencies = camera_to_command(recording)
    newest = answers[-1].received if answers else 0
    recent = [c for c in answers[-200:] if newest - c.received < RECENT * 1e9]
    span = (recent[-1].received - recent[0].received) / 1e9 if len(recent) > 1 else 0.0
    goal = recording.goals[-1].goal if recording.goals else recording.target
    last = recording.commands[-1] if recording.commands else None
    return View(
        elapsed, total,
        rate=(len(recent) - 1) / span if span else 0.0,
        p50=float(np.median(latencies[-RECENT_COMMANDS:])) if latencies else math.nan,
        p99=float(np.quantile(latencies, 0.99)) if latencies else math.nan,
        deadline=deadline,
        tiers=tier_counts(recording),
        late=sum(latency > deadline for latency in latencies),
        goal=goal or '-',
        distance=distance,
        reached=sum(g.reached is not None for g in recording.goals) + sum(bool(room.succeeded) for room in recording.driven),
        psnr=scores['psnr_db'],
        psnr_copy=scores['psnr_copy_last_db'],
        speed=(last.v, last.w) if last else (0.0, 0.0),
        room=_rooms(recording.driven),
        choice=_choice(recording.choices[-1]) if recording.choices else '',
    )


def _rooms(rooms: list[Room]) -> str:
    over = [room for room in rooms if room.succeeded is not None]
    done = sum(bool(room.succeeded) for room in over)
    return f'room {len(rooms)}, {done} of {len(over)} done' if rooms else ''


def _choice(choice: Choice) -> str:
    if not choice.options:
        return choice.chosen
    vetoed = sum(bool(option.contact) for option in choice.options)
    return f'{choice.chosen} of {len(choice.options)}' + (f', {vetoed} vetoed' if vetoed else '')


def as_line(v: View) -> str:
    """Return a view as one line for a log."""
    tiers = ' '.join(f'{name} {share:.0%}' for name, share in _shares(v).items() if share)
    latency = f'camera-to-command p50 {v.p50 * 1e3:.0f} p99 {v.p99 * 1e3:.0f} ms, over budget {v.late}'
    goal = f'goal {v.goal} {v.distance:.2f} m ({v.room or f"{v.reached} reached"})' + (f'  {v.choice}' if v.choice else '')
    return f'{v.elapsed:5.1f} s  {v.rate:4.1f} Hz  {latency}  {tiers}  {goal}  {_quality(v)}'


def as_table(v: View) -> list[str]:
    """Return a view as the lines of a table, for a terminal of at least 78 columns."""
    done = min(1.0, v.elapsed / v.total) if v.total else 1.0
    bar = '█' * round(40 * done) + '░' * (40 - round(40 * done))
    tiers = '  '.join(f'{_SHORT[name]} {share:.0%}' for name, share in _shares(v).items())
    return [
        f'  {bar}  {v.elapsed:5.1f} of {v.total:.0f} s',
        f'  rate               {v.rate:5.1f} Hz   command  {v.speed[0]:+.2f} m/s  {v.speed[1]:+.2f} rad/s',
        f'  camera to command  p50 {v.p50 * 1e3:5.1f} ms   p99 {v.p99 * 1e3:5.1f} ms   '
        f'(budget {v.deadline * 1e3:.0f} ms, over it: {v.late})',
        f'  tiers              {tiers}',
        f'  goal               {v.goal:<8} {v.distance:5.2f} m away   {v.room or f"reached so far: {v.reached}"}',
        *([f'  decision           {v.choice}'] if v.choice else []),
        f'  prediction         {_quality(v)}',
    ]


class LiveView:
    """Shows views on a stream: redraws a table on a terminal, appends at most a line per second elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """``stream``: standard output by default."""
        self._stream = stream = stream or sys.stdout
        self._terminal = stream.isatty()
        self._drawn = 0

    @property
    def period(self) -> float:
        """Time between two views [s]."""
        return 0.5 if self._terminal else 1.0

    def show(self, v: View) -> None:
        """Draw one view."""
        if self._terminal:
            lines = as_table(v)
            up = f'\x1b[{self._drawn}F' if self._drawn else ''
            self._stream.write(up + ''.join(f'\x1b[2K{line}\n' for line in lines))
            self._drawn = len(lines)
        else:
            self._stream.write(as_line(v) + '\n')
        self._stream.flush()

    def note(self, text: str) -> None:
        """Print a text once, above the table."""
        if self._drawn:
            self._stream.write(f'\x1b[{self._drawn}F\x1b[J')
            self._drawn = 0
        self._stream.write(text + '\n')
        self._stream.flush()


def _shares(v: View) -> dict[str, float]:
    served = sum(v.tiers.values())
    return {name: v.tiers[name] / served if served else 0.0 for name in TIERS.values()}


def _quality(v: View) -> str:
    if v.psnr is None:
        return 'no frames compared yet'
    return f'{v.psnr:.1f} dB ({v.psnr - v.psnr_copy:+.1f} dB against copying the last frame)'

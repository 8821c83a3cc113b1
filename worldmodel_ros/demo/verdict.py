"""The verdict on a run in words: each claim with its number and bound."""
from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from worldmodel_ros.control.ladder import MODEL_TIERS, Tier
from worldmodel_ros.exit_codes import TOO_SLOW

MODEL_SHARE = 0.5           # of the ticks, answered after a prediction
FORECAST_SHARE = 0.95       # of the ticks of a task, decided on a forecast, on an otherwise idle machine
PREDICTED_SHARE = 0.5       # of the ticks, with a prediction published in time
TWO_STEP_SHARE = 0.95       # of the ticks, on an otherwise idle machine
PREDICTION_MARGIN_DB = 2.0  # over copying the last frame
STOP_AFTER_KILL_MS = 150.0
DRIVEN_V = 0.02             # mean speed above noise [m/s]
DRIVEN_W = 0.1              # mean turn rate above noise [rad/s]


class Weight(enum.Enum):
    """The consequence of a failed claim."""

    REQUIRED = enum.auto()  # the run did not work
    SPEED = enum.auto()     # the robot was safe, but the model is too slow on this machine
    WANTED = enum.auto()    # it worked, less well than it should


@dataclass(frozen=True)
class Check:
    """One claim about a run."""

    claim: str
    passed: bool
    weight: Weight

    def __str__(self) -> str:
        word = 'PASS' if self.passed else 'WEAK' if self.weight is Weight.WANTED else 'FAIL'
        return f'{word}  {self.claim}'


def judge(summary: dict) -> list[Check]:
    """Check a summary against the budget and the bounds; a claim without a measurement fails."""
    budget = summary['deadline_ms']
    latency = summary['camera_to_command_ms']
    late = summary['late_commands_published']
    seconds, robot = summary['seconds'], summary['robot']
    distance, turned = robot['distance_m'], robot['turned_rad']
    checks = [
        Check(f'{latency["commands"]} commands came from the model, {summary["rate_hz"]:.1f} ticks per second',
              latency['commands'] > 0, Weight.REQUIRED),
        Check(f'the robot drove {distance:.2f} m and turned by {turned:.1f} rad in {seconds:.0f} s',
              seconds > 0 and (distance > DRIVEN_V * seconds or turned > DRIVEN_W * seconds),
              Weight.REQUIRED),
        Check(f'commands published too late, counted by the robot: {_number(late)} (allowed: 0)',
              late == 0, Weight.REQUIRED),
        Check(f'camera to command: p50 {_number(latency["p50"])} ms, p99 {_number(latency["p99"])} ms '
              f'(budget {budget:.0f} ms)',
              latency['p99'] is not None and latency['p99'] <= budget, Weight.WANTED),
    ]
    served = sum(summary['tiers'].values())
    checks += _speed(summary, served)
    if not summary['loaded']:
        best = [Tier.TWO_STEP, Tier.ONE_STEP] if summary['task'] else [Tier.TWO_STEP]
        share, wanted = _share(summary, best), FORECAST_SHARE if summary['task'] else TWO_STEP_SHARE
        checks.append(Check(
            f'{share:.1%} of the ticks were served with two steps{" or one" if summary["task"] else ""} (wanted: {wanted:.0%})',
            share >= wanted, Weight.WANTED))
    checks.append(_prediction(summary['prediction']))
    checks.append(_rooms(summary) if summary['task'] else _goals(summary))
    for kill in summary['kills']:
        stop, driving = kill['stop_ms'], kill['driving_s']
        checks.append(Check(
            f'model killed at {kill["at_s"]:.1f} s: told to stop after {_number(stop)} ms '
            f'(allowed: {STOP_AFTER_KILL_MS:.0f} ms), driving again after {_number(driving)} s',
            stop is not None and stop <= STOP_AFTER_KILL_MS and driving is not None,
            Weight.REQUIRED))
    return checks


def exit_code(checks: list[Check]) -> int:
    """Return 0 if the run worked, TOO_SLOW if the robot was safe but the model too slow on this machine, else 1."""
    failed = {check.weight for check in checks if not check.passed}
    return 1 if Weight.REQUIRED in failed else TOO_SLOW if Weight.SPEED in failed else 0


def conclusion(checks: list[Check], summary: dict) -> str:
    """Return the outcome in a sentence or two; if the machine is too slow, also what it could sustain."""
    code = exit_code(checks)
    if code == 0:
        weak = sum(not check.passed for check in checks)
        return f'The run worked, but less well than it should: {weak} of its lines {"is" if weak == 1 else "are"} WEAK.' \
            if weak else 'The run worked.'
    if code == 1:
        return 'The run did not work: see the failed lines.'
    model, budget = summary['model'], summary['deadline_ms']
    two, one = model.get('tick_two_step_ms'), model.get('tick_one_step_ms')
    could = (f'A {"decision" if summary["task"] else "tick"} takes {two:.0f} ms here with two steps and {one:.0f} ms with one, '
             f'and {budget:.0f} ms are allowed from the camera to the robot, transport included; predictions are possible at '
             f'{model["predictions_possible_hz"]:.1f} Hz, after the command. ' if two and one else '')
    why = next((f'Mostly because {reason}. ' for reason in summary['not_imagined_because'] if reason), '').replace('#', 'some')
    drove = ('by plans whose outcome had not been predicted in time' if not summary['task']
             else 'by the policy, by old plans or not at all, and not by what it imagined'
             if _share(summary, MODEL_TIERS) < MODEL_SHARE else 'by what it imagined, and not one image of that came in time')
    return (f'The robot was safe, but the model is too slow on this machine: it drove {drove}. {why}{could}Stop other '
            'programs, allow real-time priority (docs/installing.md), or use a faster machine or a GPU.')


def _share(summary: dict, tiers: Sequence[Tier]) -> float:
    """Return the share of ticks answered by one of ``tiers``."""
    served = sum(summary['tiers'].values())
    return sum(summary['tiers'][tier.name.lower()] for tier in tiers) / served if served else 0.0


def _speed(summary: dict, served: int) -> list[Check]:
    by_model = _share(summary, MODEL_TIERS)
    in_time, published = summary['predictions']['in_time'], summary['predictions']['published']
    share = min(1.0, in_time / served) if served else 0.0  # one more of these than of the others may be heard
    age = summary['predictions']['age_ms']
    imagined = 'decided by predictions' if summary['task'] else 'answered after their future was predicted'
    return [
        Check(f'{by_model:.1%} of the ticks were {imagined} (wanted: {MODEL_SHARE:.0%})', by_model >= MODEL_SHARE,
              Weight.SPEED),
        # The commands of a task need no predicted images, which come if there is time between ticks; but some must come.
        Check(f'{published} predictions were published, {in_time} before the time that they show: for {share:.1%} of '
              f'the ticks (wanted: {PREDICTED_SHARE:.0%}); age p50 {_number(age["p50"])} ms, p99 {_number(age["p99"])} ms',
              share >= PREDICTED_SHARE, Weight.WANTED if summary['task'] and in_time else Weight.SPEED)]


def _goals(summary: dict) -> Check:
    reached = [f'{g["goal"]} in {g["took_s"]:.1f} s' for g in summary['goals'] if g['took_s'] is not None]
    given = ', '.join(g['goal'] for g in summary['goals'])
    return Check(f'goals reached: {", ".join(reached) or "none"} (given: {given or "none"})', summary['goal_reached'],
                 Weight.WANTED)


def _rooms(summary: dict) -> Check:
    """Return the check of the rooms, with the judge's result for each."""
    done = sum(bool(room['succeeded']) for room in summary['rooms'])
    over = sum(room['succeeded'] is not None for room in summary['rooms'])
    told = '; '.join(f'{room["seed"]} {room["fate"]}' for room in summary['rooms'])
    return Check(f'{summary["task"]}: {done} of {over} rooms done ({told or "none"})', done > 0, Weight.WANTED)


def _prediction(scores: dict) -> Check:
    model, copy = scores['psnr_db'], scores['psnr_copy_last_db']
    if model is None:
        return Check('no prediction could be compared with what the camera saw while driving', False, Weight.WANTED)
    return Check(f'predicted frames: {model:.1f} dB, {model - copy:+.1f} dB compared with repeating the last frame '
                 f'(wanted: {PREDICTION_MARGIN_DB:+.0f} dB), over {scores["frames"]} frames',
                 model - copy >= PREDICTION_MARGIN_DB, Weight.WANTED)


def _number(value: float | None) -> str:
    return 'unknown' if value is None else f'{value:g}'

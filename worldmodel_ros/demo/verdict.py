"""The verdict of a run in words: each claim with its number and its bound."""
from __future__ import annotations

from dataclasses import dataclass

TWO_STEP_SHARE = 0.95       # of the ticks, on a machine that has nothing else to do
PREDICTION_MARGIN_DB = 2.0  # over copying the last frame
STOP_AFTER_KILL_MS = 150.0
DRIVEN_V = 0.02             # mean speed that is more than noise [m/s]
DRIVEN_W = 0.1              # mean rate of turning that is more than noise [rad/s]


@dataclass(frozen=True)
class Check:
    """One claim about a run."""

    claim: str
    passed: bool
    required: bool      # without it, the run did not really work

    def __str__(self) -> str:
        return f'{"PASS" if self.passed else "FAIL"}  {self.claim}'


def judge(summary: dict) -> list[Check]:
    """Hold a summary against the budget; a claim that nothing was measured for fails."""
    budget = summary['deadline_ms']
    latency = summary['camera_to_command_ms']
    late = summary['late_commands_published']
    seconds, robot = summary['seconds'], summary['robot']
    distance, turned = robot['distance_m'], robot['turned_rad']
    checks = [
        Check(f'{latency["commands"]} commands came from the model, {summary["rate_hz"]:.1f} ticks a second',
              latency['commands'] > 0, True),
        Check(f'the robot drove {distance:.2f} m and turned by {turned:.1f} rad in {seconds:.0f} s',
              seconds > 0 and (distance > DRIVEN_V * seconds or turned > DRIVEN_W * seconds), True),
        Check(f'commands published too late, as the robot counted: {_number(late)} (allowed: 0)',
              late == 0, True),
        Check(f'camera to command: p50 {_number(latency["p50"])} ms, p99 {_number(latency["p99"])} ms '
              f'(budget {budget:.0f} ms)',
              latency['p99'] is not None and latency['p99'] <= budget, False),
    ]
    served = sum(summary['tiers'].values())
    if not summary['loaded']:
        share = summary['tiers']['two_step'] / served if served else 0.0
        checks.append(Check(
            f'{share:.1%} of the ticks were served by the two-step model (wanted: {TWO_STEP_SHARE:.0%})',
            share >= TWO_STEP_SHARE, False))
    checks.append(_prediction(summary['prediction']))
    reached = [f'{g["goal"]} in {g["took_s"]:.1f} s' for g in summary['goals'] if g['took_s'] is not None]
    given = ', '.join(g['goal'] for g in summary['goals'])
    checks.append(Check(f'goals reached: {", ".join(reached) or "none"} (given: {given or "none"})',
                        summary['goal_reached'], False))
    for kill in summary['kills']:
        stop, driving = kill['stop_ms'], kill['driving_s']
        checks.append(Check(
            f'model killed at {kill["at_s"]:.1f} s: told to stop after {_number(stop)} ms '
            f'(allowed: {STOP_AFTER_KILL_MS:.0f} ms), driving again after {_number(driving)} s',
            stop is not None and stop <= STOP_AFTER_KILL_MS and driving is not None, True))
    return checks


def worked(checks: list[Check]) -> bool:
    """Whether the run really worked: every required claim holds."""
    return all(c.passed for c in checks if c.required)


def _prediction(scores: dict) -> Check:
    model, copy = scores['psnr_db'], scores['psnr_copy_last_db']
    if model is None:
        return Check('no prediction could be compared with what the camera saw while driving', False, False)
    return Check(f'predicted frames: {model:.1f} dB, {model - copy:+.1f} dB against copying the last frame '
                 f'(wanted: {PREDICTION_MARGIN_DB:+.0f} dB), over {scores["frames"]} frames',
                 model - copy >= PREDICTION_MARGIN_DB, False)


def _number(value: float | None) -> str:
    return 'unknown' if value is None else f'{value:g}'

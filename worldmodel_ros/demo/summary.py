"""Computes the summary of a run from its recording."""
from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from worldmodel_ros.control.ladder import MODEL_TIERS
from worldmodel_ros.demo.images import decode_rgb
from worldmodel_ros.demo.prediction import PredictionScorer
from worldmodel_ros.demo.recording import NS, TIERS, GoalAttempt, Pose, Recording, Room, WhatIf
from worldmodel_ros.evaluate.drive.pictures import psnr

# Keys taken from the model node's diagnostics.
MODEL_KEYS = ('model', 'backend', 'forecast', 'forecast_backend', 'odometry', 'warmup_s', 'tick_two_step_ms',
              'tick_one_step_ms', 'tick_plan_only_ms', 'predictions_possible_hz')
_ALIKE = 0.5     # m, within which an estimated object is matched with a mover
AHEAD = (0.4, 0.8, 1.6)  # s, horizons at which forecast positions are compared with the truth


@dataclass(frozen=True)
class Kill:
    """Outcome of killing the model's process; times in s after the kill, None if it did not happen."""

    at: float                       # time of the kill in the run [s]
    stop: float | None              # first command to stop
    driving: float | None           # first command from the model again


@dataclass(frozen=True)
class Run:
    """What is known of a run apart from its messages."""

    seconds: float                  # duration of the run [s]
    deadline: float                 # camera stamp to command [s]
    late_commands: int | None       # late commands as counted by the robot; None if it did not report
    start_up: dict[str, float]      # phase -> [s]
    kills: list[Kill] = field(default_factory=list)
    loaded: bool = False            # another program kept all cores busy
    task: str = ''                  # the task given and judged; if empty, goals were given


def summarise(recording: Recording, run: Run, scorer: PredictionScorer) -> dict:
    """Return the content of summary.json, except the machine; times are in the unit that the key names."""
    reached = [g for g in recording.goals if g.reached is not None]
    done = [room for room in recording.driven if room.succeeded]
    ticks = sum(not tick.silent for tick in recording.ticks)
    return {
        'task': run.task,
        'seconds': round(run.seconds, 2),
        'ticks': ticks,
        'rate_hz': round(ticks / run.seconds, 2) if run.seconds else 0.0,
        'camera_to_command_ms': latency_ms(recording),
        'camera_to_command_observed_ms': quantiles_ms(observed_latencies(recording)),
        'deadline_ms': round(run.deadline * 1e3, 1),
        'late_commands_published': run.late_commands,
        'tiers': tier_counts(recording),
        'predictions': predictions(recording),
        'lower_tiers_because': lower_tier_reasons(recording),
        'not_imagined_because': not_imagined_because(recording),
        'part_times_ms': part_times(recording),
        'decisions': decisions(recording),
        'what_if': what_if_scores(recording.what_ifs),
        'goal_reached': bool(reached or done),
        'goals_reached': len(reached) + len(done),
        'goals': [_attempt(g) for g in recording.goals],
        'rooms': [_room(room) for room in recording.driven],
        'prediction': scorer.scores(),
        'robot': {'distance_m': round(distance_driven(recording), 2),
                  'turned_rad': round(angle_turned(recording), 2), **_numbers(recording.robot)},
        'model': _numbers({key: value for key, value in recording.model.items() if key in MODEL_KEYS}),
        'start_up_s': {name: round(value, 2) for name, value in run.start_up.items()},
        'kills': [{'at_s': _rounded(k.at), 'stop_ms': _rounded(k.stop, 1e3), 'driving_s': _rounded(k.driving)}
                  for k in run.kills],
        'loaded': run.loaded,
    }


def latency_ms(recording: Recording) -> dict:
    """Return the quantiles of ``camera_to_command`` [ms], and where it was measured."""
    return {**quantiles_ms(camera_to_command(recording)),
            'measured_by': 'robot' if recording.robot_latencies else 'observer'}


def camera_to_command(recording: Recording) -> list[float]:
    """Return the times from camera stamp to command received, of the commands that answer an observation, in order [s].

    As measured by the robot, by the steady clock; if it did not report, as measured by the observer, by ROS time.
    """
    observed = observed_latencies(recording)
    # Commands that the robot received after the observer had finished do not count.
    return recording.robot_latencies[:len(observed)] or observed


def observed_latencies(recording: Recording) -> list[float]:
    """Return the times from camera stamp to command received by the observer [s]."""
    return [c.latency for c in recording.commands if c.stamp]


def quantiles_ms(seconds: list[float]) -> dict:
    """Return p50, p99 and maximum of durations [ms], and their number."""
    return {'p50': _quantile_ms(seconds, 0.5), 'p99': _quantile_ms(seconds, 0.99),
            'max': _quantile_ms(seconds, 1.0), 'commands': len(seconds)}


def tier_counts(recording: Recording) -> dict[str, int]:
    """Return the number of ticks per tier; between the rooms of a task there are no images, and so no ticks."""
    counts = Counter(tick.tier for tick in recording.ticks if not tick.silent)
    return {name: counts[tier] for tier, name in TIERS.items()}


def decisions(recording: Recording) -> dict:
    """Return how commands were decided on a forecast of the scene; empty without one."""
    if not recording.choices:
        return {}
    compared = [choice for choice in recording.choices if choice.options]
    rejected = Counter(choice.rejected_for(option) or 'none: equally good'
                       for choice in compared for option in choice.options if option.name != choice.chosen)
    against = [choice for choice in compared
               if choice.option('policy') and choice.option(choice.chosen)
               and choice.option(choice.chosen).score > choice.option('policy').score]
    return {'chosen': dict(Counter(choice.chosen for choice in recording.choices).most_common()),
            'candidates': round(float(np.mean([len(choice.options) for choice in compared])), 1) if compared else 0.0,
            'vetoed': sum(bool(option.contact) for choice in compared for option in choice.options),
            'rejected_for': dict(rejected.most_common()),
            'against_the_policy': len(against),
            'passes': {str(passes): count for passes, count in
                       sorted(Counter(choice.passes for choice in recording.choices).items())},
            'movers_off_by_m': mover_errors(recording)}


def mover_errors(recording: Recording) -> dict[str, float | None]:
    """Return the median error of estimated (0 s) and forecast (AHEAD) positions of movers [m], by horizon in s.

    Each object is matched with the mover nearest to it at the observation, within _ALIKE; unmatched objects do not count.
    """
    found: dict[float, list[float]] = {0.0: [], **{ahead: [] for ahead in AHEAD}}
    for choice in recording.choices:
        pose, seen = recording.pose_at(choice.stamp), recording.sighting_at(choice.stamp)
        if pose is None or seen is None or len(choice.times) < 2:
            continue
        for thing in choice.things:
            places = in_world(thing.path, pose)
            name, nearest = min(((name, math.dist((mover.x, mover.y), places[0])) for name, mover in seen.movers.items()),
                                key=lambda each: each[1], default=('', math.inf))
            if nearest > _ALIKE:
                continue
            for ahead in found:
                later = recording.sighting_at(choice.stamp + round(ahead * NS))
                if ahead <= choice.times[-1] and later is not None and name in later.movers and (
                        recording.room_at(later.stamp) is recording.room_at(choice.stamp)):
                    place = [np.interp(ahead, choice.times, places[:, axis]) for axis in range(2)]
                    found[ahead].append(math.dist((later.movers[name].x, later.movers[name].y), place))
    return {f'{ahead:.1f}': _rounded(float(np.median(errors))) if errors else None for ahead, errors in found.items()}


def in_world(places: np.ndarray, pose: Pose) -> np.ndarray:
    """Return positions (..., 2) in base_link of a pose as positions in the world [m]."""
    cos, sin = math.cos(pose.yaw), math.sin(pose.yaw)
    return places @ np.array([[cos, sin], [-sin, cos]]) + (pose.x, pose.y)


def predictions(recording: Recording) -> dict:
    """
    Return the number of predictions ``published``, the number ``in_time`` (before the time of their first frame), and their
    age on publication [ms].
    """
    futures = recording.futures
    return {'published': len(futures), 'in_time': sum(future.in_time for future in futures),
            'age_ms': {name: _quantile_ms([future.age for future in futures], q)
                       for name, q in (('p50', 0.5), ('p99', 0.99), ('max', 1.0))}}


def lower_tier_reasons(recording: Recording) -> dict[str, int]:
    """Return the number of ticks below the best tier, by reason without its numbers, most frequent first."""
    counts = Counter(_without_numbers(tick.reason) for tick in recording.ticks if tick.tier > 1)
    return dict(counts.most_common(8))


def not_imagined_because(recording: Recording) -> dict[str, int]:
    """Return the same as ``lower_tier_reasons``, for the ticks answered before a prediction was made."""
    counts = Counter(_without_numbers(tick.reason) for tick in recording.ticks if tick.tier > max(MODEL_TIERS))
    return dict(counts.most_common(8))


def _without_numbers(reason: str) -> str:
    return re.sub(r'-?[\d.]*\d', '#', reason.split(';')[0])


def part_times(recording: Recording) -> dict:
    """Return the parts of the time from camera to command [ms]: until the image is received, in the node until the command is
    published, and, within the latter, the forecast and the comparison of candidates."""
    answered = [tick for tick in recording.ticks if tick.tier and tick.latency]
    return {'image': quantiles_ms([tick.age for tick in answered]), 'node': quantiles_ms([tick.latency for tick in answered]),
            'forecast': quantiles_ms([choice.forecast_time for choice in recording.choices]),
            'comparing': quantiles_ms([choice.decision_time for choice in recording.choices])}


def distance_driven(recording: Recording) -> float:
    """Return the length of the driven path [m]."""
    return sum(math.dist((one.x, one.y), (other.x, other.y)) for one, other in _steps(recording))


def angle_turned(recording: Recording) -> float:
    """Return the sum of all rotation, in both directions [rad]."""
    return sum(abs(math.remainder(other.yaw - one.yaw, math.tau)) for one, other in _steps(recording))


def _steps(recording: Recording) -> list[tuple[Pose, Pose]]:
    """Return the pairs of consecutive poses in the same room."""
    return [(one, other) for one, other in pairwise(recording.poses)
            if recording.room_at(one.stamp) is recording.room_at(other.stamp)]


def what_if_scores(answers: list[WhatIf]) -> dict:
    """Return times and quality of the what-if answers.

    ``psnr_db``: last frame of each moving branch against the simulator's. ``psnr_ignoring_action_db``: the simulator's last
    frame of that branch against that of its branch ``stop``, which is what a perfect model that ignores the action would
    reach. ``best_branch_agrees``: share of the answers whose branch with most progress is also the simulator's best.
    """
    scores: list[float] = []
    ignoring: list[float] = []
    agrees: list[float] = []
    for answer in answers:
        truth = {b.name: b for b in answer.truth}
        both = [(b, truth[b.name]) for b in answer.branches if b.name in truth]
        if not both:
            continue
        last = min(len(frames) for pair in both for frames in (pair[0].frames, pair[1].frames)) - 1
        shown = {true.name: decode_rgb(true.frames[last]) for _, true in both}
        for branch, _ in both:
            if branch.name != 'stop' and 'stop' in shown:
                scores.append(psnr(decode_rgb(branch.frames[last]), shown[branch.name]))
                ignoring.append(psnr(shown['stop'], shown[branch.name]))
        if not any(math.isnan(b.progress) for pair in both for b in pair):
            best, really_best = (max(both, key=lambda pair: pair[side].progress)[0] for side in (0, 1))
            agrees.append(float(best is really_best))
    elapsed = [a.elapsed for a in answers]
    return {
        'branches': max((len(a.branches) for a in answers), default=0),
        'ms_p50': _quantile_ms(elapsed, 0.5),
        'ms_p99': _quantile_ms(elapsed, 0.99),
        'round_trip_ms_p50': _quantile_ms([a.round_trip for a in answers], 0.5),
        'calls': len(answers),
        'calls_with_truth': sum(bool(a.truth) for a in answers),
        'psnr_db': _mean(scores),
        'psnr_ignoring_action_db': _mean(ignoring),
        'best_branch_agrees': _mean(agrees),
    }


def _room(room: Room) -> dict:
    return {'seed': room.seed, 'target': room.target, 'fate': room.fate, 'succeeded': room.succeeded,
            'seconds': round(room.seconds, 2), 'contacts': room.contacts, 'arrivals': room.arrivals}


def _attempt(goal: GoalAttempt) -> dict:
    return {'goal': goal.goal, 'given_at_s': _rounded(goal.given),
            'took_s': _rounded(goal.reached - goal.given) if goal.reached is not None else None,
            'closest_m': _rounded(goal.closest)}


def _quantile_ms(seconds: list[float], q: float) -> float | None:
    return round(float(np.quantile(seconds, q)) * 1e3, 2) if seconds else None


def _mean(values: list[float]) -> float | None:
    return round(float(np.mean(values)), 2) if values else None


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return round(value * scale, 2) if value is not None and math.isfinite(value) else None


def _numbers(values: dict[str, str]) -> dict[str, str | float | None]:
    """Convert the text values of diagnostics to numbers where possible; None if not finite (JSON has no NaN)."""
    result: dict[str, str | float | None] = {}
    for key, text in values.items():
        try:
            number = float(text)
        except ValueError:
            result[key] = text
            continue
        if not math.isfinite(number):
            result[key] = None
        else:
            result[key] = int(number) if number.is_integer() else number
    return result

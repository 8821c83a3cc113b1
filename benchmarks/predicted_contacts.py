"""Whether contacts that the planner predicts come true: the imagined future of each candidate against the simulator, in which
it is really driven.

    python benchmarks/predicted_contacts.py --seeds 3000000:3000040 --json predicted_contacts.json

While the robot drives a task, every few ticks the world is forked for each candidate. Within one scene, candidates are ranked
by their least predicted gap, and by the least gap in standard deviations of the thing's position: the AUC is the share of pairs
of one with a contact and one without that are in the right order, ties half. Scenes in which the camera sees everything that
any candidate touches are separated from those in which it does not see some of it. A veto is false if the candidate that it
forbids touches nothing within the veto's horizon.
"""
import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.control import reactive_policy
from worldmodel_ros.control.deliberation import CANDIDATES, Veto, imagine
from worldmodel_ros.control.terms import Outcome
from worldmodel_ros.engine.forecast.loading import load_forecast
from worldmodel_ros.evaluate.control.episode import drive, rung_seconds
from worldmodel_ros.evaluate.control.learned import Learned
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.evaluate.quality.seeds import parse_seeds
from worldmodel_ros.motion import LIMITS, PERIOD, under_way
from worldmodel_ros.sim.world import TIMESTEP, World

HORIZONS = (0.8, 1.6)  # s from when the command takes effect
EVERY = 4  # ticks
VETO = Veto()
STANDING = 0.05  # m, standard deviation of the position of walls and static things
RANKINGS = {'by gap': 'gap', 'by gap over doubt': 'gap_over_doubt'}


class Watched:
    """A controller whose candidates are really driven, in forks of the world, every few ticks."""

    def __init__(self, controller: Learned, rows: list[dict]) -> None:
        self._controller, self._rows, self._tick = controller, rows, 0

    def decide(self, world, odometry, terms, sent, executed):
        command = self._controller.decide(world, odometry, terms, sent, executed)
        self._tick += 1
        view, aim = self._controller.pilot.view, reactive_policy.Aim.of(terms)
        if self._tick % EVERY == 0 and aim.target in view.things:
            self._rows.append(self._compare(world, view, aim, terms, sent, sent[-1][1] if sent else executed))
        return command

    def _compare(self, world, view, aim, terms, sent, previous):
        delay = sum(seconds for seconds, _ in sent)
        steps = round(max(HORIZONS) / PERIOD) + 1
        times = np.concatenate([[0.0], delay + PERIOD * np.arange(steps)])
        view = self._controller.pilot.known.view(times)
        pose, twist = under_way(view.pose, view.twist, sent)
        poses, commands = imagine(aim, CANDIDATES, view, pose, twist, previous, steps, LIMITS)
        poses = np.concatenate([np.broadcast_to(view.pose, (len(poses), 1, 3)), poses], 1)
        outcome = Outcome(times, poses, view.things, view.walls)
        names = [name for name in view.things if name != aim.target or aim.apart]
        gaps = [outcome.wall_gap(), *map(outcome.gap, names)]
        doubts = [STANDING, *(STANDING if view.things[name].unseen is None else outcome.doubt(name) for name in names)]
        over_doubt = [gap / doubt for gap, doubt in zip(gaps, doubts, strict=True)]
        contacts = [_touched(world, sent, driven, aim) for driven in commands]
        touched = np.array([[bool(names) for names in driven] for driven in contacts])  # (C, steps - 1)
        movable = {name for driven in contacts for names in driven for name in names if not name.startswith('wall')}
        return {'gap': np.minimum.accumulate(np.min(gaps, 0)[:, 1:], 1),
                'gap_over_doubt': np.minimum.accumulate(np.min(over_doubt, 0)[:, 1:], 1),
                'touched': np.maximum.accumulate(touched, 1),
                'all_in_view': all(map(world.visible, movable)),
                'vetoed': [name != '' for name in VETO.of(terms, outcome)]}


def _touched(world: World, sent, commands: np.ndarray, aim) -> list[frozenset[str]]:
    """Return the forbidden things touched in each period of the commands, after those already sent."""
    fork, found = world.fork(), []
    for seconds, command in sent:
        if (steps := round(seconds / TIMESTEP)) > 0:
            fork.step(command, steps * TIMESTEP)
    for command in commands:
        fork.step(command, PERIOD)
        found.append(fork.touched - ({aim.target} if not aim.apart else set()))
    return found


def ranked(rows: list[dict], horizon: float, by: str) -> dict[str, float]:
    """Return the AUC within scenes, equally weighted, and the number of scenes: those with both kinds of candidates."""
    column, found = round(horizon / PERIOD), []
    for row in rows:
        gap, touched = row[by][:, column], row['touched'][:, column - 1]
        if 0 < touched.sum() < len(touched):
            pairs = gap[~touched][:, None] - gap[touched]
            found.append(float(((pairs > 0) + 0.5 * (pairs == 0)).mean()))
    return {'auc': round(float(np.mean(found)), 4) if found else float('nan'), 'scenes': len(found)}


def aucs(rows: list[dict], by: str) -> dict[str, dict]:
    """Return the AUC at each horizon, and separately for scenes where everything touched is in view, and the others."""
    in_view = {name: [row for row in rows if row['all_in_view'] == seen] for name, seen in (('in_view', True), ('not', False))}
    return {**{f'auc_at_{horizon:.1f}_s'.replace('.', '_'): ranked(rows, horizon, by) for horizon in HORIZONS},
            'touched_at_1_6_s': {name: ranked(some, HORIZONS[-1], by) for name, some in in_view.items()}}


def vetoes(rows: list[dict]) -> dict[str, float]:
    """Count vetoed candidates by whether they touched something, and contacts that were not vetoed."""
    vetoed = np.array([row['vetoed'] for row in rows])
    touched = np.array([row['touched'][:, round(VETO.within / PERIOD) - 1] for row in rows])
    later = np.array([row['touched'][:, -1] for row in rows])
    return {'candidates': int(vetoed.size), 'vetoed': int(vetoed.sum()), 'false': int((vetoed & ~touched).sum()),
            'false_share_of_candidates': round(float((vetoed & ~touched).mean()), 4),
            'false_even_in_1_6_s': int((vetoed & ~later).sum()), 'contacts': int(touched.sum()),
            'contacts_not_vetoed': int((touched & ~vetoed).sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', required=True, type=parse_seeds, help='rooms A:B')
    parser.add_argument('--tasks', nargs='+', default=['street', 'intercept', 'follow'], choices=TASKS)
    parser.add_argument('--forecast', default='tiny')
    parser.add_argument('--json', type=Path, help='file for the result')
    chosen = parser.parse_args()
    forecast, world, rows = load_forecast(chosen.forecast), World(), defaultdict(list)
    for task in chosen.tasks:
        for seed in chosen.seeds:
            learned = Learned(forecast.open(), forecast.image_size, 1)
            drive(TASKS[task].setup(seed), Watched(learned, rows[task]), rung_seconds()['one_step'], world)
    found = {}
    for task in (*chosen.tasks, 'all'):
        of = rows[task] if task != 'all' else [row for name in chosen.tasks for row in rows[name]]
        found[task] = {'scenes': len(of), **{name: aucs(of, by) for name, by in RANKINGS.items()}, 'vetoes': vetoes(of)}
    write_result({**provenance(('mujoco', 'numpy', 'onnxruntime')), 'rooms': len(chosen.seeds), 'tasks': found,
                  'spread_of_a_mover_over_candidates_m': 0.0,
                  'note': 'The spread is 0 by construction: one forecast, which sees no candidate, serves all of them.'},
                 chosen.json, show=True)


if __name__ == '__main__':
    main()

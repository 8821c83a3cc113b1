"""Section: what the model would have done, compared with what was done."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.evaluate.drive.metrics import chosen_plans
from .html import Run, escape, number, section, table
from .plot import Plot, legend, over_time, padded

UNITS = {'linear.x': 'm/s', 'angular.z': 'rad/s'}
_ROWS = {'hold': 'action of the step before', 'mean': 'mean action'}


def commands(runs: list[Run]) -> str:
    """Recorded and planned commands over time, and their differences in numbers."""
    if not all(run.evaluation.numbers['policy']['windows'] for run in runs):
        return section('commands', 'Commands', '<p>The bag has no actions to compare the plans with.</p>')
    goal = {run.kind: _goal(run) for run in runs}
    known = any('known_goal' in run.evaluation.numbers['policy'] for run in runs)
    lead = ('Shown is the first command of each plan for the goal that was set at the time.' if known else
            'The bag does not contain the goal. Shown are the plans for the goal whose plans are nearest to the recording '
            'as a whole, which flatters the model; the table has all goals.')
    return section('commands', 'Commands', ''.join(_over_time(run, goal[run.kind]) for run in runs),
                   *(_table(run, len(runs) > 1) for run in runs),
                   lead='What the model would have done, compared with what was executed in the step after each image. '
                        + lead)


def _goal(run: Run) -> str:
    policy = run.evaluation.numbers['policy']
    return '' if 'known_goal' in policy else policy['best_goal']


def _over_time(run: Run, goal: str) -> str:
    columns, spec, plots = run.evaluation.columns, run.evaluation.spec, []
    done, plans, times = columns['after'], chosen_plans(columns, run.evaluation.numbers['policy']), columns['time_s']
    for i, name in enumerate(spec.action_names):
        values = np.concatenate([done[:, i], plans[:, i]])
        plot = Plot((0.0, max(float(times[-1]), 1e-3)), padded(values, 0.1, 0.05), width=960, height=190,
                    x_label='recording time [s]' if i + 1 == len(spec.action_names) else '',
                    y_label=f'{name} [{UNITS.get(name, "SI")}]', x_ticks=10, y_ticks=4)
        plot.episodes(times, columns['episode'])
        plot.line(*over_time(times, done[:, i], columns['episode']), 'thin truth')
        plot.line(*over_time(times, plans[:, i], columns['episode']), f'thin {run.kind}')
        plots.append(plot.svg(f'{name}: recorded and planned over time', wide=True))
    words = f'{run.name}, goal {escape(goal)}' if goal else f'{run.name}, goal as set'
    return ''.join(plots) + legend(('truth', 'executed'), (run.kind, words))


def _table(run: Run, named: bool) -> str:
    policy, names = run.evaluation.numbers['policy'], run.evaluation.spec.action_names
    best = policy['best_goal']
    known, rows, counts = policy.get('known_goal'), [], f'{policy["windows"]} windows.'
    if known:
        rows = [('goal as set', known)]
        counts = f'{policy["windows"]} windows, of which {known["windows"]} have a goal.'
    if known and known['windows'] < policy['windows']:
        rows += [(f'{text}, where a goal is set', known[key]) for key, text in _ROWS.items()]
    rows += [(f'goal {escape(goal)}' + (' <small>nearest</small>' if goal == best else ''), agreement)
             for goal, agreement in policy['goals'].items()]
    rows += [(text, policy[key]) for key, text in _ROWS.items()]
    head = ['plan for' if not named else f'{run.name}: plan for']
    for name in names:
        unit = UNITS.get(name, 'SI')
        head += [f'{name} MAE <small>[{unit}]</small>', f'RMSE <small>[{unit}]</small>', 'correlation']
    cells = [[text, *(number(agreement[name][key], 3 if key != 'correlation' else 2)
                      for name in names for key in ('mae', 'rmse', 'correlation'))] for text, agreement in rows]
    return table(head, cells, counts)

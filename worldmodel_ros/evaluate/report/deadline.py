"""Section: would the deadline have held?"""
from __future__ import annotations

import numpy as np

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.evaluate.drive.step_times import MeasuredTimes
from .html import Run, escape, number, section, table
from .plot import Plot, legend

NAMES = {Tier.TWO_STEP: 'two steps', Tier.ONE_STEP: 'one step', Tier.PLAN_ONLY: 'plan only',
         Tier.LAST_PLAN: 'last plan', Tier.STOP: 'stop', Tier.NONE: 'nothing'}
BINS = 60


def deadline(runs: list[Run]) -> str:
    """Shares of the tiers, the histogram of latencies and the reasons, of each run."""
    parts = [_one(run, len(runs) > 1) for run in runs if run.evaluation.deadline and run.evaluation.deadline.ticks]
    if not parts:
        return section('deadline', 'Deadline', '<p>The deadline was not replayed.</p>')
    return section(
        'deadline', 'Deadline', *parts,
        lead='The engine\'s worker and ladder answered the bag\'s frames in virtual time, with measured step times. '
             'Not included, as no bag contains them: the transport to the gate and the gate itself, for which the '
             'reserve is kept.')


def _one(run: Run, named: bool) -> str:
    replayed = run.evaluation.deadline
    title = f'<h3>{run.name}</h3>' if named else ''
    shares = ''.join(f'<span class="{_kind(tier)}" style="flex:{replayed.tiers[tier]} 0 0" title="{text}"></span>'
                     for tier, text in NAMES.items() if replayed.tiers[tier])
    keys = legend(*((_kind(tier), f'{text} {number(replayed.share(tier) * 100, 1, "%")} ({replayed.tiers[tier]})')
                    for tier, text in NAMES.items()))
    return title + f'<div class="shares">{shares}</div>{keys}' + _histogram(run) + _facts(run)


def _histogram(run: Run) -> str:
    replayed = run.evaluation.deadline
    if not replayed.latency:
        return '<p>No tick would have received a command.</p>'
    milliseconds, served = np.array(replayed.latency) * 1e3, np.array(replayed.served)
    budget, limit = replayed.budget.deadline * 1e3, replayed.budget.limit * 1e3
    edges = np.linspace(0.0, max(budget * 1.15, float(milliseconds.max()) * 1.02), BINS + 1)
    total = np.histogram(milliseconds, edges)[0]
    plot = Plot((0.0, float(edges[-1])), (0.0, float(total.max()) * 1.18), width=960, height=230, x_ticks=10, y_ticks=4,
                x_label='camera stamp to command from the model node [ms]', y_label='ticks')
    base = np.zeros(BINS)
    for tier, name in NAMES.items():
        counts = np.histogram(milliseconds[served == int(tier)], edges)[0]
        for i in np.flatnonzero(counts):
            plot.bar(edges[i], edges[i + 1], base[i], base[i] + counts[i], _kind(tier),
                     f'{edges[i]:.1f} to {edges[i + 1]:.1f} ms: {counts[i]} by {name}')
        base += counts
    plot.vertical(limit, '', f'send by, {limit:.0f} ms', anchor='end')
    plot.vertical(budget, 'limit', f'deadline, {budget:.0f} ms')
    return plot.svg('histogram of latencies from camera stamp to command', wide=True)


def _facts(run: Run) -> str:
    replayed = run.evaluation.deadline
    latency = replayed.latency_ms() or {'p50': None, 'p99': None, 'max': None}
    delay = ('assumed to be zero, as the bag does not contain it' if replayed.delay is None else
             f'as recorded, median {number(replayed.delay * 1e3, 1, "ms")}')
    rows = [['latency, p50', number(latency['p50'], 1, 'ms')], ['latency, p99', number(latency['p99'], 1, 'ms')],
            ['latency, maximum', number(latency['max'], 1, 'ms')], ['ticks that the model did not finish in time',
                                                                     str(replayed.late)],
            ['images too old on receipt', str(replayed.stale)], ['age of the images on receipt', delay],
            ['step times from', escape(_machine(replayed.times))]]
    rows += [[f'not two steps: {escape(reason)}', str(count)] for reason, count in replayed.reasons.most_common(6)]
    return table(['', ''], rows)


def _kind(tier: Tier) -> str:
    """Style class of a tier."""
    return tier.name.lower()


def _machine(times: MeasuredTimes) -> str:
    cpu = times.machine.get('cpu', 'an unnamed machine')
    cores = f', {times.machine["cores"]} cores' if 'cores' in times.machine else ''
    return f'{times.model} on {times.backend}, {cpu}{cores}; {len(times.ticks)} ticks'

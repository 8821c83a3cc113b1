"""Plots a miss curve from its JSON file.

    python benchmarks/miss_plot.py benchmarks/results/miss_curve_epyc_2_cores.json
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

from worldmodel_ros.demo.style import BAD, MODEL, TIER_COLOURS, TRUTH, picture

LOOKS = {'fifo': (BAD, 'first come, first served'), 'edf': ('#f59e0b', 'earliest deadline first'),
         'edf_ladder': (MODEL, 'the same, with the ladder')}
TIERS = {'TWO_STEP': (TIER_COLOURS['two_step'], 'two steps'), 'ONE_STEP': (TIER_COLOURS['one_step'], 'one step'),
         'SMALLER': ('#a78bfa', 'the smaller model'), 'REFUSED': ('#d5dae0', 'refused at arrival'),
         'LATE': (BAD, 'late')}


def plot(result: dict, path: Path) -> None:
    """Plot late ticks by policy, what the ladder serves instead, and response times."""
    rows, due = result['rows'], 1e3 * (result['times_s']['budget'] - result['times_s']['allowance'])
    by_policy = {name: [row for row in rows if row['policy'] == name] for name in LOOKS}
    device = ', '.join(result['machine']['gpus']) or result['machine']['cpu']
    note = (f'{result["model"]} ({result["weights"]} weights) on {result["backend"]}, {device}; '
            f'{result["rate_hz"]:g} Hz each, answers due {due:g} ms after arrival')
    with picture(path, 11.0, 3.9, 'Robots on one device, and how many of their ticks are late', note) as figure:
        late, served, times = figure.subplots(1, 3, gridspec_kw={'left': 0.06, 'right': 0.985, 'top': 0.76,
                                                                 'bottom': 0.14, 'wspace': 0.24})
        for name, (colour, label) in LOOKS.items():
            sessions = [row['sessions'] for row in by_policy[name]]
            late.plot(sessions, [100 * row['late_ratio'] for row in by_policy[name]], 'o-', color=colour, ms=4,
                      label=label)
            for key, style in (('p99_ms', '-'), ('p50_ms', ':')):
                times.plot(sessions, [row[key] for row in by_policy[name]], style, color=colour, lw=1.5)
        late.set(title='late, % of the ticks', xlabel='robots', ylim=(-3, 103))
        late.legend(fontsize=7.5, loc='center right')
        ladder = by_policy['edf_ladder']
        shares = {name: [100 * _share(row, name) for row in ladder] for name in TIERS}
        served.stackplot([row['sessions'] for row in ladder], *shares.values(),
                         colors=[colour for colour, _ in TIERS.values()], labels=[label for _, label in TIERS.values()])
        served.set(title='with the ladder: served, % of the ticks', xlabel='robots', ylim=(0, 100))
        served.legend(fontsize=7.5, loc='lower left', frameon=True, framealpha=0.9, edgecolor='none')
        times.axhline(due, color=TRUTH, lw=1, ls='--')
        times.set(title='arrival to answer, ms (dotted: p50, else p99)', xlabel='robots', ylim=(0, 4 * due))


def _share(row: dict, name: str) -> float:
    if name in ('REFUSED', 'LATE'):
        return row['refused_ratio' if name == 'REFUSED' else 'late_ratio']
    in_time = 1.0 - row['late_ratio'] - row['refused_ratio']
    return in_time * row['tiers'].get(name, 0) / max(1, sum(row['tiers'].values()))


if __name__ == '__main__':
    for file in map(Path, sys.argv[1:]):
        plot(json.loads(file.read_text()), file.with_suffix('.png'))

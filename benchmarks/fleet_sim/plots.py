"""Plots of a simulated fleet."""
from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from worldmodel_ros.demo.style import BAD, GOOD, INK, LINE, MODEL, MUTED, TIER_COLOURS, TRUTH, picture
from worldmodel_ros.serving.scheduler import Batch, Kind

from .tally import BIN

POLICY_COLOURS = {'fifo': MUTED, 'edf': TIER_COLOURS['last_plan'], 'edf_ladder': MODEL}
POLICY_WORDS = {'fifo': 'first come, first served', 'edf': 'earliest deadline first', 'edf_ladder': 'EDF with ladder'}
TIERS = {'two_step': ('two steps', TIER_COLOURS['two_step']), 'one_step': ('one step', TIER_COLOURS['one_step']),
         'smaller': ('the smaller model', TRUTH), 'refused': ('refused', TIER_COLOURS['last_plan']), 'late': ('late', BAD)}
NETWORK_COLOURS = {'base/observe': GOOD, 'base/denoise': MODEL, 'base/decode': LINE,
                   'small/observe': '#f59e0b', 'small/denoise': '#fcd34d', 'small/decode': '#eceff2'}


def draw_overview(report: dict, path: Path) -> None:
    """Draw late answers and tiers by load, and the course of the scenarios with events."""
    rows = report['rows']
    steady = [row for row in rows if row['scenario'] == 'steady']
    others = [name for name in dict.fromkeys(row['scenario'] for row in rows) if name != 'steady']
    gpus = rows[0]['gpus'] if rows else 0
    note = (f'{gpus} GPUs, robots at 10 Hz, {report["assumptions"]["deadline_s"] * 1e3:.0f} ms from camera to command; '
            f'step times: {", ".join(table["machine"] for table in report["step_tables"])}')
    lines = 1 + (len(others) + 1) // 2
    height = 0.8 + 2.6 * lines
    with picture(path, 11.0, height, 'A fleet, simulated', _warned(note, report['measured'])) as figure:
        grid = figure.add_gridspec(lines, 2, top=1 - 0.95 / height, bottom=0.5 / height, left=0.07, right=0.98,
                                   hspace=0.5, wspace=0.2)
        if steady:
            _late_by_load(figure.add_subplot(grid[0, 0]), steady)
            _tiers_by_load(figure.add_subplot(grid[0, 1]), steady)
        for k, name in enumerate(others):
            _course(figure.add_subplot(grid[1 + k // 2, k % 2]), name, [row for row in rows if row['scenario'] == name])


def draw_timeline(batches: list[tuple[Batch, float]], path: Path, measured: bool, since: float = 0.5,
                  length: float = 0.1) -> None:
    """Draw the batches of one GPU over ``length`` seconds: a lane per network, the number of robots in each batch."""
    networks = list(NETWORK_COLOURS)
    note = 'Each bar is one batch, with the number of requests in it. Decoding fills gaps, where there are any.'
    title = 'One overloaded GPU, 78 robots: 100 ms of its work'
    with picture(path, 11.0, 3.2, title, _warned(note, measured)) as figure:
        axes = figure.add_axes((0.11, 0.17, 0.87, 0.58))
        for batch, end in batches:
            if end < since or batch.begun > since + length:
                continue
            lane, begun, width = networks.index(batch.network), (batch.begun - since) * 1e3, (end - batch.begun) * 1e3
            axes.barh(lane, width, left=begun, height=0.72, color=NETWORK_COLOURS[batch.network], edgecolor='white',
                      linewidth=0.8)
            if width > 0.9 and 0.0 <= begun < 1e3 * length:
                light = batch.kind is not Kind.TICK or batch.network.startswith('small')
                axes.text(begun + width / 2, lane, str(len(batch.entries)), ha='center', va='center', fontsize=8,
                          color=INK if light else 'white')
        used = sorted({networks.index(batch.network) for batch, _ in batches})
        axes.set(xlim=(0.0, 1e3 * length), ylim=(max(used) + 0.6, -0.6), yticks=used, xlabel='ms',
                 yticklabels=[networks[k] for k in used])
        axes.grid(False, axis='y')


def _warned(note: str, measured: bool) -> str:
    return note if measured else f'STEP TIMES NOT MEASURED. {note}'


def _late_by_load(axes: Axes, rows: list[dict]) -> None:
    for policy, colour in POLICY_COLOURS.items():
        mine = [row for row in rows if row['policy'] == policy]
        axes.plot([row['robots'] for row in mine], [100 * row['late_ratio'] for row in mine], 'o-', color=colour,
                  label=POLICY_WORDS[policy], markersize=4)
    axes.axhline(0.1, color=BAD, linewidth=0.8, linestyle=':')
    axes.set_yscale('symlog', linthresh=0.01)
    axes.set(title='Late answers, by load', xlabel='robots', ylabel='%', xscale='log', ylim=(-0.002, 150))
    _ticks(axes, rows)
    axes.set_yticks([0, 0.01, 0.1, 1, 10, 100], ['0', '0.01', '0.1', '1', '10', '100'])
    axes.legend(fontsize=8, loc='center right')


def _tiers_by_load(axes: Axes, rows: list[dict]) -> None:
    mine = [row for row in rows if row['policy'] == 'edf_ladder']
    below = [0.0] * len(mine)
    for tier, (words, colour) in TIERS.items():
        shares = [100 * _share(row, tier) for row in mine]
        axes.bar(range(len(mine)), shares, bottom=below, color=colour, width=0.7, label=words)
        below = [a + b for a, b in zip(below, shares)]
    axes.set(title='EDF with ladder: what ticks are answered with', ylabel='% of ticks', xlabel='robots', ylim=(0, 100))
    axes.set_xticks(range(len(mine)), [f'{row["robots"]:,}' for row in mine])
    axes.grid(False, axis='x')
    axes.legend(fontsize=8, ncols=5, loc='upper center', bbox_to_anchor=(0.5, -0.22), handlelength=1, columnspacing=1)


def _share(row: dict, tier: str) -> float:
    if tier in ('refused', 'late'):
        return row[f'{tier}_ratio']
    return row['tiers'].get(tier, 0.0) * row['outcomes'].get('met', 0) / row['ticks']


def _course(axes: Axes, name: str, rows: list[dict]) -> None:
    for row in rows:
        bins = row['unanswered_in_time_by_bin']
        axes.plot([BIN * k for k in range(len(bins))], [100 * value for value in bins],
                  color=POLICY_COLOURS[row['policy']], label=POLICY_WORDS[row['policy']], linewidth=1.3)
    highest = max(100 * value for row in rows for value in row['unanswered_in_time_by_bin'])
    axes.set(title=f'{name}, {rows[0]["robots"]:,} robots: not answered in time', xlabel='s', ylabel='% of ticks',
             ylim=(-0.03 * max(highest, 1.0), 1.1 * max(highest, 1.0)))
    axes.legend(fontsize=8)


def _ticks(axes: Axes, rows: list[dict]) -> None:
    robots = sorted({row['robots'] for row in rows})
    axes.set_xticks(robots, [f'{count:,}' for count in robots])
    axes.minorticks_off()

"""
Simulates a fleet of GPUs serving robots at 10 Hz, with the scheduler of the server on a virtual clock.

    python -m benchmarks.fleet_sim --table base.json --table small.json --out benchmarks/results

Step tables are what the service's calibration measured on the GPU; without one, a placeholder demonstrates the program,
and nothing is written among the results. Writes fleet_sim.json, fleet_sim.png and fleet_sim_timeline.png, and
prints the rows as a table.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from worldmodel_ros.machine import machine, versions
from worldmodel_ros.serving.scheduler import EDF, EDF_LADDER, FIFO, Batch, Policy, StepTable

from .device import DEADLINE, DOWNLINK, SETTINGS, UPLINK, UPLINK_JITTER, Device, routes
from .durations import read_tables
from .plots import draw_overview, draw_timeline
from .scenarios import DETECTION, PERIOD, Gpu, Scenario, histories, scenarios
from .tally import BIN, Tally

POLICIES = {'fifo': FIFO, 'edf': EDF, 'edf_ladder': EDF_LADDER}
RESULTS = Path(__file__).resolve().parents[1] / 'results'
CHUNK = 8  # GPUs per task of one process
SEED = 1


def play(gpus: list[tuple[int, Gpu]], tables: list[dict], policy: Policy, scenario: Scenario) -> Tally:
    """Simulate some GPUs; they do not depend on the others."""
    tally = Tally()
    for number, history in gpus:
        tally.add(Device(history, tables, policy, scenario.staggered, scenario.seconds, SEED + number).run())
    return tally


def simulate(scenario: Scenario, policy: str, tables: list[dict], executor: Executor) -> dict:
    """Simulate a scenario under a policy; return its row."""
    start = time.perf_counter()
    numbered = list(enumerate(histories(scenario, SEED)))
    tasks = [executor.submit(play, numbered[k:k + CHUNK], tables, POLICIES[policy], scenario)
             for k in range(0, len(numbered), CHUNK)]
    tally = Tally()
    for task in tasks:
        tally.add(task.result())
    # The last bin is cut off by the end.
    bins = [round(tally.bad[k] / max(1, tally.all[k]), 5) for k in range(int(scenario.seconds / BIN))]
    return {'scenario': scenario.name, 'policy': policy, 'robots': scenario.robots, 'gpus': scenario.gpus,
            'seconds': scenario.seconds, **tally.row(), 'unanswered_in_time_by_bin': bins,
            'simulated_in_s': round(time.perf_counter() - start, 1)}


def timeline(tables: list[dict], robots: int, seconds: float = 1.0) -> list[tuple[Batch, float]]:
    """Return the batches of one GPU with ``robots`` robots, and when each ended [s]."""
    batches: list[tuple[Batch, float]] = []
    scenario = Scenario('timeline', robots, 1, seconds)
    Device(histories(scenario, SEED)[0], tables, EDF_LADDER, False, seconds, SEED,
           lambda batch, end: batches.append((batch, end))).run()
    return batches


def capacity(tables: list[dict]) -> dict[str, float]:
    """
    Return the most robots that one GPU can serve in each tier: with every batch of the size that does most work per
    second, for which deadlines do not always leave time.
    """
    table = StepTable.from_dict(*tables)
    networks = {row['network'] for values in tables for row in values['rows']}
    best = {network: min(table.typical(network, size) / size for size in range(1, table.largest(network) + 1))
            for network in networks}
    return {tier.name.lower(): round(PERIOD / sum(best[unit.network] for unit in route), 1)
            for tier, route in routes(networks).items()}


def markdown(report: dict) -> str:
    """Return the rows as a table for the documentation."""
    lines = ['| scenario | robots | policy | late | refused | two steps, one step, smaller | p50 / p99 | GPU busy |',
             '|---|---|---|---|---|---|---|---|']
    for row in report['rows']:
        tiers = ', '.join(f'{row["tiers"].get(tier, 0.0):.1%}' for tier in ('two_step', 'one_step', 'smaller'))
        lines.append(f'| {row["scenario"]} | {row["robots"]:,} | {row["policy"]} | {row["late_ratio"]:.3%} | '
                     f'{row["refused_ratio"]:.2%} | {tiers} | {row["p50_ms"]} / {row["p99_ms"]} ms | '
                     f'{row["utilisation"]:.0%} |')
    return '\n'.join(lines)


def describe(row: dict) -> str:
    """Return a row as one line."""
    tiers = ', '.join(f'{name} {share:.1%}' for name, share in row['tiers'].items())
    return (f'{row["scenario"]:26s} {row["robots"]:6d} robots  {row["policy"]:10s} late {row["late_ratio"]:8.3%}  '
            f'refused {row["refused_ratio"]:7.2%}  p50 {row["p50_ms"]} p99 {row["p99_ms"]} ms  '
            f'busy {row["utilisation"]:.0%}  {tiers}  ({row["simulated_in_s"]:.0f} s)')


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks.fleet_sim', description=__doc__.split('\n\n')[0])
    parser.add_argument('--table', type=Path, action='append', default=[],
                        help='step table of a preset, measured (base, and small for its tier); several')
    parser.add_argument('--out', type=Path, default=Path('out/fleet_sim'), help='folder of the results')
    parser.add_argument('--scale', type=float, default=1.0, help='share of the robots and GPUs, for a try')
    parser.add_argument('--scenario', action='append', default=[], help='only scenarios with this in their names')
    parser.add_argument('--processes', type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    try:
        tables = read_tables(options.table)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    measured = all(table.get('measured', False) for table in tables)
    if not measured:
        print('The step table was NOT MEASURED: what follows says nothing about any GPU.', file=sys.stderr)
        if options.out.resolve().is_relative_to(RESULTS):
            parser.error(f'--out {options.out}: only what comes from measured step tables belongs there; give --table')
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        'command': 'python -m benchmarks.fleet_sim ' + ' '.join(sys.argv[1:] if arguments is None else arguments),
        'measured': measured, 'simulated_on': machine(), 'versions': versions(),
        'assumptions': {
            'period_s': PERIOD, 'deadline_s': DEADLINE, 'uplink_s': UPLINK, 'uplink_jitter_s': UPLINK_JITTER,
            'downlink_s': DOWNLINK, 'detection_of_a_loss_s': DETECTION, 'settings': vars(SETTINGS)},
        'capacity_robots_per_gpu': capacity(tables), 'step_tables': tables, 'rows': []}
    print(f'robots that one GPU can serve at the most: {report["capacity_robots_per_gpu"]}')
    with ProcessPoolExecutor(options.processes) as executor:
        for scenario in scenarios():
            if options.scenario and not any(part in scenario.name for part in options.scenario):
                continue
            for policy in POLICIES:
                row = simulate(scenario.scaled(options.scale), policy, tables, executor)
                report['rows'].append(row)
                print(describe(row), flush=True)
                # Written as they come, so that an interrupted run keeps its rows.
                (options.out / 'fleet_sim.json').write_text(json.dumps(report, indent=1) + '\n')
    draw_overview(report, options.out / 'fleet_sim.png')
    draw_timeline(timeline(tables, robots=78), options.out / 'fleet_sim_timeline.png', measured)
    print(markdown(report))
    return 0


if __name__ == '__main__':
    sys.exit(main())

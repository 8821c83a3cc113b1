"""Kills the model's process while it drives, repeatedly: how long until the robot is told to stop?

    python benchmarks/kill_latency.py --kills 60 --json benchmarks/results/kill_latency_<machine>.json

Each kill comes right after a command, when the gate's time-out is furthest away. The stop is timed where it arrives on
cmd_vel, in this process. The scenario is that of the tests (test/scenarios/model.py).
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=60)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)

    from worldmodel_ros.bringup.environment import free_domain_id
    os.environ.setdefault('ROS_DOMAIN_ID', str(free_domain_id()))
    from scenarios import catalogue, model
    from scenarios.checks import STOP_LATENCY
    from scenarios.supervised import SupervisedSystem

    latencies, failures = [], []
    with tempfile.TemporaryDirectory() as logs:
        system = SupervisedSystem(catalogue.SYSTEMS[0], Path(logs))
        system.start()
        try:
            for _ in range(options.kills):
                try:
                    kill, stop = model.kill_while_driving(system.rigs[0])
                    latencies.append(round(1e3 * (stop - kill), 1))
                    print(latencies[-1], file=sys.stderr, flush=True)
                    if stop - kill > STOP_LATENCY:
                        failures.append(f'told to stop after {latencies[-1]} ms')
                except AssertionError as error:
                    failures.append(str(error))
                    print(f'failed: {error}', file=sys.stderr, flush=True)
        finally:
            system.stop()
    ordered = sorted(latencies)
    result = {**provenance(), 'kills': options.kills, 'failures': failures,
              'stop_ms': {'median': ordered[len(ordered) // 2], 'max': ordered[-1]} if ordered else None,
              'stops_ms': latencies}
    write_result(result, options.json, show=True)
    return 1 if failures else 0


if __name__ == '__main__':
    raise SystemExit(main())

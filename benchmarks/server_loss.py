"""Kills the engine that two robots share while it drives them, repeatedly: do they go on?

    python benchmarks/server_loss.py --kills 20 --json benchmarks/results/server_loss_<machine>.json

For each kill and robot: the longest time for which no command moved it in the 2 s that follow, measured where it arrives on
cmd_vel (100 ms: no tick was missed). Late commands are counted by the robot itself, and the sources of answers
by its node. The scenario is that of the tests (test/scenarios/server.py).
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)
    os.environ.setdefault('ROS_HOME', folder.name)  # the socket is there too

    from worldmodel_ros.bringup.environment import free_domain_id
    os.environ.setdefault('ROS_DOMAIN_ID', str(free_domain_id()))
    from scenarios import catalogue, server
    from scenarios.rig import ROBOT
    from scenarios.supervised import SupervisedSystem
    from worldmodel_ros.control.ladder import Tier

    pauses, tiers, failures = [], Counter(), []
    description = next(system for system in catalogue.SYSTEMS if server.SERVER in system.shared)
    system = SupervisedSystem(description, Path(folder.name))
    system.start()
    try:
        server.spread_cameras(*system.rigs)
        late = sum(int(rig.next_report(ROBOT)['late']) for rig in system.rigs)
        for _ in range(options.kills):
            try:
                for rig in system.rigs:
                    server.wait_for_server(rig, server.BACK)
                loss = server.kill_while_driving(*system.rigs)
            except AssertionError as error:
                failures.append(str(error))
                print(f'failed: {error}', file=sys.stderr, flush=True)
                continue
            pauses += [pause.length for pause in loss.pauses]
            tiers.update(Tier(r.message.tier).name for rig in system.rigs
                         for r in rig.observer.since('deadline_status', loss.at) if r.at < loss.at + 2.0)
            print([round(1e3 * pause.length) for pause in loss.pauses], file=sys.stderr, flush=True)
        late = sum(int(rig.next_report(ROBOT)['late']) for rig in system.rigs) - late
    finally:
        system.stop()
        folder.cleanup()
    ordered = sorted(round(1e3 * pause) for pause in pauses)
    result = {**provenance(), 'kills': options.kills, 'failures': failures, 'late_commands': late,
              'tiers_in_the_2_s_after': dict(tiers),
              'pause_ms': {'median': ordered[len(ordered) // 2], 'max': ordered[-1]} if ordered else None,
              'pauses_ms': ordered}
    write_result(result, options.json, show=True)
    return 1 if failures or late else 0


if __name__ == '__main__':
    raise SystemExit(main())

"""
What a fleet's front adds to opening a session and to a tick, on one host.

    python benchmarks/fleet_hop.py --opens 80 --json benchmarks/results/fleet_hop_<machine>.json

One ``worldmodel fleet up`` with one server, all as processes of their own. Sessions are opened in turn at the front, which
redirects the robot, and at the server's own socket; each then ticks with real frames. One is opened every --pause s, since a
server accepts only a few a second from one process.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.fleet_robots import Robot
from benchmarks.result_file import provenance, write_result
from worldmodel_ros.serving.client.link import Unavailable, ask_status

START = 180.0  # s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--opens', type=int, default=80, help='of each kind (default: 80)')
    parser.add_argument('--ticks', type=int, default=5, help='of each session (default: 5)')
    parser.add_argument('--pause', type=float, default=0.3, help='s between two sessions (default: 0.3)')
    parser.add_argument('--priority', type=int, default=10, help='of the front, as of worldmodel fleet up; 0: none')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir='/dev/shm') as folder:
        front = Path(folder) / 'front.sock'
        log = open(Path(folder) / 'log', 'w')
        fleet = subprocess.Popen(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'fleet', 'up', '--servers', '1', '--socket', str(front), '--store',
             str(Path(folder) / 'store'), '--page', '-1', '--full', '1000', '--sessions', '100',
             '--realtime-priority', str(options.priority), '--', '--backend', 'onnx-int8', '--ticks', '0'],
            stdout=log, stderr=log)
        try:
            server = wait_for_server(fleet, front)
            ways = {'front': front, 'server': server}
            opened, ticked, sent_on = {way: [] for way in ways}, {way: [] for way in ways}, []
            for number in range(options.opens):
                for way, path in sorted(ways.items(), reverse=bool(number % 2)):
                    begin = time.perf_counter()
                    robot = Robot(number, path)
                    opened[way].append(time.perf_counter() - begin)
                    ticked[way] += [robot.tick().seconds for _ in range(options.ticks)][1:]  # the first warms up
                    robot.close()
                    time.sleep(options.pause)
                begin = time.perf_counter()
                ask_status(front)
                sent_on.append(time.perf_counter() - begin)
        finally:
            fleet.terminate()
            fleet.wait(60)
    rows = {f'{name}_{way}_ms': quantiles(values) for name, kinds in (('open', opened), ('tick', ticked))
            for way, values in kinds.items()}
    added = {name: round(rows[f'{name}_front_ms']['p50'] - rows[f'{name}_server_ms']['p50'], 3) for name in ('open', 'tick')}
    result = {**provenance(), 'what': 'sessions opened at the front of a fleet and at its server, in turn', 'model': 'tiny',
              'opens': options.opens, 'priority': options.priority,
              'load_average': [round(before, 2), round(os.getloadavg()[0], 2)], **rows,
              'added_p50_ms': added, 'front_status_ms': quantiles(sent_on)}
    write_result(result, options.json, show=True)
    return 0


def wait_for_server(fleet: subprocess.Popen, front: Path) -> Path:
    """Return the socket of the server, once it serves. Raises RuntimeError."""
    end = time.monotonic() + START
    while time.monotonic() < end and fleet.poll() is None:
        try:
            server, = ask_status(front)['fleet']['servers']
            if server['alive']:
                return Path(server['socket'])
        except Unavailable:
            pass
        time.sleep(0.2)
    raise RuntimeError('the fleet has not come up')


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and a high quantile, in ms."""
    return {f'p{level}': round(float(np.percentile(seconds, level)) * 1e3, 3) for level in (50, 99)}


if __name__ == '__main__':
    sys.exit(main())

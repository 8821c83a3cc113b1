"""
Kills a robot's server repeatedly: how long until another server of the fleet answers it, with its session intact?

    python benchmarks/fleet_loss.py --kills 12 --json benchmarks/results/fleet_loss_<machine>.json

Two processes of ``worldmodel serve`` with one store, and the front of a fleet. Two robots tick with real frames over the real
protocol. The server of one is killed (SIGKILL); its robot asks the front until it is answered again. Meanwhile a robot's node
drives with its own model: ``benchmarks/server_loss.py`` measures how long it is without a command.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.fleet_robots import Robot, ServerProcess
from benchmarks.result_file import provenance, write_result
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.serving.client.link import Unavailable
from worldmodel_ros.serving.fleet.front import SETTINGS, Front
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.connection import ConnectionLost

PATIENCE = 30.0  # s, after which a session counts as lost
TICK = 0.1       # s


def until_answered(robot: Robot, front: Path, began: float) -> tuple[float, float, int]:
    """Ask the front until a server answers a tick; return s to the open session and to the answer, and frames it has seen."""
    while time.monotonic() - began < PATIENCE:
        try:
            robot.connect(front)
            opened = time.monotonic() - began
            if robot.tick(due=5.0).tier is not Tier.NONE:
                return opened, time.monotonic() - began, robot.link.frames
        except (Unavailable, ConnectionLost, RuntimeError):
            robot.link = None
            time.sleep(0.02)
    raise TimeoutError(f'{robot.session} is not answered {PATIENCE:g} s after its server was killed')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--kills', type=int, default=12)
    parser.add_argument('--drive', type=float, default=2.0, help='s of ticks before each')
    parser.add_argument('--priority', type=int, default=20, help='of the servers\' threads, as of worldmodel serve; 0: none')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    result = {**provenance(), 'what': 'a server of tiny is killed: until another one answers its robot, in its own past',
              'load_average': [round(os.getloadavg()[0], 2)]}
    opened, answered, frames_after = [], [], []
    with tempfile.TemporaryDirectory(dir='/dev/shm') as folder:
        paths = [Path(folder) / f'{name}.sock' for name in 'ab']
        arguments = Path(folder) / 'store', 4, ('--backend', 'onnx'), options.priority
        servers = {path: ServerProcess(path, *arguments) for path in paths}
        listening = ListeningSocket(Path(folder) / 'front.sock')
        front = Front(listening, paths, sessions=4, settings=replace(SETTINGS, full=10.0, high=1e9))
        over = threading.Event()

        def run() -> None:
            while not over.is_set():
                front.run(0.05)
        thread = threading.Thread(target=run, daemon=True)
        try:
            for server in servers.values():
                server.wait()
            listening.listen()
            thread.start()
            front.wait_for_servers(30.0)
            robots = [Robot(seed, listening.path) for seed in range(2)]
            for kill in range(options.kills):
                end = time.monotonic() + options.drive
                while time.monotonic() < end:
                    for robot in robots:
                        robot.tick(due=5.0)
                    time.sleep(TICK / 2)
                robot = robots[kill % 2]
                claims = {claim['session']: claim['server'] for claim in front.status()['fleet']['claims']}
                here = paths[claims[robot.session]]
                began = time.monotonic()
                servers[here].stop(kill=True)
                times = until_answered(robot, listening.path, began)
                opened.append(times[0])
                answered.append(times[1])
                frames_after.append(times[2])
                for other in robots:
                    if other is not robot and claims[other.session] == claims[robot.session]:
                        until_answered(other, listening.path, began)
                here.unlink(missing_ok=True)
                servers[here] = ServerProcess(here, *arguments).wait()
                front.wait_for_servers(30.0)
                print(kill, [round(value, 3) for value in times], file=sys.stderr, flush=True)
        finally:
            over.set()
            if thread.is_alive():
                thread.join()
            front.close()
            listening.close()
            for server in servers.values():
                server.stop()
    result['load_average'].append(round(os.getloadavg()[0], 2))
    result |= {'kills': len(answered), 'began_again': sum(frames == 0 for frames in frames_after),
               'opened_s': quantiles(opened), 'answered_s': quantiles(answered),
               'answered_all_s': [round(seconds, 3) for seconds in answered]}
    write_result(result, options.json, show=True)
    return int(len(answered) < options.kills or any(frames == 0 for frames in frames_after))


def quantiles(values: list[float]) -> dict[str, float]:
    """Summarise values in s."""
    return {f'p{level}': round(float(np.percentile(values, level)), 3) for level in (50, 99, 100)}


if __name__ == '__main__':
    sys.exit(main())

"""How the simulated robot's resident memory grows: when idle, with new rooms, and with subscribers that are killed.

    python benchmarks/sim_memory.py --minutes 9 --json benchmarks/results/sim_memory_<machine>.json

Each robot is a process of its own with one subscriber, all at the same time; the first minute is warm-up. A leak keeps
growing; growth that ends was the heap's (docs/faults.md).
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))
WARM_UP = 60.0   # s
SAMPLE = 5.0     # s between two samples
ROOM = 0.5       # s between two new rooms
LIFE = 1.5       # s between two subscribers

# Prints when it receives an image, and then waits to be killed.
_SUBSCRIBER = '''
import rclpy, sys
from sensor_msgs.msg import Image
from worldmodel_ros.nodes.common import qos
rclpy.init()
node = rclpy.create_node('subscriber', namespace=sys.argv[1])
node.create_subscription(Image, 'camera/image_raw', lambda message: print(flush=True), qos.CAMERA)
rclpy.spin(node)
'''


def nothing(onlooker) -> None:
    onlooker.pass_time(ROOM)


def new_rooms(onlooker) -> None:
    from std_srvs.srv import Trigger
    onlooker.call(onlooker.reset, Trigger.Request())
    onlooker.pass_time(ROOM)


def killed_subscribers(onlooker) -> None:
    from dds import without_shared_memory
    process = subprocess.Popen([sys.executable, '-c', _SUBSCRIBER, onlooker.get_namespace()], stdout=subprocess.PIPE,
                               env=without_shared_memory())
    process.stdout.readline()
    process.kill()
    process.communicate()
    onlooker.pass_time(LIFE)


CASES = {case.__name__: case for case in (nothing, new_rooms, killed_subscribers)}


def measure(case: str, minutes: float) -> dict:
    """Return the number of actions, and the resident memory [MiB] at the end of the warm-up and of each minute after it."""
    from sim_robot_rig import robot
    with tempfile.TemporaryDirectory() as folder, robot(Path(folder), seed=7) as (process, onlooker):
        start, times, samples = time.monotonic(), 0, []
        while (now := time.monotonic() - start) < WARM_UP + 60.0 * minutes:
            if now < WARM_UP:
                nothing(onlooker)
            else:
                CASES[case](onlooker)
                times += 1
            if now >= WARM_UP + 60.0 * len(samples):
                samples.append(memory(process.pid))
            for messages in onlooker.received.values():
                messages.clear()
        samples.append(memory(process.pid))
    return {'case': case, 'times': times, 'mib': samples, 'growth_mib': round(samples[-1] - samples[0], 1),
            'growth_percent': round(100.0 * (samples[-1] / samples[0] - 1.0), 2)}


def memory(pid: int) -> float:
    """Return the resident memory of a process [MiB]. Raises RuntimeError if it has ended."""
    from faults.soak import resident
    mib = resident(pid)
    if not mib:
        raise RuntimeError('the robot has ended, and its memory was not measured')
    return round(mib, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=9.0)
    parser.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    from faults.run import own_ros
    os.environ.setdefault('FASTRTPS_DEFAULT_PROFILES_FILE', str(ROOT / 'config' / 'fastdds_commands.xml'))  # as launched
    with tempfile.TemporaryDirectory() as folder:
        if len(options.cases) == 1:
            own_ros(folder)
            rows = [measure(options.cases[0], options.minutes)]
        else:
            rows = at_the_same_time(options.cases, options.minutes, Path(folder))
    write_result({**provenance(), 'minutes': options.minutes, 'cases': rows}, options.json, show=True)
    return 0


def at_the_same_time(cases: list[str], minutes: float, folder: Path) -> list[dict]:
    """Measure each in a process and a ROS domain of its own, since participants of one domain discover each other."""
    processes = []
    for case in cases:
        processes.append(subprocess.Popen([sys.executable, __file__, '--minutes', str(minutes), '--cases', case, '--json',
                                           str(folder / case)], stdout=subprocess.DEVNULL))
        time.sleep(2.0)  # until it has its domain
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f'not measured: {", ".join(case for case, code in zip(cases, codes, strict=True) if code)}')
    return [json.loads((folder / case).read_text())['cases'][0] for case in cases]


if __name__ == '__main__':
    raise SystemExit(main())

"""Reads bags of 640x480 images at 30 Hz as the evaluation does: how fast, and in how much memory?

    python benchmarks/bag_reading.py --json benchmarks/results/bag_reading.json

Each kind of bag is written twice, short and four times as long, and each is read by a process of its own: ticks are decoded
and resized for the model, the other images are only counted. The files are in the page cache, as right after recording or
copying; the model's own time is not included.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'test'))
RATE = 30
KINDS = {'MJPEG, MCAP': ('jpeg', 'mcap', 30), 'MJPEG, SQLite': ('jpeg', 'sqlite3', 30),
         'rgb8, MCAP': ('rgb8', 'mcap', 10)}  # with the seconds of the short one
NS = 1_000_000_000


def write(path: Path, encoding: str, storage: str, seconds: float) -> None:
    """Write a bag, message by message: images of the simulated robot, played forwards and backwards."""
    os.environ.setdefault('MUJOCO_GL', 'osmesa')
    from bag_messages import ACTIONS, TYPES, image_message
    from bags import START, simulated_drive
    from rosbags.rosbag2 import StoragePlugin, Writer
    drive = simulated_drive(seconds=4.0, size=(480, 640), rate=20.0)
    pictures = [*drive.frames, *drive.frames[-2:0:-1]]
    name, kind = (('/camera/image_raw/compressed', 'sensor_msgs/msg/CompressedImage') if encoding == 'jpeg'
                  else ('/camera/image_raw', 'sensor_msgs/msg/Image'))
    action = ACTIONS['TwistStamped']
    with Writer(path, version=9, storage_plugin=StoragePlugin[storage.upper()]) as writer:
        images = writer.add_connection(name, kind, typestore=TYPES)
        commands = writer.add_connection('/cmd_vel', action.type, typestore=TYPES)
        for k in range(round(seconds * RATE)):
            at = START + k * NS // RATE
            message = image_message(pictures[k % len(pictures)], at, encoding)
            writer.write(images, at, TYPES.serialize_cdr(message, kind))
            command = action.make(drive.commands[k // 3 % len(drive.commands)][1], at)
            writer.write(commands, at, TYPES.serialize_cdr(command, action.type))


def read(path: Path) -> dict:
    """Read a bag; return how long it took [s] and this process's peak memory before and after it [MiB]."""
    from worldmodel_ros.bags.drive import read_drive
    from worldmodel_ros.bags.guess import find_mapping
    from worldmodel_ros.bags.source import open_bag
    from worldmodel_ros.model.presets import TINY
    before, start = peak(), time.perf_counter()
    with open_bag(path) as bag:
        drive = read_drive(bag, find_mapping(bag, TINY), TINY)
        ticks = sum(1 for _ in drive)
    return {'wall_s': time.perf_counter() - start, 'cpu_s': time.process_time(), 'ticks': ticks,
            'images': drive.health.images, 'peak_before_mib': before, 'peak_mib': peak()}


def peak() -> float:
    """Return the peak memory of this process [MiB]; getrusage would include its parent's."""
    (line,) = [line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM')]
    return round(int(line.split()[1]) / 1024, 1)


def measure(folder: Path, name: str) -> dict:
    encoding, storage, seconds = KINDS[name]
    rows = []
    for length in (seconds, 4 * seconds):
        bag = folder / 'bag'
        write(bag, encoding, storage, length)
        size = sum(p.stat().st_size for p in bag.iterdir())
        run = subprocess.run([sys.executable, __file__, '--read', str(bag)], capture_output=True, text=True, check=True)
        result = json.loads(run.stdout)
        rows.append({'seconds': length, 'mib': round(size / 2 ** 20, 1), **result,
                     'times_real_time': round(length / result['wall_s'], 1),
                     'mib_per_s': round(size / 2 ** 20 / result['wall_s'], 1)})
        print(name, rows[-1], file=sys.stderr, flush=True)
        for path in bag.iterdir():
            path.unlink()
        bag.rmdir()
    return {'kind': name, 'bags': rows, 'peak_grows_by_mib': round(rows[1]['peak_mib'] - rows[0]['peak_mib'], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--read', type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read)))
        return 0
    from result_file import provenance, write_result
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        kinds = [measure(Path(folder), name) for name in KINDS]
    write_result({**provenance(), 'load_average_before': round(load, 2), 'rate_hz': RATE, 'kinds': kinds}, options.json,
                 show=True)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

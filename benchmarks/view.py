"""Makes Rerun recordings of bags, as `worldmodel view` does: how fast, and in how much memory?

    worldmodel up --set forecast:=tiny task:=street & worldmodel record --out drive1      # half a minute, then Ctrl-C
    python benchmarks/view.py drive1 --json benchmarks/results/view_epyc_2_cores.json

The recording is repeated, with later times, until the bag has the requested size; each is read by a process of its own. The
files are in the page cache, as right after recording or copying.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_file import provenance, write_result
from rosbags.rosbag2 import StoragePlugin, Writer

from worldmodel_ros.bags.source import open_bag

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'test'))
MB = 10 ** 6
_NO_HASH = 'RIHS01_' + 64 * '0'  # of the types: this reader takes the definitions


def repeat(source: Path, target: Path, size: int) -> float:
    """Repeat a bag in another one until that has ``size`` bytes; return its duration in seconds."""
    with open_bag(source) as bag, Writer(target, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {name: writer.add_connection(name, topic.type, msgdef=topic.definition.data, rihs01=_NO_HASH)
                       for name, topic in bag.topics.items()}
        records = list(bag.messages())
        length = bag.end_ns - bag.start_ns + 10 ** 8
        written = rounds = 0
        while written < size:
            for topic, raw, log_ns in records:
                writer.write(connections[topic.name], log_ns + rounds * length, later(raw, rounds * length))
                written += len(raw)
            rounds += 1
    return rounds * length / 1e9


def later(raw: bytes, shift: int) -> bytes:
    """Return a message, in little-endian CDR, with its header ``shift`` ns later; one without a header is unchanged."""
    seconds, nanoseconds = (int.from_bytes(raw[at:at + 4], 'little') for at in (4, 8))
    if not 1_500_000_000 < seconds < 2_500_000_000 or nanoseconds >= 10 ** 9:
        return raw
    seconds, nanoseconds = divmod(seconds * 10 ** 9 + nanoseconds + shift, 10 ** 9)
    return raw[:4] + seconds.to_bytes(4, 'little') + nanoseconds.to_bytes(4, 'little') + raw[12:]


def convert(bag: Path, every: float) -> dict:
    """Make the recording of a bag; return its time, memory and size."""
    from worldmodel_ros.evaluate.view import write_recording
    before = peak()
    wall, core = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, open_bag(bag) as opened:
        target = Path(folder) / 'view.rrd'
        shown = write_recording(opened, target, every)
        return {'wall_s': round(time.perf_counter() - wall, 2), 'cpu_s': round(time.process_time() - core, 2),
                'peak_mib': peak(), 'peak_before_mib': before, 'messages_shown': sum(shown.values()),
                'rrd_mb': round(target.stat().st_size / MB, 1)}


def peak() -> float:
    """Return the peak memory of this process [MiB]; getrusage would include its parent's."""
    (line,) = [line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM')]
    return round(int(line.split()[1]) / 1024, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('bag', type=Path, nargs='?', help='a recording of a running world model')
    parser.add_argument('--mb', type=int, nargs='+', default=[50, 500], help='sizes of the bags that are made of it')
    parser.add_argument('--every', type=float, nargs='+', default=[0.0, 0.5], help='as of worldmodel view; 0: all messages')
    parser.add_argument('--json', type=Path, metavar='FILE')
    parser.add_argument('--convert', type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.convert:
        print(json.dumps(convert(chosen.convert, chosen.every[0])))
        return 0
    from scenarios.speed import product_seconds
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in chosen.mb:
            bag = Path(folder) / f'{size}'
            seconds = repeat(chosen.bag, bag, size * MB)
            for every in chosen.every:
                before = product_seconds()
                done = subprocess.run([sys.executable, __file__, '--convert', str(bag), '--every', str(every)],
                                      capture_output=True, text=True, check=True)
                rows.append({'mb': round(sum(each.stat().st_size for each in bag.iterdir()) / MB, 1),
                             'recorded_s': round(seconds, 1), 'every_s': every, **json.loads(done.stdout.splitlines()[-1]),
                             'product_ms': [round(each * 1e3, 2) for each in (before, product_seconds())]})
                print(rows[-1], flush=True)
    write_result({**provenance(('numpy', 'rerun-sdk', 'rosbags')), 'bags': rows}, chosen.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())

"""Round-trip cost of the engine's server: a frame goes in, a plan comes out, in another process.

    python benchmarks/transport.py --json benchmarks/results/transport.json

The server and the front end are the real ones, in two processes; only the service behind the server is one that
answers at once, so that only the transport is measured. For comparison, the same call of that service in one process.
``pictures`` is the time from the plan's arrival to that of its 4 images, which the robot does not wait for.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from result_file import command, write_result

from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.machine import machine
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.client.link import Link, Unavailable, open_link
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.server.server import Server
from worldmodel_ros.serving.service.messages import Picture, Reply, Tick
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.address import ListeningSocket

SIZES = (64, 128, 256)  # pixels, a side
WARM_UP = 50
PAUSE = 0.002  # s between two frames, so that both processes go to sleep as between two ticks


class Immediate:
    """A service that answers a tick before its call returns."""

    def __init__(self, side: int, shown: bool = True) -> None:
        self.spec = replace(TINY, name=f'{side}x{side}', image_size=(side, side))
        self._plan = np.zeros((TINY.chunk_frames, TINY.actions), np.float32)
        self._future = SimpleNamespace(
            actions=self._plan, collision_risk=np.zeros(TINY.chunk_frames, np.float32), progress={},
            frames=np.zeros((TINY.chunk_frames, side, side, 3), np.uint8))
        self._shown = shown
        self._listener = None

    def open(self, listener) -> int:
        self._listener = listener
        return 1

    def close(self, number: int) -> None:
        pass

    def tick(self, number: int, tick: Tick) -> None:
        now = time.monotonic()
        reply = Reply(number, tick.sequence, tick.stamp, tick.episode, Tier.TWO_STEP, self._plan, '', now, now)
        self._listener.replied(reply)
        if self._shown:
            self._listener.pictured(Picture(reply, self._future, 0.0))

    def stats(self) -> dict:
        return {'backend': 'none'}


def serve(path: Path, side: int) -> None:
    """Serve until killed."""
    listening = ListeningSocket(path)
    listening.listen()
    Server(Immediate(side), listening, SessionFolder(path.parent / 'sessions')).run()


def remote(link: Link, side: int, count: int) -> tuple[list[float], list[float]]:
    """Return times [s] of frames to their plans, and of the images after these."""
    frame = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    executed = np.zeros(TINY.actions, np.float32)
    round_trips, shown = [], []
    for number in range(1, count + 1):
        start = time.perf_counter()
        link.slots.write(0, number, frame)
        link.connection.send(messages.Tick(number, 0, number, 1, 'red', time.monotonic() + 1.0, True, executed))
        link.connection.receive(1.0)
        planned = time.perf_counter()
        _, descriptor = link.connection.receive(1.0)
        pictures.take(descriptor)
        round_trips.append(planned - start)
        shown.append(time.perf_counter() - planned)
        time.sleep(PAUSE)
    return round_trips[WARM_UP:], shown[WARM_UP:]


def in_process(side: int, count: int) -> list[float]:
    """Return times [s] of the same answers without a transport; the frame is copied, which is required there too."""
    frame = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    service = Immediate(side, shown=False)
    service.open(SimpleNamespace(replied=lambda reply: None))
    times = []
    for number in range(1, count + 1):
        start = time.perf_counter()
        service.tick(1, Tick(frame.copy(), np.zeros(2, np.float32), start + 1.0, number, number, 1, 'red'))
        times.append(time.perf_counter() - start)
        time.sleep(PAUSE)
    return times[WARM_UP:]


def measure(side: int, count: int) -> dict:
    """Return one row of the result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'engine.sock'
        with subprocess.Popen([sys.executable, __file__, '--serve', str(path), str(side)]) as server:
            try:
                link = _connect(path, side)
                round_trips, shown = remote(link, side, count)
                link.connection.close()
            finally:
                server.kill()
    row = {'frame': f'{side}x{side}', 'frames': len(round_trips), 'round_trip': _quantiles(round_trips),
           'in_process': _quantiles(in_process(side, count)), 'pictures': _quantiles(shown)}
    row['cost_p50_us'] = round(row['round_trip']['p50_us'] - row['in_process']['p50_us'], 1)
    return row


def _connect(path: Path, side: int) -> Link:
    end = time.monotonic() + 20.0
    while True:
        try:
            return open_link(path, 'benchmark', replace(TINY, image_size=(side, side)))
        except Unavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _quantiles(times: list[float]) -> dict[str, float]:
    return {f'p{level}_us': round(float(np.percentile(times, level)) * 1e6, 1) for level in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='file for the numbers')
    parser.add_argument('--frames', type=int, default=2000, help='of each size (default: 2000)')
    parser.add_argument('--serve', nargs=2, metavar=('PATH', 'SIDE'), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(Path(chosen.serve[0]), int(chosen.serve[1]))
        return
    rows = []
    for side in SIZES:
        rows.append(measure(side, chosen.frames + WARM_UP))
        print(json.dumps(rows[-1]), flush=True)
    write_result({'command': command(), 'machine': machine(), 'rows': rows}, chosen.json)


if __name__ == '__main__':
    main()

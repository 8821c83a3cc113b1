"""
An object store behind a link of limited MB/s: which sessions are read from it, and which are refused beforehand.

    python benchmarks/slow_store.py --json benchmarks/results/resume_slow_store_<machine>.json

Real sessions of a real model in a real object store made of files; each read waits for as long as its bytes take on the link.
The keeper of a service measures a few reads, as it does while it serves, and is then asked to open a session: it reads it, or
predicts that this would take longer than ``--within`` s, and begins the session again.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.residency import Robot
from benchmarks.result_file import provenance, write_result
from worldmodel_ros.cache.stores.objects import ObjectStore
from worldmodel_ros.engine import load
from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings
from worldmodel_ros.serving.service.service import Service, ServiceSettings

LATENCY = 0.005  # s of each read
MEASURED = 20    # reads before


class Link:
    """A ``SlabStore`` whose reads take as long as their bytes take on a link. All else is the store's."""

    def __init__(self, store: ObjectStore, rate: float) -> None:
        """``rate``: bytes a second."""
        self._store, self._rate, self._thread = store, rate, ThreadPoolExecutor(1, 'link')

    def get(self, keys) -> Promise:
        """As the store's; one read after the other."""
        return self._thread.submit(self._read, keys)

    def _read(self, keys):
        begun = time.perf_counter()
        blobs = self._store.get(keys).result()
        time.sleep(max(0.0, begun + LATENCY + sum(map(len, blobs)) / self._rate - time.perf_counter()))
        return blobs

    def __getattr__(self, name: str):
        return getattr(self._store, name)


def row(store: ObjectStore, rate: float, service: Service, engine, within: float) -> dict:
    """Return the row of one link."""
    name = f'robot{rate:g}'
    keeper = Keeper(service, engine, Link(store, rate * 1e6), '/here', KeeperSettings(period=1e9, patience=60.0, within=within))
    robot = Robot(0, keeper, engine.spec)
    robot.open(name)
    for _ in range(engine.spec.window_frames + 2):
        robot.tick(600.0)
        while len(robot.replies) < robot.sequence:
            time.sleep(0.001)
    keeper.end(robot.kept)
    slabs = keeper.store.list(f'{name}/slabs').result()
    engine.slab_index.__init__()
    for _ in range(MEASURED):
        keeper.store.get(slabs[:len(slabs) // 4]).result()
        keeper.store.get(keeper.store.list(f'{name}/manifests').result()[:1]).result()
    nbytes = sum(keeper.store.head(slabs).result())
    predicted = keeper.store.predicted(nbytes)
    begun = time.perf_counter()
    robot.open(name)
    took = time.perf_counter() - begun
    found = {'link_mb_s': rate, 'session_mb': round(nbytes / 1e6, 2), 'predicted_ms': round(predicted * 1e3, 1),
             'by_the_link_ms': round(nbytes / rate / 1e3, 1), 'read': robot.kept.frames > 0,
             'opened_in_ms': round(took * 1e3, 1)}
    keeper.end(robot.kept, store=False)
    keeper.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--rates', type=float, nargs='+', default=[1000.0, 200.0, 50.0, 20.0, 10.0, 5.0], help='MB/s')
    parser.add_argument('--within', type=float, default=0.2, help='s that reading a session may take')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    engine = load('tiny', 'onnx', sessions=3)
    service = Service(engine, settings=ServiceSettings(sessions=2, pictures=False))
    service.start()
    result = {**provenance(), 'what': 'sessions of tiny in an object store of files behind a link',
              'within_ms': options.within * 1e3,
              'latency_ms': LATENCY * 1e3, 'load_average': round(os.getloadavg()[0], 2), 'rows': []}
    with tempfile.TemporaryDirectory(dir='.') as folder:
        store = ObjectStore(Path(folder).resolve().as_uri())
        for rate in options.rates:
            result['rows'].append(row(store, rate, service, engine, options.within))
            print(result['rows'][-1], flush=True)
        store.close()
    service.stop()
    write_result(result, options.json)
    slow = [each for each in result['rows'] if not each['read'] and each['opened_in_ms'] > options.within * 1e3]
    return int(bool(slow))


if __name__ == '__main__':
    sys.exit(main())

"""
How long a decision of the fleet's router takes, with many sessions on many servers.

    python benchmarks/router.py --json benchmarks/results/router_<machine>.json

``route_new``: a session that has no server gets one; ``route_known``: one that has is told which; ``renew``: a server says that
it still runs one. CPU time of the thread, since wall-clock time (``wall``) on a busy machine includes waiting.
"""
from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.serving.fleet.router import Demand, Router, RouterSettings, fallback


def quantiles(function: Callable[[int], object], numbers: list[int], before: Callable[[int], object] = bool
              ) -> dict[str, float]:
    """Return the times of calls, in us; what is done ``before`` each does not count."""
    processor, wall = [], []
    gc.collect()
    gc.disable()
    for number in numbers:
        before(number)
        start, begun = time.thread_time_ns(), time.perf_counter_ns()
        function(number)
        wall.append(time.perf_counter_ns() - begun)
        processor.append(time.thread_time_ns() - start)
    gc.enable()
    return {'calls': len(numbers), **{
        f'{name}{level}_us': round(float(np.percentile(values, level)) / 1e3, 1)
        for name, values in (('p', processor), ('wall_p', wall)) for level in (50, 99)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--sessions', type=int, default=10_000)
    parser.add_argument('--servers', type=int, default=128)
    parser.add_argument('--calls', type=int, default=20_000)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    # All sessions fit, so that the search is measured, not a refusal.
    router = Router(rng.uniform(0.5, 2.0, options.servers), settings=RouterSettings(full=100.0, blocking=100.0))
    demands = [Demand(0.006, 0.1, phase, frozenset(rng.integers(0, options.servers, 2).tolist()), 0.02)
               for phase in rng.random(options.sessions)]
    for number, demand in enumerate(demands):
        router.route(number, demand, 0.0)
    numbers = rng.integers(0, options.sessions, options.calls).tolist()

    def route(number: int) -> None:
        router.route(number, demands[number], 0.0)

    rows = {'route_known': quantiles(route, numbers), 'renew': quantiles(lambda number: router.renew(number, 1, 0.0), numbers),
            'route_new': quantiles(route, numbers, router.release)}
    names = [f'server-{number}' for number in range(options.servers)]
    rows['fallback'] = quantiles(lambda number: fallback(str(number), names), numbers[:2000])
    result = {**provenance(), 'sessions': options.sessions, 'servers': options.servers,
              'load_average': round(os.getloadavg()[0], 2), 'rows': rows}
    write_result(result, options.json, show=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())

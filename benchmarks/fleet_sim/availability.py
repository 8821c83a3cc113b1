"""
Simulates a month of a fleet in which servers, racks, its router and its network fail: for how much of the time has each
robot a command, and from which rung of its ladder?

    python -m benchmarks.fleet_sim.availability --json benchmarks/results/fleet_availability.json

Failures and repairs are events on a virtual clock, handled by the fleet's own router; the ticks in between are not simulated.
How long a session is away, and how much of a GPU a robot takes, is measured (``--resume``, ``--server-loss``,
``--capacity``); how often things fail is assumed, and stated in the result. The rungs add up: what one
leaves open, the next one may fill.
"""
from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.result_file import provenance, write_result
from worldmodel_ros.serving.fleet.router import Demand, NoRoom, Router, RouterSettings, fallback

from .scenarios import COST, DETECTION, PERIOD, RACK

DAY = 86_400.0
RESULTS = Path(__file__).resolve().parents[1] / 'results'


@dataclass(frozen=True)
class Assumptions:
    """Mean times between failures and to repair [s], each per unit; assumed, not measured."""

    process_fails: float = 7 * DAY      # a server's process ends by itself, and is restarted
    process_back: float = 30.0
    host_fails: float = 60 * DAY        # with its GPU
    host_back: float = 4 * 3600.0
    rack_fails: float = 365 * DAY       # power, switch
    rack_back: float = 2 * 3600.0
    router_fails: float = 30 * DAY
    router_back: float = 30.0
    store_fails: float = 30 * DAY       # cannot be read: sessions begin again
    store_back: float = 300.0
    network_fails: float = DAY          # of one robot: it reaches no server
    network_back: float = 20.0
    own_fails: float = 30 * DAY         # the robot's own model ends, and is restarted
    own_back: float = 20.0


@dataclass(frozen=True)
class Measured:
    """In s. ``resume``: reading a session and its first chunk; ``takeover``: until the robot's own model drives; ``anew``:
    until a window is committed again, in real time; ``cost``: GPU time of a tick; ``full``: the share of a GPU's time
    beyond which no robot is placed."""

    resume: float
    takeover: float
    anew: float = 16 * PERIOD
    plan: float = 3 * PERIOD  # bridged by the last plan
    cost: float = COST
    full: float = RouterSettings().full


class Month:
    """The failures of a month, for a fleet of so many robots and GPUs."""

    def __init__(self, robots: int, gpus: int, assumed: Assumptions, measured: Measured, days: float, seed: int) -> None:
        self._robots, self._gpus, self._assumed, self._measured = robots, gpus, assumed, measured
        self._end = days * DAY
        self._rng = random.Random(seed)
        self._router = Router([1.0] * gpus, [gpu // RACK for gpu in range(gpus)], RouterSettings(full=measured.full))
        self._down = [0] * gpus            # unrepaired failures that affect each GPU: its own, its host's, its rack's
        self._router_down = self._store_down = False
        self._events: list[tuple[float, int, str, int]] = []
        self._order = 0
        self._away: dict[int, float] = {}  # robots without a server, since when
        self._network: dict[int, float] = {}  # robots that reach none, since when
        self._gaps: list[tuple[int, float, float]] = []    # robot, from, to: no server
        self._cold: list[tuple[int, float, float]] = []    # a server, but its session has seen too few frames
        self.counts: Counter[str] = Counter()
        self._phases = [self._rng.random() for _ in range(robots)]
        for robot in range(robots):
            self._place(robot, 0.0)
        kinds = {'process': gpus, 'host': gpus, 'rack': -(-gpus // RACK), 'router': 1, 'store': 1, 'network': robots}
        for kind, number in kinds.items():
            for which in range(number):
                self._later(0.0, kind, which)

    def run(self) -> dict:
        """Simulate the month; return the share of the robots' time with a command, rung by rung."""
        while self._events and self._events[0][0] < self._end:
            now, _, kind, which = heapq.heappop(self._events)
            if kind.endswith(' back'):
                self._repaired(kind[:-5], which, now)
            else:
                self.counts[kind] += 1
                self._push(now + self._rng.expovariate(1.0 / getattr(self._assumed, f'{kind}_back')), f'{kind} back', which)
                self._failed(kind, which, now)
        for since in (self._away, self._network):
            for robot, start in since.items():
                self._gaps.append((robot, start, self._end))
        return self._rungs()

    def _failed(self, kind: str, which: int, now: float) -> None:
        if kind == 'router':
            self._router_down = True
        elif kind == 'store':
            self._store_down = True
        elif kind == 'network':
            if which not in self._away:
                self._network[which] = now
        else:
            gpus = range(which * RACK, min(self._gpus, (which + 1) * RACK)) if kind == 'rack' else [which]
            for gpu in gpus:
                self._down[gpu] += 1
            for robot in self._router.lose([gpu for gpu in gpus if self._router.alive[gpu]]):
                if robot not in self._network:  # else it notices when it reaches a server again
                    self._away[robot] = now
                self._place(robot, now)

    def _repaired(self, kind: str, which: int, now: float) -> None:
        self._later(now, kind, which)
        if kind == 'router':
            self._router_down = False
        elif kind == 'store':
            self._store_down = False
        elif kind == 'network':
            if which in self._network:
                since = self._network.pop(which)
                if self._router.claim(which):
                    self._back(which, since, now)
                else:
                    self._away[which] = since
        else:
            gpus = range(which * RACK, min(self._gpus, (which + 1) * RACK)) if kind == 'rack' else [which]
            for gpu in gpus:
                self._down[gpu] -= 1
                if not self._down[gpu]:
                    self._router.restore(gpu)
            for robot in list(self._away):
                self._place(robot, now)

    def _place(self, robot: int, now: float) -> None:
        """Place a robot; without the router it goes where the hash says, and the server itself decides whether it has time."""
        cost = self._measured.cost
        demand = Demand(cost, PERIOD, self._phases[robot])
        if self._router_down:
            self.counts['placed without the router'] += 1
            order = fallback(str(robot), [str(gpu) for gpu in range(self._gpus) if self._router.alive[gpu]])
            demand = Demand(cost, PERIOD, self._phases[robot], frozenset({int(order[0])}), 10.0)
        try:
            self._router.route(robot, demand, now)
        except NoRoom:
            self.counts['no room'] += 1
            return
        # The simulation does not expire leases.
        self._router.renew(robot, self._router.claim(robot).generation, math.inf)
        if robot in self._away:
            self._back(robot, self._away.pop(robot), now + DETECTION)

    def _back(self, robot: int, since: float, now: float) -> None:
        if self._store_down:
            self.counts['begun again'] += 1
            self._gaps.append((robot, since, now))
            self._cold.append((robot, now, now + self._measured.anew))
        else:
            self._gaps.append((robot, since, now + self._measured.resume))

    def _rungs(self) -> dict:
        total = self._robots * self._end
        server = sum(end - start for _, start, end in self._gaps)
        cold = sum(end - start for _, start, end in self._cold)
        # The last plan bridges the start of each gap; the robot's own model drives after it, if it runs.
        plan = sum(max(0.0, end - start - self._measured.plan) for _, start, end in self._gaps)
        own_down = self._assumed.own_back / (self._assumed.own_fails + self._assumed.own_back)
        own = sum(min(end - start, max(0.0, self._measured.takeover - PERIOD))
                  + own_down * max(0.0, end - start - self._measured.takeover) for _, start, end in self._gaps)
        both = sum(own_down * max(0.0, end - start - self._measured.plan) for _, start, end in self._gaps)
        longest = max((end - start for _, start, end in self._gaps), default=0.0)
        return {'server, with the session as it was': 1 - (server + cold) / total,
                'any server': 1 - server / total,
                'or the last plan': 1 - plan / total,
                'or the own model, without the last plan': 1 - own / total,
                'or the last plan, then the own model': 1 - both / total,
                'gaps': len(self._gaps), 'longest_gap_s': round(longest, 1)}

    def _later(self, now: float, kind: str, which: int) -> None:
        self._push(now + self._rng.expovariate(1.0 / getattr(self._assumed, f'{kind}_fails')), kind, which)

    def _push(self, when: float, kind: str, which: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, which))


def capacity_of(result: dict, two_steps: float = 0.99) -> dict[str, float]:
    """
    Return ``cost`` and ``full`` from a result of ``benchmarks/capacity.py``: for the most robots that had the share
    ``two_steps`` of their ticks in two steps, and all others in time, in each of its draws.
    """
    rows = [row for row in result['rows'] if row['way'] == 'offers']
    kept = [robots for robots in {row['robots'] for row in rows} if all(
        row['two_steps'] >= two_steps and row['in_time'] == 1.0 for row in rows if row['robots'] == robots)]
    if not kept:
        raise ValueError(f'no number of robots had {two_steps:.0%} of their ticks in two steps there, and all others in '
                         'time: a fleet has no capacity by it')
    busy = max(row['busy'] for row in rows if row['robots'] == max(kept))
    return {'cost': busy / max(kept) / result['rate_hz'], 'full': max(busy, RouterSettings().full)}


def without_a_fleet(robots: int, assumed: Assumptions, days: float) -> float:
    """Return the share of the time with a server, where each robot has one of its own and waits for its repair."""
    down = sum(back / (fails + back) for fails, back in (
        (assumed.process_fails, assumed.process_back), (assumed.host_fails, assumed.host_back),
        (assumed.rack_fails, assumed.rack_back), (assumed.network_fails, assumed.network_back)))
    return 1.0 - down


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.fleet_sim.availability', description=__doc__.split('\n\n')[0])
    parser.add_argument('--robots', type=int, nargs='+', default=[800, 1000])
    parser.add_argument('--gpus', type=int, default=128)
    parser.add_argument('--days', type=float, default=30.0)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--resume', type=Path, required=True, help='result of benchmarks/resume.py')
    parser.add_argument('--server-loss', type=Path, default=RESULTS / 'server_loss_epyc_2_cores.json')
    parser.add_argument('--capacity', type=Path, default=RESULTS / 'capacity_base_h200.json')
    parser.add_argument('--two-steps', type=float, default=0.99, help='share of ticks in two steps that counts as capacity')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args(arguments)
    resume = json.loads(options.resume.read_text())['tiers']['nvme']['resume_and_first_chunk_ms']['p99'] / 1e3
    takeover = max(json.loads(options.server_loss.read_text())['pauses_ms']) / 1e3
    assumed = Assumptions()
    measured = Measured(resume, takeover, **capacity_of(json.loads(options.capacity.read_text()), options.two_steps))
    rows = []
    for robots in options.robots:
        for seed in range(options.seeds):
            start = time.perf_counter()
            month = Month(robots, options.gpus, assumed, measured, options.days, seed)
            rows.append({'robots': robots, 'gpus': options.gpus, 'days': options.days, 'seed': seed,
                         'availability': month.run(), 'events': dict(month.counts),
                         'simulated_in_s': round(time.perf_counter() - start, 1)})
            print(json.dumps(rows[-1]), flush=True)
    result = {**provenance(), 'what': 'share of the robots\' time with a command in time, by rung; an aim is 0.9999',
              'assumed_s': asdict(assumed), 'measured_s': asdict(measured),
              'one_server_without_a_fleet': without_a_fleet(0, assumed, options.days), 'rows': rows}
    write_result(result, options.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())

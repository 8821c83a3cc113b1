"""
Moves sessions between two servers while their robots drive, a thousand times, and compares every chunk after a move.

    python benchmarks/migration.py --moves 1000 --robots 4 --period 0.1 --json FILE

Two processes of ``worldmodel serve`` with one store; with ``--hosts`` each behind a gateway of its own, at two addresses of the
loopback device, over mutual TLS, and the store is the first one's. Robots tick with real frames over the real protocol. Each
has a twin in this process: a session of the same model that sees the same frames and is never moved. A robot's answers must
equal its twin's, bit for bit. On a GPU, where each process chooses its kernels by measurement, they must be equal
within ``--tolerance``, and the control is how far plans are from the twin's where no session moved. Every ``--abort``-th move
goes to a server that does not exist, and must leave the session where it is. At no time may two servers answer for one robot:
together they must have answered as many ticks as the robots have sent, and each answer must come from the server that claimed
the robot's generation in the store. ``held_parts_ms``: what robots were held for, the
source's checkpoint (capture, copy, write), then the target's takeover (read, open, fill, adopt, claim). On a GPU a slab is
copied as it is captured, and filled as it is adopted.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.fleet_robots import GOAL, Answer, FleetFiles, Host, Robot, ServerProcess
from benchmarks.result_file import provenance, write_result
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.engine import load
from worldmodel_ros.serving.fleet.move import MoveError, ask_move


TICK = 0.1  # s, of the shipped models


def quantiles(values: list[float], scale: float = 1e3) -> dict[str, float]:
    """Return the median and high quantiles, in ms, of values in s."""
    if not values:
        return {}
    array = np.asarray(values) * scale
    return {f'p{level}': round(float(np.percentile(array, level)), 2) for level in (50, 99, 100)}


class Driver(threading.Thread):
    """A robot that ticks every ``period`` s, and the outcomes of its ticks."""

    def __init__(self, number: int, server: Path, period: float, engine, stop: threading.Event,
                 files: tuple[str, str, str], tolerance: float, twins: AbstractContextManager) -> None:
        """``twins``: held while a twin computes."""
        super().__init__(daemon=True)
        self.robot = Robot(number, server, engine, files=files)
        self._period, self._over, self._tolerance, self._twins = period, stop, tolerance, twins
        self.largest: dict[str, float] = {}  # largest difference from the twin, by part of the answer
        self.answered: list[float] = []   # s, of ticks during which the session did not move
        self.moved: list[float] = []      # s, of those during which it did
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._generation = self.robot.generation
        self.answered_by: set[tuple[int, str]] = set()  # generations, and the servers that answered in them

    def run(self) -> None:
        try:
            due = time.monotonic()
            while not self._over.is_set():
                self._tick()
                due = max(due + self._period, time.monotonic())
                self.robot.idle(due - time.monotonic())
        except BaseException as error:
            self.error = error

    def _tick(self) -> None:
        robot = self.robot
        elsewhere = robot.generation != self._generation  # since the last tick
        self._generation = robot.generation
        answer = robot.tick(due=600.0, shown=elsewhere, patience=120.0)  # no tick is refused, however busy the machine
        self.counts['ticks'] += 1
        self.counts['refused'] += answer.tier is Tier.NONE
        self.answered_by.add((answer.generation, str(answer.server)))
        if answer.moves:
            self.moved.append(answer.seconds)
        elif not elsewhere:  # else it waited for the images, too
            self.answered.append(answer.seconds)
        with self._twins:
            self._compare(answer, elsewhere)

    def _compare(self, answer: Answer, elsewhere: bool) -> None:
        robot = self.robot
        if answer.tier is Tier.NONE or (not elsewhere and not answer.moves):
            robot.twin.observe(robot.image, robot.executed)
            if self._tolerance and answer.tier is not Tier.NONE:
                self._differs('plan_where_no_session_moved', robot.twin.plan(GOAL), answer.plan)
            return
        plan, risk, frames = robot.twin_answers(answer.tier)
        self.counts['first_plans'] += 1
        differs = self._differs('plan', plan, answer.plan)
        if answer.frames is not None:
            self.counts['first_chunks'] += 1
            differs |= self._differs('collision_risk', risk, answer.collision_risk)
            differs |= self._differs('images', frames / 255.0, answer.frames / 255.0)
        self.counts['differ'] += differs

    def _differs(self, what: str, twin: np.ndarray, answer: np.ndarray) -> bool:
        by = float(np.abs(twin - answer).max()) if twin.shape == answer.shape else math.inf
        self.largest[what] = max(self.largest.get(what, 0.0), by)
        return not by <= self._tolerance


def owners(store: FileStore, drivers: list[Driver], places: list[Place]) -> dict[str, int]:
    """Count the generations in the store, the sessions whose generations have a gap, and the generations in which another
    server than their owner has answered."""
    found = Counter()
    for driver in drivers:
        keys = store.list(f'{driver.robot.session}/claims').result()
        found['generations'] += len(keys)
        claimed = {int(key.rpartition('/')[2]): json.loads(bytes(blob))['owner']
                   for key, blob in zip(keys, store.get(keys).result(), strict=True)}
        found['gaps'] += list(claimed) != list(range(1, len(keys) + 1))
        found['by_others'] += sum(not any(place.is_at(claimed.get(generation, '')) and place.is_at(server) for place in places)
                                  for generation, server in driver.answered_by)
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--moves', type=int, default=1000)
    parser.add_argument('--robots', type=int, default=4)
    parser.add_argument('--period', type=float, default=0.1, help='s between the ticks of a robot')
    parser.add_argument('--seconds', type=float, default=3600.0, help='after which no further session is moved')
    parser.add_argument('--abort', type=int, default=20, help='each so many moves go to a server that is not there; 0: none')
    parser.add_argument('--priority', type=int, default=20, help='of the servers\' threads, as of worldmodel serve; 0: none')
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--random-weights', action='store_true', help='--model is the name of a preset')
    parser.add_argument('--backend', default='onnx')
    parser.add_argument('--tolerance', type=float, default=0.0, help='of an answer compared with its twin; 0: the same bits')
    parser.add_argument('--hosts', action='store_true', help='move between two hosts, over TLS')
    parser.add_argument('--store', default='', help='folder of the store (default: a new one in /dev/shm)')
    parser.add_argument('--store-memory-mb', type=float, default=0.0, help='of each server; 0: as worldmodel serve has it')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    name, stop = options.model, threading.Event()
    with tempfile.TemporaryDirectory(dir=options.store or '/dev/shm') as folder:
        if options.random_weights:
            options.model = f'{folder}/model'
            write_random(name, Path(options.model))
        engine = load(options.model, options.backend, sessions=options.robots + 1)
        hosts = two_hosts(options, Path(folder)) if options.hosts else []
        servers = [host.server for host in hosts] or [
            ServerProcess(Path(folder) / f'{name}.sock', Path(folder) / 'store', options.robots + 1, served(options),
                          options.priority) for name in 'ab']
        places = [Place(server, host.url if host else str(server.path))
                  for server, host in zip(servers, hosts or (None, None), strict=True)]
        try:
            paths = [server.wait().path for server in servers]
            files = hosts[0].files if hosts else ('', '', '')
            # CUDA graphs must be captured and launched by one thread at a time.
            twins = nullcontext() if engine.backend.name.startswith('onnx') else threading.Lock()
            drivers = [Driver(number, paths[number % 2], options.period, engine, stop, files, options.tolerance, twins)
                       for number in range(options.robots)]
            for driver in drivers:
                driver.start()
            time.sleep(2.0)
            result = play(options, places, drivers, folder)
            stop.set()
            for driver in drivers:
                driver.join(90)
            result |= judged(options, drivers, FileStore(Path(folder) / 'store', durable=False), places)
            result['servers'] = [{key: value for key, value in server.status().get('store', {}).items() if key != 'address'}
                                 for server in servers]
            result['held_ms'], result['of_that_to_store_ms'] = held(servers, 'held for '), held(servers, 'of which ')
            result['held_parts_ms'] = {'checkpoint': parts(servers, 'was held for'),
                                       'take_over': parts(servers, 'was taken over in')}
            result['held_longer_than_a_tick'] = sum(seconds > TICK for seconds in held_times(servers, 'held for '))
        finally:
            stop.set()
            for part in hosts or servers:
                part.stop()
    what = f'sessions of {name} by {options.backend}, moved between two processes of worldmodel serve while robots drive'
    if options.hosts:
        what += ', each behind its gateway: mutual TLS between two addresses of one machine'
    result = {**provenance(), 'what': what, 'load_average_before': round(load_before, 2),
              'load_average_after': round(os.getloadavg()[0], 2), **result}
    write_result(result, options.json, show=True)
    failed = result['robots_lost'] or result['chunks_that_differ'] or result['moves'] < options.moves or result['owner_gaps'] \
        or result['aborts_that_lost_the_session'] or result['answers_of_another_than_the_owner'] \
        or result['answers_of_all_servers'] != result['ticks']
    return int(bool(failed))


def write_random(preset: str, folder: Path) -> None:
    """Write a model of a preset with random weights."""
    import torch

    from worldmodel_ros.engine.backends.networks import random_model
    from worldmodel_ros.model import checkpoint
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    checkpoint.save(random_model(preset, 0, device), folder, {'trained': False})


def served(options) -> tuple[str, ...]:
    """Return the options of ``worldmodel serve`` for the model and its memory for sessions."""
    memory = ('--store-memory-mb', str(options.store_memory_mb)) if options.store_memory_mb else ()
    return '--model', options.model, '--backend', options.backend, *memory


@dataclass(frozen=True)
class Place:
    """A server, and the address at which sessions are moved there."""

    server: ServerProcess
    address: str

    def has(self, robot: Robot) -> bool:
        """Return whether the robot is connected here."""
        return self.is_at(str(robot.server))

    def is_at(self, address: str) -> bool:
        """Return whether the server is reached at an address."""
        return address in (self.address, str(self.server.path))


def two_hosts(options, folder: Path) -> list[Host]:
    """Start two servers behind gateways of their own; the first one keeps the store."""
    fleet, arguments = FleetFiles(folder), (options.robots + 1, served(options), options.priority)
    first = Host(fleet, 'a', '127.0.0.1', '', *arguments)
    return [first, Host(fleet, 'b', '127.0.0.2', first.url, *arguments)]


def play(options, places: list[Place], drivers: list[Driver], folder: str) -> dict:
    """Move the sessions in turn, until there were enough moves."""
    took, counts, reasons = [], Counter(), Counter()
    start, turn = time.monotonic(), 0
    while counts['moves'] < options.moves and not any(driver.error for driver in drivers) \
            and time.monotonic() - start < options.seconds:
        driver = drivers[turn % len(drivers)]
        turn += 1
        here, other = sorted(places, key=lambda place: not place.has(driver.robot))
        if options.abort and turn % options.abort == 0:
            try:
                ask_move(here.server.path, driver.robot.session, Path(folder) / 'absent.sock')
            except MoveError:
                counts['aborts'] += 1
                counts['aborts_that_lost_the_session'] += not here.has(driver.robot)
            continue
        began = time.monotonic()
        try:
            ask_move(here.server.path, driver.robot.session, other.address)
        except MoveError as error:
            counts['moves_refused'] += 1
            reasons[str(error)[:120]] += 1
            time.sleep(0.05)
            continue
        took.append(time.monotonic() - began)
        counts['moves'] += 1
        if counts['moves'] % 20 == 0:
            print(f'{counts["moves"]} moves in {time.monotonic() - start:.0f} s', dict(counts), file=sys.stderr, flush=True)
        end = time.monotonic() + 60.0
        while not other.has(driver.robot) and not driver.error and time.monotonic() < end:
            time.sleep(0.002)
    return {'moves': counts['moves'], 'moves_refused': counts['moves_refused'], 'reasons': dict(reasons),
            'aborts': counts['aborts'], 'aborts_that_lost_the_session': counts['aborts_that_lost_the_session'],
            'seconds': round(time.monotonic() - start, 1), 'move_ms': quantiles(took)}


def judged(options, drivers: list[Driver], store: FileStore, places: list[Place]) -> dict:
    """Summarise what the robots saw of it."""
    counts = sum((driver.counts for driver in drivers), Counter())
    plain = [seconds for driver in drivers for seconds in driver.answered]
    moved = [seconds for driver in drivers for seconds in driver.moved]
    claims = owners(store, drivers, places)
    return {'robots': len(drivers), 'period_s': options.period,
            'robots_lost': sum(driver.error is not None or driver.is_alive() for driver in drivers),
            'errors': [f'{type(driver.error).__name__}: {driver.error}' for driver in drivers if driver.error],
            'ticks': counts['ticks'], 'refused': counts['refused'],
            'first_plans_after_a_move_compared': counts['first_plans'],
            'first_chunks_after_a_move_compared': counts['first_chunks'], 'chunks_that_differ': counts['differ'],
            'largest_differences': {what: max(driver.largest.get(what, 0.0) for driver in drivers)
                                    for what in sorted({what for driver in drivers for what in driver.largest})},
            'generations_claimed': claims['generations'], 'owner_gaps': claims['gaps'],
            'answers_of_another_than_the_owner': claims['by_others'],
            'answers_of_all_servers': sum(place.server.status()['service']['ticks'] for place in places),
            'answers_later_than_a_period': {'of': [len(plain), len(moved)], 'without_and_with_a_move': [
                sum(seconds > options.period for seconds in plain), sum(seconds > options.period for seconds in moved)]},
            'answer_ms': quantiles(plain), 'ticks_that_a_move_fell_into': len(moved), 'answer_ms_of_those': quantiles(moved)}


def held(servers: list[ServerProcess], after: str) -> dict[str, float]:
    """Return for how long sessions were held: the times after these words in the servers' logs."""
    return quantiles(held_times(servers, after))


def parts(servers: list[ServerProcess], after: str) -> dict[str, dict[str, float]]:
    """Return how long each part of a hold took, from the ends of the log lines that contain these words."""
    found: dict[str, list[float]] = {}
    for server in servers:
        for line in server.log().splitlines():
            if after in line:
                for part, ms in re.findall(r'(\w+) ([\d.]+)', line.rpartition(': ')[2]):
                    found.setdefault(part, []).append(float(ms) / 1e3)
    return {part: quantiles(seconds) for part, seconds in found.items()}


def held_times(servers: list[ServerProcess], after: str) -> list[float]:
    """Return the times of all moves, in s."""
    return [float(line.split(after)[1].split()[0]) / 1e3
            for server in servers for line in server.log().splitlines() if 'its robot was held for' in line]


if __name__ == '__main__':
    sys.exit(main())

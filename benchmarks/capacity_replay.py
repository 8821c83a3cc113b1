"""The capacity of a device whose batch times were recorded, on a virtual clock: the same for each policy, and repeatable.

    python benchmarks/capacity_replay.py --record benchmarks/results/batch_times_tiny_<machine>.json
    python benchmarks/capacity_replay.py --json benchmarks/results/capacity_replay_tiny_<machine>.json

In real time no two rows of benchmarks/capacity.py meet the same load on a shared machine. Here they do: a real
``Scheduler`` plays robots with cameras against the recorded times of one model's units, run one after the other next to other
programs. ``--slower`` multiplies these times; ``--busy`` instead scales them such that two steps for every tick would keep
the device busy for that share of the time; a row's ``busy`` is the share that ticks took. Images after an answer, and frames
that were refused, are computed in idle time, as the service does. Rows are as those of capacity.py; ``promised_late`` and
``attempted_late`` are shares of what was promised and attempted.
"""
from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import math
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.engine import load
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.network_calls import Boundary, Work, run_unit
from worldmodel_ros.inputs.ticks import NS, FramePacer, FrameSettings, Pace
from worldmodel_ros.realtime import apply
from worldmodel_ros.serving.scheduler import (
    EDF_LADDER, FIFO, Admission, Completion, Kind, Outcome, Request, Scheduler, StepTable, Tier, Unit)
from worldmodel_ros.serving.scheduler.phases import PhaseAdvice

RESULTS = Path(__file__).resolve().parent / 'results'
PERIOD, LEAD, JITTER, CAMERA = 0.1, 0.035, 0.001, 30.0  # s, s, s, Hz
OBSERVE, DECODE, WHOLE = Unit('observe'), Unit('denoise', 0, 2), Unit('denoise', 0, 1)  # a decoder takes about as long
ROUTES = {Tier.TWO_STEP: (OBSERVE, Unit('denoise', 0, 2), Unit('denoise', 1, 2)), Tier.ONE_STEP: (OBSERVE, WHOLE)}
WAYS = {'fifo': (FIFO, False), 'ladder': (EDF_LADDER, False), 'offers': (EDF_LADDER, True)}


class RecordedDevice:
    """A device as fast at every moment as the recorded one was; the record repeats from its end."""

    def __init__(self, record: dict, slower: float = 1.0) -> None:
        """``record``: ``networks``, and ``batches`` as "index of its network, begin [s], duration [ms]" in order."""
        names = record['networks']
        batches = [(int(index), float(begin), float(ms)) for index, begin, ms in map(str.split, record['batches'])]
        times = {name: [ms / 1e3 for index, _, ms in batches if names[index] == name] for name in names}
        self.typical = {name: slower * float(np.median(values)) for name, values in times.items()}
        self.mean = {name: slower * float(np.mean(values)) for name, values in times.items()}
        self._begins = [begin for _, begin, _ in batches]
        self._slowness = [slower * ms / 1e3 / self.typical[names[index]] for index, _, ms in batches]
        self._length = batches[-1][1] + batches[-1][2] / 1e3

    def took(self, network: str, at: float) -> float:
        """Return how long a unit takes that begins ``at`` [s]."""
        work, now = self.typical[network], at
        while True:
            place = bisect_right(self._begins, now % self._length)
            span = (self._begins[place] if place < len(self._begins) else self._length) - now % self._length + 1e-6
            slowness = self._slowness[max(0, place - 1)]
            if work * slowness <= span:
                return now + work * slowness - at
            work -= span / slowness
            now += span


@dataclass
class _Tick:
    counted: bool
    admission: Admission
    earlier: float
    completion: Completion | None = None

    @property
    def met(self) -> bool:
        return self.completion is not None and self.completion.met


class _Fleet:
    """Robots against a scheduler, event by event."""

    def __init__(self, device: RecordedDevice, robots: int, way: str, seed: int) -> None:
        table = StepTable()
        for network, seconds in device.typical.items():
            for _ in range(20):
                table.record(network, 1, seconds, 0.0, calibrating=True)
        policy, self._follows = WAYS[way]
        self._device, self._scheduler = device, Scheduler(table, policy)
        self._advice, self._rng = PhaseAdvice(PERIOD), np.random.default_rng(seed)
        self._phases = self._rng.uniform(0.0, PERIOD, robots)
        self._pacers = [FramePacer(PERIOD) for _ in range(robots)]
        self._ticks: dict[int, _Tick] = {}
        self._now, self._number, self.offers, self.busy = 0.0, 0, 0, 0.0

    def play(self, settle: float, seconds: float) -> list[_Tick]:
        """Return the ticks of ``seconds`` s, after ``settle`` s."""
        counted, end = 1.0 + settle, 1.0 + settle + seconds
        images = [(1.0 + phase, robot, 0) for robot, phase in enumerate(self._phases)]
        heapq.heapify(images)
        batch, free = None, math.inf
        while images[0][0] < end or batch:
            wake = None if batch else self._scheduler.wake_at(self._now)
            self._now = max(self._now, min(images[0][0], free, math.inf if wake is None else wake))
            if batch and free <= self._now:
                self._scheduler.finished(batch, self._now)
                batch, free = None, math.inf
            elif images[0][0] <= self._now:
                at, robot, image = heapq.heappop(images)
                heapq.heappush(images, (1.0 + self._phases[robot] + (image + 1) / CAMERA, robot, image + 1))
                if at < end:
                    self._image(robot, at, at >= counted)
            self._settle()
            if not batch and (batch := self._scheduler.next(self._now)):
                free = self._now + sum(self._device.took(batch.network, self._now) for _ in batch.entries)
                if batch.kind is Kind.TICK and counted <= self._now < end:
                    self.busy += free - self._now
            self._settle()
        return [tick for tick in self._ticks.values() if tick.counted]

    def _image(self, robot: int, at: float, counted: bool) -> None:
        stamp = round((at + float(np.clip(self._rng.standard_normal(), -3, 3)) * JITTER) * NS)
        tolerance, pacer = FrameSettings(), self._pacers[robot]
        pace = pacer.classify(stamp, tolerance.tick_tolerance, tolerance.time_jump)
        pacer.take(stamp, pace)
        if pace not in (Pace.TICK, Pace.NEW_EPISODE):
            return
        self._number += 1
        number, scheduler, now = self._number, self._scheduler, self._now
        self._advice.ticked(robot, now, LEAD, pacer.spacing)
        earlier = self._follows and self._advice.earlier(robot, now, *scheduler.batches(ROUTES[Tier.TWO_STEP]))
        self.offers += earlier > 0.0
        admission = scheduler.submit(Request(number, robot, number, Kind.TICK, now, now + LEAD, ROUTES), now)
        scheduler.expect(robot, now + PERIOD)
        self._ticks[number] = _Tick(counted, admission, earlier)
        if not admission.admitted:
            self._answered(robot, earlier, (OBSERVE, WHOLE))

    def _settle(self) -> None:
        for completion in self._scheduler.completions():
            if completion.request.kind is Kind.TICK:
                tick = self._ticks[completion.request.id]
                tick.completion = completion
                done = completion.outcome is Outcome.DONE
                self._answered(completion.request.session, tick.earlier,
                               (DECODE,) if done else (OBSERVE, WHOLE) if not completion.done else ())

    def _answered(self, robot: int, earlier: float, idle: tuple[Unit, ...]) -> None:
        """Let a robot take up what it is offered, and queue what is left to do for idle time."""
        if earlier:
            self._pacers[robot].come_earlier(earlier)
        if idle:
            self._number += 1
            idle_work = Request(self._number, robot, 0, Kind.IDLE, self._now, math.inf, {Tier.TWO_STEP: idle})
            self._scheduler.submit(idle_work, self._now)


def play(device: RecordedDevice, robots: int, way: str, seed: int = 0, settle: float = 12.0, seconds: float = 20.0) -> dict:
    """Return shares of all ticks that were due."""
    fleet = _Fleet(device, robots, way, seed)
    ticks = fleet.play(settle, seconds)
    due, met = max(len(ticks), round(robots * seconds / PERIOD)), [tick for tick in ticks if tick.met]
    kinds = {'promised': [tick for tick in ticks if tick.admission.finish is not None and tick.admission.admitted],
             'attempted': [tick for tick in ticks if tick.admission.attempted]}
    late = {f'{kind}_late': round(sum(not tick.met for tick in some) / max(1, len(some)), 4) for kind, some in kinds.items()}
    return {'two_steps': round(sum(tick.completion.tier is Tier.TWO_STEP for tick in met) / due, 4),
            'in_time': round(len(met) / due, 4), 'attempted': round(len(kinds['attempted']) / due, 4), **late,
            'refused': round(sum(not tick.admission.admitted for tick in ticks) / due, 4), 'offers': fleet.offers,
            'busy': round(fleet.busy / seconds, 4)}


def record(seconds: float, priority: int, model: str, backend: str, random_weights: bool = False) -> dict:
    """Return times of the units of ticks, one tick every 17 ms, as a busy service has them.

    What a back end compiles or captures is done before; the first second, and the ticks until the window is full, do not
    count. Raises RuntimeError where a unit was not measured.
    """
    apply(logging.getLogger(__name__), priority)
    engine = (load_random if random_weights else load)(model, backend, sessions=2)
    engine.warm_up()
    session, spec = engine.open_session(), engine.spec
    frame = np.random.default_rng(0).integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)

    def tick():
        yield Boundary('observe')
        yield from session.observing(frame, np.zeros(spec.actions, np.float32))
        plan = yield from session.planning(spec.goals[0])
        yield from session.imagining(plan)

    networks, batches, begin, ticks = ['observe', 'denoise'], [], math.inf, 0
    since = time.monotonic()
    while (at := time.monotonic()) < begin + seconds:
        if begin == math.inf and ticks > 2 * spec.window_frames and at >= since + 1.0:
            begin = at
        ticks += 1
        work = Work(tick())
        while work.boundary:
            name, start = work.boundary.unit, time.monotonic()
            if error := run_unit([work], engine.backend)[0]:
                raise error
            engine.backend.settle()  # launches on a GPU are asynchronous
            if name in networks and start > begin:
                batches.append(f'{networks.index(name)} {start - begin:.4f} {(time.monotonic() - start) * 1e3:.2f}')
        time.sleep(max(0.001, at + 0.017 - time.monotonic()))
    for index, name in enumerate(networks):
        if not any(batch.startswith(f'{index} ') for batch in batches):
            raise RuntimeError(f'no {name} was measured in {seconds:g} s: record for longer')
    return {**provenance(), 'model': model, 'backend': engine.backend.name, 'asked_backend': backend,
            'weights': 'random' if random_weights else 'trained', 'priority': priority, 'networks': networks,
            'batches': batches}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--times', type=Path, nargs='+', help='records (default: those of benchmarks/results)',
                        default=[RESULTS / f'batch_times_tiny{way}_epyc_2_cores.json' for way in ('', '_interrupted')])
    parser.add_argument('--record', type=Path, help='write one, of this machine, and end')
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--backend', default='onnx-int8')
    parser.add_argument('--random-weights', action='store_true', help='--model is a preset\'s name')
    parser.add_argument('--priority', type=int, default=20, help='under SCHED_FIFO, of what is recorded')
    parser.add_argument('--robots', type=int, nargs='+', default=[2, 3, 4, 5, 6])
    parser.add_argument('--slower', type=float, nargs='+', default=[1.0, 1.6, 2.2])
    parser.add_argument('--busy', type=float, help='in place of --slower')
    parser.add_argument('--seeds', type=int, default=3, help='draws of phases (default: 3)')
    parser.add_argument('--seconds', type=float, default=20.0)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    if options.record:
        write_result(record(options.seconds, options.priority, options.model, options.backend, options.random_weights),
                     options.record)
        return 0
    result = {**provenance(), 'seeds': options.seeds, 'rows': []}
    for times, slower, robots in itertools.product(options.times, [0.0] if options.busy else options.slower, options.robots):
        known = json.loads(times.read_text())
        if options.busy:
            mean = RecordedDevice(known).mean
            slower = options.busy * PERIOD / robots / sum(mean[unit.network] for unit in ROUTES[Tier.TWO_STEP])
        device = RecordedDevice(known, slower)
        for way in WAYS:
            rows = [play(device, robots, way, seed, seconds=options.seconds) for seed in range(options.seeds)]
            result['rows'].append({'times': times.name, 'slower': round(slower, 3), 'robots': robots, 'way': way, **{
                name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}})
            print(result['rows'][-1], file=sys.stderr, flush=True)
            write_result(result, options.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())

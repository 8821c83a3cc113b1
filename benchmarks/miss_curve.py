"""How many robots one device serves in time: real ticks in real time, by scheduling policy, up to twice what fits.

    python benchmarks/miss_curve.py --json benchmarks/results/miss_curve_epyc_2_cores.json
    python benchmarks/miss_curve.py --preset base --random-weights --smaller small --seconds 3 --limit 235 \
        --json .../miss_curve_h100_base.json

Robots tick at the model's rate with random phases. A reply is due 50 ms after the camera's stamp, less an allowance for
what is not the service's (camera, transport, gate). The policies get the same load: fifo and edf serve everything at
its best tier, however late; edf_ladder refuses at arrival what cannot be in time, and serves the rest at a tier that
can.
The same run measures the cost of what-if branches, and batches of mixed denoising steps against batches of equal ones:
first, since they are short. Every row is written as it comes, failures are noted and do not stop the other
measurements, nothing is begun that would end after --limit, and the plot is written next to the JSON file at the end. The
generator is a light thread of the service's process; its own lateness, and for how long admission blocked it, are in every
row. The step table that was measured first is for the fleet simulation.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from miss_load import LAST_REPLIES, WARM_UP, Load, Times, film, row
from result_file import provenance, write_result

from worldmodel_ros.engine import load
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.machine import machine
from worldmodel_ros.serving.scheduler import EDF, EDF_LADDER, FIFO, Policy, StepTable
from worldmodel_ros.serving.service.service import Service, ServiceSettings

POLICIES = {'fifo': FIFO, 'edf': EDF, 'edf_ladder': EDF_LADDER}
LOADS = (0.0, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)  # of the load of two steps for every tick; one robot at least
MIXED_LOADS = (0.6, 0.8, 1.0)
BRANCHES, BRANCH_STEPS = 16, 8
EPISODES, FRAMES = 6, 60
OVERHEAD = WARM_UP + LAST_REPLIES + 0.5  # s of each level that are not measured
PARTS = ('what_if', 'mixed', 'curve')


class Bench:
    """The engines, the episodes and the result so far."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self._begun = time.monotonic()
        make = load_random if options.random_weights else load
        name = options.preset if options.random_weights else options.model
        self.engine, self.smaller = (each and make(each, options.backend, sessions=options.max_sessions + 1)
                                     for each in (name, options.smaller))
        self.drives = film(self.engine.spec.image_size, EPISODES, FRAMES)
        self.times = Times(options.budget, options.allowance)
        self.table: StepTable | None = None
        self.result = {
            **provenance(), 'model': name,
            'weights': 'random' if options.random_weights else 'trained',
            'backend': self.engine.backend.name, 'times_s': asdict(self.times), 'rate_hz': self._rate,
            'generator': 'a light thread of the same process', 'rows': [], 'what_if': {}, 'mixed_steps': [],
            'not_measured': []}

    @property
    def took(self) -> float:
        """Return the seconds so far."""
        return time.monotonic() - self._begun

    @property
    def _rate(self) -> float:
        return round(1.0 / self.engine.spec.step_period, 3)

    def service(self, policy: Policy, smaller: bool = True) -> Service:
        """``smaller``: with the tier of that name, if any. All services share one step table, kept up to date like that
        of a long-running server."""
        service = Service(self.engine, self.smaller if smaller else None,
                          ServiceSettings(policy=policy, priority=self.options.priority), table=self.table)
        service.start()
        return service

    def calibrate(self) -> None:
        """Measure the step times, once for all that follows."""
        start = time.monotonic()
        service = self.service(EDF_LADDER)
        service.stop()
        self.table = service.table
        self.result['calibration_s'] = round(time.monotonic() - start, 1)
        self.result['capacity_sessions'] = round(self.capacity(), 2)
        path = self.options.json and self.options.json.with_name(f'step_table_{self.options.json.stem}.json')
        if path:
            device = ', '.join(machine()['gpus']) or machine()['cpu']
            path.parent.mkdir(parents=True, exist_ok=True)
            self.table.save(path, machine=device, preset=self.engine.spec.name)

    def capacity(self) -> float:
        """Return how many sessions keep the device busy with two steps for every tick, in the best batches."""
        def rate(part: str) -> float:
            network = f'{self.engine.spec.name}/{part}'
            return max(size / self.table.typical(network, size) for size in range(1, self.table.largest(network) + 1))
        return self.engine.spec.step_period / (1.0 / rate('observe') + 2.0 / rate('denoise'))

    def levels(self, loads: tuple[float, ...]) -> list[int]:
        return sorted({min(max(1, round(load * self.capacity())), self.options.max_sessions) for load in loads})

    def level(self, policy: Policy, sessions: int, seed: int, seconds: float, *, smaller: bool = True,
              apart: bool = False, meanwhile: Callable[[Service, Load], Callable] | None = None) -> dict:
        """Return a row: a load on a service of its own, so that all begin alike. ``meanwhile``: see Load.run."""
        service = self.service(policy, smaller)
        try:
            robots = Load(service, self.drives, self.times, self.options.priority and self.options.priority + 1)
            robots.open(sessions, seed, apart)
            robots.run(seconds, seed, meanwhile and meanwhile(service, robots))
            return row(robots, seconds)
        finally:
            service.stop()

    def measure(self, name: str, seconds: float, measured: Callable[[], dict]) -> dict | None:
        """Return a result that takes about ``seconds``; None, with the reason noted, if there is none."""
        reason = f'would end after --limit {self.options.limit:g} s'
        if self.took + seconds <= self.options.limit:
            try:
                return measured()
            except Exception as error:  # keep measuring the others
                reason = f'{type(error).__name__}: {error}'
        print(f'{name}: {reason}', file=sys.stderr, flush=True)
        self.result['not_measured'].append({'what': name, 'reason': reason})
        self.save()
        return None

    def curve(self) -> None:
        seconds = self.options.seconds
        for sessions in self.options.sessions or self.levels(LOADS):
            for name, policy in POLICIES.items():
                measured = self.measure(f'{name}, {sessions} robots', seconds + OVERHEAD,
                                        lambda: self.level(policy, sessions, sessions, seconds))
                if measured:
                    self.result['rows'].append({'policy': name, **measured})
                    self.note(self.result['rows'][-1])

    def mixed(self) -> None:
        if self.table.largest(f'{self.engine.spec.name}/denoise') == 1:
            self.result['mixed_steps'] = 'this back end takes no batches'
            return
        seconds = self.options.seconds
        for sessions in self.levels(MIXED_LOADS):
            for mixed in (True, False):
                policy = Policy('edf', ladder=True, mixed_steps=mixed)
                measured = self.measure(f'mixed steps {mixed}, {sessions} robots', seconds + OVERHEAD,
                                        lambda: self.level(policy, sessions, 1000 + sessions, seconds, smaller=False))
                if measured:
                    self.result['mixed_steps'].append({'mixed': mixed, **measured})
                    self.note(self.result['mixed_steps'][-1])

    def what_if(self) -> None:
        """Measure ticks with and without branches asked all the time, and the time of branches while nothing else runs."""
        seconds = 2.0 * self.options.seconds
        sessions = min(max(1, round(0.4 * self.capacity())), self.options.max_sessions)
        answers, result = [], self.result['what_if']
        result |= {'branches': BRANCHES, 'steps': BRANCH_STEPS}

        def asking(service: Service, robots: Load) -> Callable[[], None]:
            state = {}

            def ask() -> None:
                if len(robots.robots[0].ticks) < 3 or ('promise' in state and not state['promise'].done()):
                    return
                if 'promise' in state:
                    answers.append(state['promise'].result().complete)
                state['promise'] = service.ask(robots.sessions[0], question(self.engine.spec, BRANCHES, 5.0))
            return ask

        def level(meanwhile: Callable[[Service, Load], Callable] | None = None) -> dict:
            return self.level(EDF_LADDER, sessions, 1, seconds, smaller=False, apart=True, meanwhile=meanwhile)
        for name, expected, measured in (('alone', 8.0, self.branches_alone), ('without', seconds + OVERHEAD, level),
                                         ('with', seconds + OVERHEAD, lambda: level(asking))):
            result[name] = self.measure(f'what_if {name}', expected, measured)
            self.note({'what_if': name, **(result[name] or {})})
        result |= {'questions_answered': len(answers), 'of_them_complete': sum(answers)}
        p99 = [result[name] and result[name]['p99_ms'] for name in ('with', 'without')]
        result['p99_ratio'] = round(p99[0] / p99[1], 3) if all(p99) else None
        self.save()

    def branches_alone(self) -> dict:
        """Return seconds of a question with one branch and with many, without ticks."""
        service = self.service(EDF_LADDER)
        try:
            robots = Load(service, self.drives, Times(budget=5.0, jitter=0.0))
            robots.open(1, seed=2)
            robots.run(0.5, seed=2)
            seconds = {}
            for count in (1, BRANCHES):
                taken = []
                for _ in range(4):
                    start = time.monotonic()
                    service.ask(robots.sessions[0], question(self.engine.spec, count, 30.0)).result(60.0)
                    taken.append(time.monotonic() - start)
                seconds[count] = float(np.median(taken))
            return {**{f'branches_{count}_s': round(value, 4) for count, value in seconds.items()},
                    'ratio': round(seconds[BRANCHES] / seconds[1], 2)}
        finally:
            service.stop()

    def note(self, measured: dict) -> None:
        """Print and save a new part of the result."""
        print(json.dumps(measured), file=sys.stderr, flush=True)
        self.save()

    def save(self) -> None:
        write_result(self.result, self.options.json)


def question(spec, branches: int, within: float) -> Question:
    rng = np.random.default_rng(branches)
    actions = rng.uniform(spec.action_low, spec.action_high, (branches, spec.actions)).astype(np.float32)
    return Question(tuple(Branch(str(index), BRANCH_STEPS, np.tile(action, (BRANCH_STEPS, 1)))
                          for index, action in enumerate(actions)), spec.goals[0], time.monotonic() + within)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--preset', default='base', help='size of the model, with --random-weights')
    parser.add_argument('--random-weights', action='store_true')
    parser.add_argument('--smaller', help='model (or preset) for the tier of that name')
    parser.add_argument('--backend', default='auto', help='default: torch-bf16 on a GPU, onnx-int8 else')
    parser.add_argument('--seconds', type=float, default=8.0, help='of each level')
    parser.add_argument('--limit', type=float, default=math.inf, help='s that all may take; what is left out is noted')
    parser.add_argument('--sessions', type=int, nargs='*', help='levels; default: from one robot to twice what fits')
    parser.add_argument('--max-sessions', type=int, default=48, help='that there is memory for')
    parser.add_argument('--budget', type=float, default=Times.budget)
    parser.add_argument('--allowance', type=float, default=Times.allowance)
    parser.add_argument('--priority', type=int, default=20, help='of the service, under SCHED_FIFO where permitted')
    parser.add_argument('--parts', nargs='*', default=PARTS, choices=PARTS)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    if options.backend == 'auto' and (options.random_weights or _on_gpu()):
        options.backend = 'torch-bf16' if _on_gpu() else 'torch'
    return options


def _on_gpu() -> bool:
    return Path('/dev/nvidiactl').exists()


def main() -> int:
    options = parsed()
    bench = Bench(options)
    bench.calibrate()
    for part in options.parts:
        bench.measure(part, 0.0, getattr(bench, part))
    bench.result['took_s'] = round(bench.took, 1)
    bench.save()
    if options.json and {row['policy'] for row in bench.result['rows']} == set(POLICIES):
        from miss_plot import plot
        plot(bench.result, options.json.with_suffix('.png'))
    print(json.dumps({key: value for key, value in bench.result.items() if key != 'rows'}, indent=1))
    return bool(bench.result['not_measured'])


if __name__ == '__main__':
    raise SystemExit(main())

"""
Drives one robot for a long time, with random faults of the matrix, and reports what became of it.

    python test/faults/soak.py --minutes 60    # to benchmarks/results/soak_<machine>.json

Faults end the model node again and again, and stop the gate and the robot's driver for a while; these two live from the
beginning to the end, and the trend of their memory is what is judged: the median of its last part against that of its
first part after the warm-up. Each life of the model node that is long enough is reported the same way. The file is
written every minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

if TYPE_CHECKING:
    from faults.matrix import Case
    from faults.systems import Running

GROWTH = 1.0          # %, of the memory of what lives through
CALM = (5.0, 25.0)    # s between two faults
SAMPLE = 5.0          # s between two looks at memory and messages
REPORT = 60.0         # s between two reports
WARM_UP = 300.0       # s at most, a fifth of the time where that is less
PART = 0.2            # of the samples after the warm-up, at each end, that are compared
ASKED = 'model asked to stop'
SAID = 0.05           # s, in which the model says why it has asked for a stop
STUCK = 10.0          # s, after which a robot that stands gets another room
ENDINGS = 0.12        # of the faults end the model node, so that it lives for some minutes in between
_TOO_LONG = ('graph_cache_bit_flip', 'bag_bit_flip', 'weights_bit_flip', 'weights_missing', 'description_cut_short')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a command was late, a fault not as expected, or memory grew too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=60.0)
    parser.add_argument('--seed', type=int, default=0, help='of the faults and their times')
    parser.add_argument('--json', type=Path, help='file for the result')
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from faults.run import own_ros, results_file
    with tempfile.TemporaryDirectory(prefix='soak_') as folder:
        own_ros(folder)  # before anything is imported that looks at it
        from scenarios.speed import measured
        measured()  # while nothing else runs
        from faults.systems import ONE_ROBOT, PLANS, Running
        from scenarios.stalls import watching
        watching()
        running = Running(PLANS[ONE_ROBOT], Path(folder) / 'robot')
        try:
            running.start()
            soak = Soak(running, options.minutes * 60.0, options.seed,
                        options.json or results_file('soak'))
            soak.run()
        finally:
            running.stop()
    return 0 if soak.succeeded() else 1


class Soak:
    """One run."""

    def __init__(self, running: Running, seconds: float, seed: int, file: Path) -> None:
        from scenarios.checks import LateCommands
        from scenarios.speed import measured
        from worldmodel_ros.machine import machine, versions
        self._running, self._rig, self._file = running, running.rig, file
        self._seconds, self._warm_up = seconds, min(WARM_UP, 0.2 * seconds)
        self._random = random.Random(seed)
        self._about = {
            'command': f'make soak ARGS="--minutes {seconds / 60.0:g} --seed {seed}"', 'machine': machine(),
            'versions': versions(), **{f'{name[:-2]}_ms': round(s * 1e3, 3) for name, s in measured()._asdict().items()},
            'seed': seed}
        self._played: dict[str, Counter[str]] = defaultdict(Counter)
        self._failures: list[str] = []
        self._missed: list[str] = []  # by less than the machine stood still meanwhile, in one piece
        self._counts: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()
        self._state: int | None = None
        self._memory: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        self._start = self._heard = time.monotonic()
        self._sampled = self._reported = -1e9
        self._moved = self._started_driving = self._start
        self._late = LateCommands(self._rig)
        self._over = False

    def run(self) -> None:
        """Drive until the time is over."""
        self._cases = self._choose()
        self._rig.drive()
        while (now := time.monotonic()) < self._start + self._seconds:
            calm = min(now + self._random.uniform(*CALM), self._start + self._seconds)
            while time.monotonic() < calm:
                self._look()
                self._keep_driving()
                time.sleep(0.2)
            if time.monotonic() < self._start + self._seconds:
                self._play(self._next())
                self._look()
        self._over = True
        self._rig.next_report('sim_robot')
        self._report()

    def succeeded(self) -> bool:
        """Whether nothing was late, all faults ended as expected, and what lived through did not grow."""
        grown = [row['growth_percent'] for row in self._lives() if row['from_beginning_to_end']]
        return not self._failures and not self._late.late and all(g is not None and g < GROWTH for g in grown)

    def _choose(self) -> dict[bool, list[Case]]:
        """Return the faults that do not end the model node, and those that do. None ends the gate or the driver."""
        from faults.catalogue import CASES
        from faults.systems import MODEL, ONE_ROBOT
        usable = [row for row in CASES if row.system == ONE_ROBOT and row.name not in _TOO_LONG and not row.needs()]
        return {False: [row for row in usable if not row.ends], True: [row for row in usable if row.ends == (f'/{MODEL}',)]}

    def _next(self) -> Case:
        return self._random.choice(self._cases[self._random.random() < ENDINGS])

    def _play(self, row: Case) -> None:
        from faults.matrix import play
        from scenarios.stalls import watching
        result = play(row, self._running)
        at = f'{(time.monotonic() - self._start) / 60.0:.1f} min'
        failures = [f'{at}: {row.name}: {failure}' for failure in result.failures]
        if (miss := result.missed) and watching().longest(miss.start, miss.end) > miss.by:
            self._played[row.name]['slower than its bound, in a stall of the machine'] += 1
            self._missed += failures
        else:
            self._played[row.name]['as expected' if not failures else 'not as expected'] += 1
            self._failures += failures
        print(f'{at}: {row.name}: {result.outcome} {"; ".join(result.failures)}', flush=True)

    def _keep_driving(self) -> None:
        """Go to another room where the goal is reached, or nothing has moved the robot for a while."""
        from scenarios.rig import stands
        from worldmodel_ros.sim.scene import GOAL_DISTANCE
        now = time.monotonic()
        newest = self._rig.observer.newest('cmd_vel')
        if newest is not None and not stands(newest.message):
            self._moved = max(self._moved, newest.at)
        reached = self._rig.distance_to('red') < GOAL_DISTANCE
        if reached or now - max(self._moved, self._started_driving) > STUCK:
            self._counts['goals' if reached else 'stuck'] += 1
            self._drive()

    def _drive(self) -> None:
        try:
            self._rig.drive()
        except AssertionError as error:
            self._failures.append(f'{(time.monotonic() - self._start) / 60.0:.1f} min: not driven: {error}')
        self._started_driving = time.monotonic()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._sampled >= SAMPLE:
            self._sampled = now
            self._listen(now)
            for name, pid in self._running.pids().items():
                if pid is not None:
                    self._memory[name][pid].append((now - self._start, resident(pid)))
        if now - self._reported >= REPORT:
            self._reported = now
            self._report()

    def _listen(self, now: float) -> None:
        """Count what has arrived since the last time; what may still be on its way is left for the next."""
        from scenarios.rig import answers
        from worldmodel_ros.msg import ActionChunk, CommandStatus
        until = now - 0.5

        def new(topic: str) -> list:
            return [r.message for r in self._rig.observer.since(topic, self._heard) if r.at <= until]
        ticks = [r for r in self._rig.observer.since('deadline_status', self._heard) if r.at <= until]
        self._counts['ticks'] += len(ticks)
        commands = new('cmd_vel')
        self._counts['commands'] += sum(map(answers, commands))
        self._counts['images'] += len(new('camera/image_raw'))
        self._counts['predictions'] += len(new('predicted_future'))
        for at, status in self._rig.observer.since('command_status', self._heard):
            if at > until:
                break
            if status.state == CommandStatus.STOPPED and self._state not in (None, CommandStatus.STOPPED):
                cause = status.reason
                if cause.startswith(ASKED):  # then the model has said why
                    said = [r.message.reason for r in ticks if r.at <= at + SAID and r.message.tier == ActionChunk.TIER_STOP]
                    cause = f'{ASKED}: {said[-1] if said else "by a node that said no more"}'
                self._stops[re.sub(r'[-+]?\d+(\.\d+)?', 'N', cause)] += 1
            self._state = status.state
        self._heard = until

    def _lives(self) -> list[dict[str, Any]]:
        """Return the memory of each process over its life, with the trend where that is long enough."""
        rows = []
        elapsed = time.monotonic() - self._start
        for name, lives in self._memory.items():
            for samples in lives.values():
                warm = [mib for at, mib in samples if at >= samples[0][0] + self._warm_up]
                part = max(1, round(PART * len(warm)))
                growth = None
                if len(warm) >= 5:
                    first, last = statistics.median(warm[:part]), statistics.median(warm[-part:])
                    growth = round(100.0 * (last - first) / first, 2)
                whole = samples[0][0] < 2 * SAMPLE and samples[-1][0] > elapsed - 60.0 and len(lives) == 1
                row = {'node': name, 'from_s': round(samples[0][0]), 'to_s': round(samples[-1][0]),
                       'from_beginning_to_end': whole, 'first_mib': round(samples[0][1], 1),
                       'warm_mib': round(statistics.median(warm[:part]), 1) if warm else None,
                       'last_mib': round(samples[-1][1], 1), 'growth_percent': growth}
                rows.append(row | ({'by_tenths_mib': by_tenths([mib for _, mib in samples])} if whole else {}))
        return rows

    def _report(self) -> None:
        self._late.read()
        elapsed = time.monotonic() - self._start
        result = self._about | {
            'complete': self._over, 'seconds': round(elapsed), 'rate_hz': round(self._counts['ticks'] / elapsed, 2),
            **{key: self._counts[key] for key in ('ticks', 'commands', 'images', 'predictions', 'goals', 'stuck')},
            'late': self._late.late, 'late_in_stalls': self._late.in_stalls, 'late_after_ms': self._late.ages_ms,
            'stops': dict(self._stops.most_common()),
            'faults': {name: dict(self._played[name]) for name in sorted(self._played)},
            'faults_played': sum(sum(counts.values()) for counts in self._played.values()), 'failures': self._failures,
            'missed_in_stalls': self._missed,
            'restarts': {name: len(lives) - 1 for name, lives in self._memory.items()},
            'memory_warm_up_s': self._warm_up, 'memory': self._lives()}
        text = json.dumps(result, indent=1)
        part = self._file.with_suffix('.part')
        part.write_text(text + '\n')
        os.replace(part, self._file)
        if self._over:
            print(text)


def by_tenths(samples: Sequence[float]) -> list[float]:
    """Return the median of each tenth of the samples, which tells a leak, that goes on, from what comes to an end."""
    edges = [round(k * len(samples) / 10) for k in range(11)]
    return [round(statistics.median(samples[a:b]), 1) for a, b in pairwise(edges) if a < b]


def resident(pid: int) -> float:
    """Resident memory of a process [MiB], 0.0 where it has just ended."""
    try:
        pages = int(Path(f'/proc/{pid}/statm').read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


if __name__ == '__main__':
    raise SystemExit(main())

"""
More sessions than a device has pages for: robots that tick rarely, or in bursts, whose sessions come and go.

    python benchmarks/residency.py --robots 20 --places 4 --seconds 40 --json benchmarks/results/residency_tiny_<machine>.json

One service of a real model with pages for ``--places`` sessions, and as many robots as are asked for, with real frames; the
store holds real pages. Two ways of ticking: ``seldom``, each robot every ``--period`` s, at a phase of its own and 1 %
to and fro; and ``bursts``, each robot at the model's full rate for a second, then quiet for long enough to give the same
average rate, begun without notice. Each tick is due ``--due`` s after its frame.

Every ``--twin``-th robot's plans are compared with those of a twin that never left. A plan's last bits depend on the kernels
and on the batch that it was computed in. So a twin is a session of the same engine, opened when the robots are done, and takes
in the same frames as the robot's session, in batches of the same size. Plans of sessions that have not left yet are
counted separately: only comparisons after a session came back test the store. The control is a second twin,
always alone: how far plans differ because of the batches only.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.result_file import product_ms, provenance, write_result
from worldmodel_ros import realtime
from worldmodel_ros.cache.stores.files import FileStore
from worldmodel_ros.cache.stores.host import HostStore, PinnedMemory
from worldmodel_ros.cache.stores.objects import ObjectStore
from worldmodel_ros.cache.stores.protocol import Blob, SlabStore
from worldmodel_ros.engine import load
from worldmodel_ros.engine.backends.protocol import Backend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.engine.network_calls import Boundary, Calls, Work, run_unit
from worldmodel_ros.engine.session import Session
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.messages import Picture, Reply, Tick
from worldmodel_ros.serving.service.service import LOG, Service, ServiceSettings

BURST = 1.0  # s
COUNTED = ('found_here', 'found_away', 'left', 'came', 'busy', 'refused', 'failed')


class SlowedStore:
    """A ``SlabStore`` with slower reads and writes of sessions. All else is the store's."""

    def __init__(self, store: SlabStore, reading: float, writing: float) -> None:
        """``reading``, ``writing``: s added in the calling thread, which waits for the store in any case."""
        self._store, self._reading, self._writing = store, reading, writing

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        """As the store's."""
        time.sleep(self._reading)
        return self._store.get(keys)

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        """As the store's; manifests and claims, which follow slow writes, are not delayed."""
        if any('/states/' in key for key, _ in items):
            time.sleep(self._writing)
        return self._store.put(items, create)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Robot:
    """A listener, the frames it sent and the replies."""

    def __init__(self, number: int, keeper: Keeper, spec: Preset) -> None:
        self._rng, self._keeper, self._spec = np.random.default_rng(number), keeper, spec
        self.replies: list[tuple[Reply, float, float]] = []  # with when it was sent and due
        self.sent: dict[int, tuple[float, float, np.ndarray, np.ndarray]] = {}
        self.sequence, self.replies_before, self.kept = 0, 0, None

    def open(self, name: str) -> None:
        """Open the robot's session."""
        self.kept = self._keeper.open(self, name, name)

    def tick(self, due: float) -> None:
        """Send a frame."""
        self.sequence += 1
        image = self._rng.integers(0, 256, (*self._spec.image_size, 3), dtype=np.uint8)
        executed = self._rng.uniform(-0.2, 0.5, self._spec.actions).astype(np.float32)
        now = time.monotonic()
        self.sent[self.sequence] = now, now + due, image, executed
        self._keeper.tick(self.kept, Tick(image, executed, now + due, self.sequence, self.sequence, 1, self._spec.goals[0]))

    def replied(self, reply: Reply) -> None:
        """Note an answer."""
        sent, due, *_ = self.sent[reply.sequence]
        self.replies.append((reply, sent, due))
        self._keeper.ticked(self.kept)

    def pictured(self, picture: Picture) -> None:
        """Ignore images, which are not requested."""

    def failed(self, reason: str, error: Exception) -> None:
        """End the run: no answer is expected any more."""
        raise error


@dataclass(frozen=True)
class Seen:
    """A frame as a session took it in: after which encoder state (None: it was its first), and in which row of a batch of
    which size."""

    executed: np.ndarray
    before: Any
    after: Any
    row: int
    batch: int


class Recorder:
    """Records the frames that a back end's sessions take in, while it is open."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._run = backend, backend.run
        self._encoded: list[tuple[int, Any, Any]] = []
        self.seen: dict[int, Seen] = {}  # by the identity of the image
        backend.run = self._record

    def close(self) -> None:
        """Restore the back end."""
        del self._backend.run

    def _record(self, network: str, batch: Sequence[tuple]) -> list:
        outputs = self._run(network, batch)
        if network == 'encode':
            self._encoded = [(id(frame), before, after) for (frame, before), (_, after) in zip(batch, outputs)]
        elif network == 'commit':  # of the same sessions, in this order; or of imagined frames: nothing was encoded
            for row, ((image, before, after), (_, actions, *_)) in enumerate(zip(self._encoded, batch)):
                self.seen[image] = Seen(actions[0], before, after, row, len(batch))
            self._encoded = []
        return outputs


class Difference:
    """Differences of plans that should be equal."""

    def __init__(self) -> None:
        self.plans = self.differ = 0
        self.largest = 0.0

    def add(self, plan: np.ndarray, other: np.ndarray) -> None:
        """Add two plans (chunk_frames, A)."""
        self.plans += 1
        self.differ += not np.array_equal(plan, other)
        self.largest = max(self.largest, float(np.abs(plan - other).max()))

    def to_dict(self) -> dict[str, float]:
        """Return JSON values; the largest difference in SI units."""
        return {'plans': self.plans, 'differ': self.differ, 'largest_difference': self.largest}


class Comparison:
    """Compares robots' plans with those of twins that never left."""

    def __init__(self, engine: Engine, seen: dict[int, Seen]) -> None:
        """``engine``: that of the robots' sessions, all closed by now; ``seen``: as of ``Recorder``."""
        self._engine, self._seen = engine, seen
        self._before, self._after, self._control = Difference(), Difference(), Difference()
        self._largest_plan, self._shared, self._begun_again = 0.0, 0, 0

    def add(self, robot: Robot) -> None:
        """Compare all plans of a robot. Frames without an answer are taken in as well, if its session saw them."""
        plans = {reply.sequence: reply.plan for reply, _, _ in robot.replies}
        frames = [(plans.get(sequence), image, self._seen[id(image)]) for sequence, (_, _, image, _) in robot.sent.items()
                  if id(image) in self._seen]
        most = max((seen.batch for _, _, seen in frames), default=1)
        # The first is the twin, the others fill its batches; the last is always alone.
        sessions = [self._engine.open_session() for _ in range(most + 1)]
        came, last = False, None
        for plan, image, seen in frames:
            if seen.before is None:
                self._begun_again += last is not None
                came = False
                for session in sessions:
                    session.reset()
            else:  # what comes from a store is not the object that the networks returned
                came = came or seen.before is not last.after
            last = seen
            filling = sessions[1:seen.batch]
            inputs = image, seen.executed
            batch = [*filling[:seen.row], sessions[0], *filling[seen.row:]]
            twin = plans_of_a_batch(self._engine, [(session, *inputs) for session in batch])[seen.row]
            for session in sessions[seen.batch:-1]:  # kept at the same age: a partial window is another case
                plans_of_a_batch(self._engine, [(session, *inputs)])
            alone, = plans_of_a_batch(self._engine, [(sessions[-1], *inputs)])
            self._control.add(twin, alone)
            if plan is not None:
                (self._after if came else self._before).add(plan, twin)
                self._shared += seen.batch > 1
                self._largest_plan = max(self._largest_plan, float(np.abs(plan).max()))
        for session in sessions:
            session.close()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {'before_it_left': self._before.to_dict(), 'after_it_came_back': self._after.to_dict(),
                'control_two_twins_in_other_batches': self._control.to_dict(), 'largest_in_a_plan': self._largest_plan,
                'plans_from_batches_of_several': self._shared, 'sessions_begun_again': self._begun_again}

    @property
    def wrong(self) -> bool:
        """Whether a session that came back differs from one that never left, or none was compared. Equal to the bit, or,
        where batches of several were run, within the control's difference: sessions of other ages in one batch also change
        bits, and are not reproduced here."""
        return not self._after.plans or self._after.largest > self._control.largest


def plans_of_a_batch(engine: Engine, inputs: Sequence[tuple[Session, np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return plans (chunk_frames, A) of sessions that take in a frame and an action each, in one batch, as in a service."""
    def calls(session: Session, image: np.ndarray, executed: np.ndarray) -> Calls[np.ndarray]:
        yield Boundary('observe')
        yield from session.observing(image, executed)
        return (yield from session.planning(engine.spec.goals[0]))
    works = [Work(calls(*each)) for each in inputs]
    for error in run_unit(works, engine.backend):
        if error:
            raise error
    return [work.result for work in works]


def compare_at_the_end(engine: Engine, service: Service, keeper: Keeper, recorder: Recorder, robots: Sequence[Robot],
                       every: int = 1) -> Comparison:
    """End the sessions of all robots and what serves them, and compare every ``every``-th robot with a twin."""
    for robot in robots:
        keeper.end(robot.kept, store=False)
    keeper.close()
    service.stop()
    recorder.close()
    comparison = Comparison(engine, recorder.seen)
    for robot in robots[::every]:
        comparison.add(robot)
    return comparison


def times_of(kind: str, robots: int, period: float, step: float, seconds: float, rng: np.random.Generator
             ) -> list[tuple[float, int]]:
    """Return when each robot ticks, in order [s from the start]."""
    found = []
    for robot in range(robots):
        if kind == 'seldom':
            at = rng.uniform(0.0, period)
            while at < seconds:
                found.append((at, robot))
                at += period * rng.uniform(0.99, 1.01)
        else:
            cycle = BURST * period / step  # the same average rate as above
            at = rng.uniform(0.0, cycle)
            while at < seconds:
                found += [(at + index * step, robot) for index in range(round(BURST / step))]
                at += cycle * rng.uniform(0.8, 1.2)
    return sorted(found)


def play(kind: str, store: SlabStore, options: argparse.Namespace) -> dict:
    """Run one way of ticking, with one store."""
    make = load_random if options.random_weights else load
    engine = make(options.model, options.backend, sessions=options.places + 1)
    spec = engine.spec
    service = Service(engine, settings=ServiceSettings(sessions=options.robots, pictures=False, priority=options.priority))
    service.start()
    recorder = Recorder(engine.backend)
    keeper = Keeper(service, engine, store, '/here', KeeperSettings(period=1e9, patience=10.0, places=options.places))
    robots = [Robot(number, keeper, spec) for number in range(options.robots)]
    for number, robot in enumerate(robots):
        robot.open(f'{kind}-robot{number}')
        for _ in range(options.warm_up):
            robot.tick(600.0)
            end = time.monotonic() + 30.0
            while len(robot.replies) < robot.sequence and time.monotonic() < end:
                time.sleep(0.001)
    for robot in robots:
        robot.replies_before = len(robot.replies)
    rng = np.random.default_rng(options.seed)
    plan = times_of(kind, options.robots, options.period, spec.step_period, options.seconds, rng)
    before = keeper.residency.status()
    most, start = 0, time.monotonic()
    allocator = engine.memory.pool.allocator
    for at, number in plan:
        time.sleep(max(0.0, start + at - time.monotonic()))
        robots[number].tick(options.due)
        most = max(most, keeper.residency.status()['here'])
    time.sleep(1.0)
    seconds = time.monotonic() - start - 1.0
    status, usage = keeper.residency.status(), allocator.usage()
    result = judged(robots, seconds)
    result |= {'sessions': options.robots, 'places': options.places, 'most_here_at_a_time': most,
               'pages_of_the_device': usage.pages,
               'residency': {key: value - before.get(key, 0) if key in COUNTED else value for key, value in status.items()}}
    comparison = compare_at_the_end(engine, service, keeper, recorder, robots, options.twin)
    result['compared_with_twins_that_never_left'] = {**comparison.to_dict(), 'wrong': comparison.wrong}
    return result


def judged(robots: list[Robot], seconds: float) -> dict:
    """Summarise what the robots saw of it."""
    counts, reasons, took, late = Counter(), Counter(), [], []
    for robot in robots:
        replies = robot.replies[robot.replies_before:]
        counts['offered'] += robot.sequence - robot.replies_before
        for reply, sent, due in replies:
            answered = reply.tier is not Tier.NONE
            counts['answered'] += answered
            counts['two_steps'] += reply.tier is Tier.TWO_STEP and reply.finish <= due
            counts['late'] += answered and reply.finish > due
            counts['refused'] += not answered
            counts['refused_as_their_session_was_away'] += not answered and 'its session' in reply.reason
            reasons[f'{reply.tier.name}: {reply.reason}'] += bool(reply.reason)
            if answered:
                took.append(reply.finish - sent)
            if answered and reply.finish > due:
                late.append({'answer_ms': round((reply.finish - sent) * 1e3, 1), 'queue_ms': round(reply.queue * 1e3, 1),
                             **{f'{part}_ms': round(spent * 1e3, 1) for part, spent in reply.timings.items()},
                             'tier': reply.tier.name, 'reason': reply.reason})
    offered = counts['offered']
    return {'seconds': round(seconds, 1), 'ticks_a_second': round(offered / seconds, 2),
            **{name: int(counts[name]) for name in ('offered', 'answered', 'two_steps', 'late', 'refused',
                                                    'refused_as_their_session_was_away')},
            'reasons': dict(reasons.most_common(4)), 'late_ticks': late,
            'share_in_two_steps': round(counts['two_steps'] / offered, 4),
            'answer_ms': {f'p{level}': round(float(np.percentile(took, level)) * 1e3, 2) if took else None
                          for level in (50, 99, 100)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--backend', default='onnx')
    parser.add_argument('--random-weights', action='store_true', help='--model is the name of a preset')
    parser.add_argument('--robots', type=int, default=20)
    parser.add_argument('--places', type=int, default=4, help='sessions that have pages at a time')
    parser.add_argument('--period', type=float, default=2.0, help='s between the ticks of a robot that ticks seldom')
    parser.add_argument('--due', type=float, default=0.05, help='s from a frame to when its answer is due')
    parser.add_argument('--seconds', type=float, default=40.0, help='of each kind with each store')
    parser.add_argument('--warm-up', type=int, default=4, help='ticks of each robot before. Its window is full after as many '
                        'as that has frames; it is answered in two steps once some answers were in time')
    parser.add_argument('--twin', type=int, default=5, help='each so many robots have a twin')
    parser.add_argument('--kinds', nargs='+', default=['seldom', 'bursts'], choices=['seldom', 'bursts'])
    parser.add_argument('--stores', nargs='+', default=['host', 'nvme', 'objects'],
                        choices=['host', 'pinned', 'nvme', 'objects'])
    parser.add_argument('--pinned-gib', type=float, default=12.0, help='GiB that are page-locked for the store pinned')
    parser.add_argument('--priority', type=int, default=20, help='of the threads, under SCHED_FIFO; 0: none')
    parser.add_argument('--disk', default='.', help='folder on the disk (default: here)')
    parser.add_argument('--slower-s', type=float, nargs=2, metavar=('READ', 'WRITE'),
                        help='add so many s to each reading and writing of a session, as of a larger one')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--add', action='store_true', help='keep the rows that are in that file')
    options = parser.parse_args()
    result = {**provenance(), 'what': f'{options.robots} sessions of {options.model}, with pages for {options.places}',
              'due_ms': options.due * 1e3, 'product_ms': round(product_ms(), 2),
              'rows': json.loads(options.json.read_text())['rows'] if options.add else []}
    realtime.apply(LOG, options.priority, all_threads=True)  # as in worldmodel serve: later threads inherit it
    with tempfile.TemporaryDirectory(dir=options.disk) as disk:
        disk = Path(disk).resolve()
        (disk / 'bucket').mkdir()
        memory = PinnedMemory(int(options.pinned_gib * 2**30) if 'pinned' in options.stores else 0)
        stores = {'host': HostStore, 'pinned': lambda: HostStore(memory), 'nvme': lambda: FileStore(disk / 'nvme'),
                  'objects': lambda: ObjectStore((disk / 'bucket').as_uri())}
        for name in options.stores:
            for kind in options.kinds:
                store = stores[name]()
                if options.slower_s:
                    store = SlowedStore(store, *options.slower_s)
                load_before = round(os.getloadavg()[0], 2)
                row = {'ticks': kind, 'store': name, 'slower_s': options.slower_s, 'warm_up_ticks': options.warm_up,
                       **play(kind, store, options), 'load_average': [load_before, round(os.getloadavg()[0], 2)]}
                store.close()
                result['rows'].append(row)
                print(row, flush=True)
                write_result(result, options.json)
    return int(any(row['late'] or row.get('compared_with_twins_that_never_left', {}).get('wrong') for row in result['rows']))


if __name__ == '__main__':
    sys.exit(main())

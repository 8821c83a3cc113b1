"""
How fast this machine is, asked before anything starts, and the budget that what wants predictions in time gets for it.

A tick of the shipped model takes 21 to 25 ms on two cores of an AMD EPYC, and the configured deadline leaves it 35. Where
it takes longer, the scenarios in ``catalogue.SCALED`` run with a longer deadline, and if need be with slower cameras, so
that their logic is tested on every machine. All else runs as configured, and no bound for safety goes with the speed. The
measurement is made again before each system of processes, since a shared host has other hours; next to a simulator the node's
own times say more.

    python test/scenarios/speed.py       # prints {"tick_s": ..., "product_s": ...}
"""

import functools
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

VARIABLE = 'WORLDMODEL_TEST_SPEED'  # what was measured before, for the processes of one run of the tests
TICKS = 40  # that are timed
PRIORITY = 20  # of a model node's ticks (config/world_model_node.yaml)
USUAL_TICK = 0.025  # s, up to which everything runs as configured
# s, of a product of float32 matrices of 384 rows and columns by one thread, on the same machine. It is none of this
# package's work: it tells a slow machine from an engine that has become slow.
USUAL_PRODUCT = 0.00108
QUESTION_TIME = 4.0  # s, for a what-if question where a tick takes no longer
DEADLINE = 0.020  # s, besides the model's part: reserve_s, headroom_s, and what ROS takes
STRETCH = 1.5  # of a tick, next to a simulator that wants the same cores
REST = 0.25  # of what has just been timed, before the next: Linux stops a core's real-time threads, whosever, that never rest
OWN = 2.0  # times a tick alone, which a tick next to a simulator may take, with the processor's other thread busy
SLOWER = 1.25  # times as long: a machine that has become slower
WORK = 1.6  # ticks for each image, with decoding and the simulator
WORK_OF_QUESTIONS = 2.0  # ticks between two images, which is what a usual machine leaves over; they are answered in that


class Speed(NamedTuple):
    """Medians [s] of a tick of two steps, and of a product of matrices; and the share of the cores that other programs took
    before that, NaN where that was not measured. As the nodes do, both go before other programs, so that their times alone say
    nothing of a busy machine."""

    tick_s: float
    product_s: float
    busy: float = 0.0

    def __str__(self) -> str:
        busy = '' if math.isnan(self.busy) else f', and other programs take {self.busy:.0%} of the cores'
        return (f'a tick of the shipped model takes {self.tick_s * 1e3:.1f} ms, a product of 384x384 float32 matrices by '
                f'one thread {self.product_s * 1e3:.2f} ms{busy}')


class Budget(NamedTuple):
    """What a robot has for a command, and between two images [s], where a ``tick`` takes so long; the defaults are
    config/'s."""

    deadline: float = 0.05
    period: float = 0.1
    tick: float = USUAL_TICK


@functools.cache
def measured() -> Speed:
    """Return this machine's speed, measured at the first call of a run: no node should run then."""
    if VARIABLE not in os.environ:
        _measure(busy_share())
    return Speed(**json.loads(os.environ[VARIABLE]))


def measure_again(others: bool = True) -> Speed:
    """Measure this machine's speed again, while no node runs, and have all of this run go by that; ``others``: what other
    programs take, too, for which a second is waited."""
    _measure(busy_share() if others else math.nan)
    measured.cache_clear()
    return measured()


def _measure(busy: float) -> None:
    with as_the_nodes_run():
        speed = Speed(tick_seconds(), product_seconds(), busy)
    os.environ[VARIABLE] = json.dumps(speed._asdict())  # for the processes that this one starts


@contextmanager
def as_the_nodes_run() -> Iterator[None]:
    """Under SCHED_FIFO where that is permitted, as the threads that are measured for: other programs matter as little."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:
        pass
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def question_time(tick: float, robots: int = 1) -> int:
    """
    Return what a what-if question of a few branches is given [s]: it is answered in what ticks of so long [s] leave over.

    Between the ticks of two ``robots`` that share an engine is a gap of half a period less a tick, which not every unit fits
    into. On two cores of an AMD EPYC whose ticks took 21 to 26 ms, nine of twelve were answered in 1.5 to 5.5 s, and three ran
    into deadlines of 4 to 5 s.
    """
    return math.ceil(QUESTION_TIME * (3.0 if robots > 1 else 1.0) * max(1.0, tick / USUAL_TICK) ** 3)


def budget(robots: int = 1, questions: bool = False, own: float = 0.0) -> Budget:
    """
    Return what robots that share this machine are given to get predictions in time, and answers to what-if ``questions``.

    ``own``: the longest tick that their nodes expect of themselves [s], with all that runs next to them. What is longer than
    OWN ticks of a machine that has nothing else to do is no slow machine, and not believed.
    """
    alone = measured().tick_s
    return budget_for(max(alone, min(own / STRETCH, OWN * alone)), robots, questions)


def budget_for(tick: float, robots: int, questions: bool = False) -> Budget:
    """Return the budget where a tick takes so long [s]. Never tighter than as configured."""
    usual, deadline = Budget(), Budget().deadline
    if tick > USUAL_TICK:
        # Robots whose ticks take turns on one engine, or on one core, wait for each other's.
        deadline = max(deadline, DEADLINE + robots * STRETCH * tick)
    # Two robots leave nothing over for questions before a tick takes as long as that.
    work = robots * WORK + (WORK_OF_QUESTIONS if questions else 0.0)
    return Budget(deadline, max(usual.period, work * tick, deadline), max(usual.tick, tick))


def tick_seconds() -> float:
    """Return the median of ticks of two steps [s]."""
    import numpy as np

    engine = _engine()
    session, frame = engine.open_session(), np.zeros((*engine.spec.image_size, 3), np.uint8)
    took = []
    for _ in range(engine.spec.window_frames + TICKS):
        start = time.perf_counter()
        session.observe(frame, np.zeros(engine.spec.actions, np.float32))
        session.imagine(session.plan(engine.spec.goals[0]), 2)
        took.append(time.perf_counter() - start)
        time.sleep(REST * took[-1])
    return float(np.median(took[-TICKS:]))


@functools.cache
def _engine():
    """The shipped model, warm: it is measured again and again."""
    from worldmodel_ros.engine import load

    engine = load(model='tiny', backend='onnx-int8', threads=1)
    engine.warm_up(ticks=5)
    return engine


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of the cores that this process may use which others take while it sleeps; 0 where no kernel tells."""
    before = _core_times()
    time.sleep(seconds)
    used, total = (now - then for now, then in zip(_core_times(), before))
    return used / total if total else 0.0


def _core_times() -> tuple[int, int]:
    """Time in use, and all time, of the cores of this process [ticks of the kernel]."""
    try:
        rows = [line.split() for line in open('/proc/stat') if line.startswith('cpu')]
    except OSError:
        return 0, 0
    mine = [[int(word) for word in row[1:9]] for row in rows if row[0][3:] and int(row[0][3:]) in os.sched_getaffinity(0)]
    idle = sum(times[3] + times[4] for times in mine)  # waiting for a disk, too
    total = sum(map(sum, mine))
    return total - idle, total


def product_seconds() -> float:
    """Return the median of products of float32 matrices, 384x384, by one thread [s]."""
    import numpy as np
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix, took = torch.rand(384, 384), []
        for _ in range(TICKS):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            took.append(time.perf_counter() - start)
            time.sleep(REST * took[-1])
    finally:
        torch.set_num_threads(threads)
    return float(np.median(took))


if __name__ == '__main__':
    print(json.dumps(measured()._asdict()))

"""How many robots a device serves on time with all ticks in two steps, and what phase offers and the ladder add to that.

    python benchmarks/capacity.py --backend onnx-int8 --robots 3 4 5 --json benchmarks/results/capacity_tiny_<machine>.json
    python benchmarks/capacity.py --preset base --random-weights --smaller small --robots 4 5 6 7 8 9 --seconds 5 \\
        --json benchmarks/results/capacity_base_<gpu>.json

Robots have cameras of --camera Hz with random phases, and tick at the model's rate. Each image is classified by a node's
pacer, which takes up what the service offers. A reply is due 50 ms after the image's stamp, less 15 ms for what is not the
service's. ``fifo``: first come first served, everything in two steps, however late. ``ladder``: admission and tiers, phases as
they are. ``offers``: as ``ladder``, with phases as the service offers them. The first --settle s, in which they move, are not
counted. ``two_steps`` is the share of all due ticks that were answered on time in two steps; ticks that were refused or never
sent count as missed.
"""
from __future__ import annotations

import argparse
import heapq
import logging
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from miss_load import LAST_REPLIES, Offered, Robot, Times
from result_file import provenance, write_result

from worldmodel_ros.engine import load
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.inputs.ticks import NS, FramePacer, FrameSettings, Pace
from worldmodel_ros.realtime import apply
from worldmodel_ros.serving.scheduler import EDF_LADDER, FIFO, Tier
from worldmodel_ros.serving.service.messages import Reply, Tick
from worldmodel_ros.serving.service.service import Service, ServiceSettings

WAYS = {'fifo': (FIFO, False), 'ladder': (EDF_LADDER, False), 'offers': (EDF_LADDER, True)}
FRAMES = 60  # distinct frames per robot; noise, since the content does not affect the time


class CameraRobot(Robot):
    """A robot whose ticks are chosen by its camera's pacer."""

    def __init__(self, phase: float, frames: np.ndarray, actions: np.ndarray, goal: str, period: float, follows: bool):
        super().__init__(phase, frames, actions, goal)
        self.pacer, self._follows, self.offers = FramePacer(period), follows, 0

    def replied(self, reply: Reply) -> None:
        super().replied(reply)
        if reply.earlier and self._follows:
            self.offers += 1
            self.pacer.come_earlier(reply.earlier)


def drive(service: Service, robots: int, camera: float, follows: bool, settle: float, seconds: float, seed: int,
          times: Times) -> dict:
    """Return a row: so many robots for ``settle`` s that are not counted, and ``seconds`` that are."""
    rng, spec, tolerance = np.random.default_rng(seed), service.spec, FrameSettings()
    fleet, sessions = [], []
    for index in range(robots):
        frames = rng.integers(0, 256, (FRAMES, *spec.image_size, 3), dtype=np.uint8)
        actions = rng.uniform(spec.action_low, spec.action_high, (FRAMES, spec.actions)).astype(np.float32)
        fleet.append(CameraRobot(rng.uniform(0.0, spec.step_period), frames, actions, spec.goals[index % len(spec.goals)],
                                 spec.step_period, follows))
        sessions.append(service.open(fleet[-1], seed=index))
    begin = time.monotonic() + 0.05
    counted, end = begin + settle, begin + settle + seconds
    images = [(begin + robot.phase, index, 0) for index, robot in enumerate(fleet)]
    heapq.heapify(images)
    lateness = []
    while images[0][0] < end:
        at, index, number = heapq.heappop(images)
        robot = fleet[index]
        jitter = float(np.clip(rng.standard_normal(), -3, 3)) * times.jitter
        heapq.heappush(images, (begin + robot.phase + (number + 1) / camera, index, number + 1))
        while (left := at + jitter - time.monotonic()) > 0:
            time.sleep(min(left, 0.01))
        stamp = round((at + jitter) * NS)
        pace = robot.pacer.classify(stamp, tolerance.tick_tolerance, tolerance.time_jump)
        robot.pacer.take(stamp, pace)
        if pace not in (Pace.TICK, Pace.NEW_EPISODE):
            continue
        sequence, due = len(robot.ticks), at + jitter + times.budget - times.allowance
        robot.ticks.append(Offered(at, due, at >= counted))
        robot.arriving = threading.get_ident(), sequence
        lateness.append(time.monotonic() - at - jitter)
        frame = sequence % len(robot.frames)
        service.tick(sessions[index], Tick(robot.frames[frame], robot.actions[frame], due, sequence, sequence + 1,
                                           goal=robot.goal, spacing=robot.pacer.spacing, moved=robot.pacer.moved))
        robot.arriving = None
    time.sleep(LAST_REPLIES)
    ticks = [tick for robot in fleet for tick in robot.ticks if tick.counted]
    due = round(robots * seconds / spec.step_period)
    met = [tick for tick in ticks if tick.tier is not None and tick.finish <= tick.due]
    two = sum(tick.tier is Tier.TWO_STEP for tick in met)
    for session in sessions:
        service.close(session)
    stats = service.stats()
    return {'robots': robots, 'due': due, 'sent': len(ticks), 'two_steps': round(two / max(due, len(ticks)), 4),
            'in_time': round(len(met) / max(due, len(ticks)), 4), 'refused': sum(tick.refused for tick in ticks),
            'late': sum(not tick.refused and tick.finish > tick.due for tick in ticks), 'attempted': stats['attempted'],
            'attempted_late': stats['attempted_late'], 'busy': stats['busy'],
            'offers_taken': sum(robot.offers for robot in fleet), 'robots_moved': sum(robot.pacer.moved > 0 for robot in fleet),
            'generator_late_p99_ms': round(float(np.quantile(lateness, 0.99)) * 1e3, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--preset', default='tiny', help='with --random-weights, the preset to serve')
    parser.add_argument('--random-weights', action='store_true')
    parser.add_argument('--smaller', help='a preset with --random-weights, else a model, for the tier of that name')
    parser.add_argument('--backend', default='auto')
    parser.add_argument('--robots', type=int, nargs='+', default=[1, 2, 3, 4, 5, 6])
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=list(WAYS))
    parser.add_argument('--camera', type=float, default=30.0, help='Hz (default: 30)')
    parser.add_argument('--settle', type=float, default=12.0, help='s of each row that do not count (default: 12)')
    parser.add_argument('--seconds', type=float, default=10.0, help='of each row (default: 10)')
    parser.add_argument('--seeds', type=int, default=1, help='draws of phases (default: 1)')
    parser.add_argument('--priority', type=int, default=20, help='of the engine\'s thread, under SCHED_FIFO; 0: none')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    apply(logging.getLogger(__name__), options.priority and options.priority + 1)  # the camera thread's: not part of the load
    make, name = (load_random, options.preset) if options.random_weights else (load, options.model)
    engine, smaller = (each and make(each, options.backend, sessions=max(options.robots) + 1)
                       for each in (name, options.smaller))
    times = Times()
    result = {**provenance(), 'model': name, 'weights': 'random' if options.random_weights else 'trained',
              'backend': engine.backend.name, 'camera_hz': options.camera, 'rate_hz': round(1 / engine.spec.step_period, 3),
              'candidates_a_tick': 1, 'seconds_of_a_row': options.seconds, 'rows': []}
    table = None
    for robots in options.robots:
        for seed in range(options.seeds):
            for way in options.ways:
                policy, follows = WAYS[way]
                service = Service(engine, smaller, ServiceSettings(policy=policy, priority=options.priority), table=table)
                service.start()
                table = service.table
                try:
                    row = drive(service, robots, options.camera, follows, options.settle, options.seconds,
                                seed, times)
                finally:
                    service.stop()
                result['rows'].append({'way': way, 'seed': seed, **row, 'load_average': round(os.getloadavg()[0], 2)})
                print(result['rows'][-1], file=sys.stderr, flush=True)
                write_result(result, options.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())

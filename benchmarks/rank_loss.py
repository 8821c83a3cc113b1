"""One model served by several GPUs loses one while a robot drives: do commands continue, and when is the model back?

    python benchmarks/rank_loss.py --json benchmarks/results/rank_loss_h200x2.json                       # robot_3b_4k, two GPUs
    python benchmarks/rank_loss.py --preset smoke_tiles --backend torch --parallel sequence --deadline 0.1   # on CPUs

A server process has the divided model (random weights); the robot, here, has the shipped ``tiny`` to fall back on. For each
kill (SIGKILL of the last rank), in s from it: to the first command of the own model, the longest time without a command, to all
processes being back, to the server driving again (its trials included). ``by_server_before``: share of the last observations
before the kill that the server had answered with a plan for them; ``by_server_again``: of those after it drives again;
``stops``: answers without a command between the two. A deadline must not exceed the time between two images: otherwise
the next one replaces one that is not answered.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.control.ladder import MODEL_TIERS, NS, Settings, Tier
from worldmodel_ros.control.responder import Answer, Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine import load
from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.serving.client.failover import FailoverWorker

START_S = 240.0  # of the server, with nothing compiled
BACK_S = 60.0  # after a kill
DRIVES_S = 2.0  # before the first kill, and after each when the server drives again: time for BEFORE observations
BEFORE = 20
OWN_TIERS = (Tier.TWO_STEP, Tier.ONE_STEP, Tier.PLAN_ONLY)  # not the last plan, which may be the server's


class Robot:
    """Sends noise images at the model's rate, from a thread of its own, and keeps the answers, with their source and time."""

    def __init__(self, path: Path, deadline: float):
        self.engine = load('tiny', sessions=2)
        self.engine.warm_up()
        spec = self.engine.spec
        self.period, self._deadline, self._goal = spec.step_period, deadline, spec.goals[0]
        self.answers: list[tuple[float, Answer, bool]] = []
        self._by_server = False
        self._due = float('inf')  # when the newest observation must be answered
        self.responder = Responder(self, Settings(reserve=0.01), self.period)
        own = Worker(self.engine, self.executed, self.responder, self)
        self.worker = FailoverWorker(path, '/robot', own, spec, self.executed, self.responder, self,
                                     lambda text: print(text, file=sys.stderr, flush=True))
        self._images = np.random.default_rng(0).integers(0, 256, (8, *self.worker.image_size, 3), dtype=np.uint8)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._film, self._watch)]

    def __enter__(self) -> Robot:
        self.worker.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.worker.stop()

    def answered(self, answer: Answer) -> None:
        self.answers.append((time.monotonic(), answer, self._by_server))

    def predicted(self, prediction: object) -> None:
        pass

    def failed(self, reason: str, error: object, restarted: bool) -> None:
        print(f'failed: {reason}', file=sys.stderr, flush=True)

    def executed(self, start: int | None, end: int) -> np.ndarray:
        return np.full(self.engine.spec.actions, 0.1, np.float32)

    def _film(self) -> None:
        start = time.monotonic()
        for sequence in range(1, 1_000_000):
            if self._over.wait(max(0.0, start + sequence * self.period - time.monotonic())):
                return
            now = time.monotonic()
            self.worker.submit(Observation(self._images[sequence % len(self._images)], round(sequence * self.period * NS), now,
                                           now + self._deadline, 1, sequence, self._goal))
            self._due = now + self._deadline - self.responder.settings.reserve

    def _watch(self) -> None:
        was_due = 0.0
        while not self._over.wait(0.001):
            self._by_server = not self.worker.degraded_reason  # not read in ``answered``, which holds the responder's lock
            due = self._due
            if due != was_due and time.monotonic() >= due:
                self.responder.overdue()
                was_due = due


def kill(robot: Robot, server: subprocess.Popen, lines: list[dict]) -> dict:
    """Kill the last rank; return the cost."""
    pid = lines[-1]['pids'][-1]
    os.kill(pid, signal.SIGKILL)
    start, known = time.monotonic(), len(lines)
    while time.monotonic() < start + BACK_S and server.poll() is None:
        time.sleep(0.02)
        if len(lines) > known and not robot.worker.degraded_reason:
            break
    drives = None if robot.worker.degraded_reason or len(lines) == known else time.monotonic()
    time.sleep(DRIVES_S)
    end = drives or time.monotonic()
    after = [(at, answer, by_server) for at, answer, by_server in robot.answers if start < at <= end]
    own = [at for at, answer, by_server in after if not by_server and answer.tier in OWN_TIERS]
    times = [start, *(at for at, answer, _ in after if answer.actions is not None), end]
    return {'by_server_before': by_server(robot, 0.0, start), 'to_own_command_s': round(own[0] - start, 3) if own else None,
            'longest_without_command_s': round(max(b - a for a, b in zip(times, times[1:])), 3),
            'processes_back_s': round(lines[-1]['at'] - start, 3) if len(lines) > known else None,
            'server_drives_again_s': None if drives is None else round(drives - start, 3),
            'by_server_again': None if drives is None else by_server(robot, drives, time.monotonic()),
            'stops': sum(answer.actions is None for _, answer, _ in after)}


def by_server(robot: Robot, begin: float, end: float) -> float:
    """Return the share of the last observations answered in that time for which the server had a plan of their own."""
    found = [by_server and answer.tier in MODEL_TIERS for at, answer, by_server in robot.answers if begin < at <= end]
    return round(float(np.mean(found[-BEFORE:])), 2) if found else 0.0


def serve(options: argparse.Namespace) -> None:
    """Run the server; print, as lines of JSON, when its processes are complete, and their ids."""
    from worldmodel_ros.engine.session_folder import SessionFolder
    from worldmodel_ros.serving.server.server import Server
    from worldmodel_ros.serving.service.service import Service, ServiceSettings
    from worldmodel_ros.serving.transport.address import ListeningSocket
    listening = ListeningSocket(options.serve)
    opened = load if Path(options.preset).is_dir() else load_random
    engine = opened(options.preset, options.backend, sessions=2, gpus=options.gpus, parallel=options.parallel)
    engine.warm_up()
    service = Service(engine, settings=ServiceSettings(sessions=1, pictures=False))
    service.start()
    listening.listen()
    server = Server(service, listening, SessionFolder(options.serve.parent / 'sessions'))

    def tell() -> None:
        epoch = None
        while True:
            if engine.backend.epoch != epoch and not engine.backend.degraded_reason:
                epoch = engine.backend.epoch
                print(json.dumps({'at': time.monotonic(), 'pids': engine.backend.processes.pids}), flush=True)
            time.sleep(0.01)
    threading.Thread(target=tell, daemon=True).start()
    server.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--preset', default='robot_3b_4k', help='with tiles; or a folder of weights')
    parser.add_argument('--backend', default='torch-fp8')
    parser.add_argument('--gpus', type=int, default=2)
    parser.add_argument('--parallel', default='sequence-fp8')
    parser.add_argument('--deadline', type=float, default=0.05, help='s, from an image to its command')
    parser.add_argument('--kills', type=int, default=3)
    parser.add_argument('--json', type=Path)
    parser.add_argument('--serve', type=Path, help=argparse.SUPPRESS)  # be the server, at this socket
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    result = {**provenance(), 'weights': 'random', 'preset': options.preset, 'backend': options.backend, 'gpus': options.gpus,
              'parallel': options.parallel, 'deadline_s': options.deadline, 'kills': [], 'failed': ''}
    with tempfile.TemporaryDirectory() as folder:
        path, lines = Path(folder) / 'engine.sock', []
        begun = time.monotonic()
        server = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], '--serve', str(path)], stdout=subprocess.PIPE,
                                  text=True)
        threading.Thread(target=lambda: lines.extend(map(json.loads, server.stdout)), daemon=True).start()
        try:
            while not lines and server.poll() is None and time.monotonic() < begun + START_S:
                time.sleep(0.05)
            if not lines:
                raise RuntimeError('the server did not start')
            result['start_s'] = round(time.monotonic() - begun, 1)
            with Robot(path, options.deadline) as robot:
                for _ in range(options.kills):
                    end = time.monotonic() + BACK_S
                    while robot.worker.degraded_reason and time.monotonic() < end:
                        time.sleep(0.05)
                    if robot.worker.degraded_reason:
                        raise RuntimeError(robot.worker.degraded_reason)
                    if not result['kills']:  # else it has been driving for as long since the last one
                        time.sleep(DRIVES_S)
                    result['kills'].append(kill(robot, server, lines))
                    write_result(result, options.json)
        except RuntimeError as error:
            result['failed'] = str(error)
        finally:
            server.kill()
            server.wait()
    write_result(result, options.json, show=True)
    return 1 if result['failed'] or any(each['server_drives_again_s'] is None for each in result['kills']) else 0


if __name__ == '__main__':
    raise SystemExit(main())

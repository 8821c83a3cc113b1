"""Camera message in to command out, over ROS: the real node and gate on Fast DDS, in processes of their own.

    python benchmarks/ros_tick.py --folder benchmarks/results                  # base at 60 Hz, ten minutes
    python benchmarks/ros_tick.py --preset robot_3b --gpus 4 --rate 20 --deadline 0.05 --folder ...
    python benchmarks/ros_tick.py --forecast tiny --candidates 4 --folder ...
    python benchmarks/ros_tick.py --preset small_tiles --trained --backend torch-bf16 --rate 10 --deadline 0.05 \
        --reserve 0.012 --forecast tiny --candidates 8 --folder ...

This process is the robot: it publishes images, stamped when it does, and receives the gate's commands. A command's time
is from its image's stamp to its receipt by DDS here; it is late beyond --deadline. Afterwards the same again while another
program uses a share of the same GPU's time, or all cores if there is no GPU. Unless --trained, weights are random,
and the content of the plan means nothing.

With --forecast, commands are decided on that, with its weights, among at most --candidates, and the preset imagines the
decision. The camera then shows a street of the simulator, with odometry: deciding on an empty scene would take no time.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from result_file import command, short_name, write_result
from ros_tick_film import film
from ros_tick_node import ENGINE

from worldmodel_ros.control.ladder import Tier

HERE = Path(__file__).resolve().parent
SETTLING = 3.0  # s, after the first command
MINUTE = 60.0
NAMES = {int(tier): tier.name.lower() for tier in Tier}
VERDICTS = ('on_time', 'degraded', 'late', 'stale_input', 'invalid', 'idle')


def main() -> int:
    options = parsed()
    options.film = film(preset(options.preset).image_size, options.rate) if options.forecast else None
    result = {'command': command(), 'weights': 'trained' if options.trained else 'random', 'rows': [],
              'failed': {}, **about()}
    phases = [(0.0, options.seconds), *((share, options.load_seconds) for share in options.load_shares)]
    try:
        with system(options), robot(options) as camera:
            camera.begin(options.start_timeout)
            for share, seconds in phases:
                with load(result['machine']['gpus'], share) if share else nullcontext():
                    time.sleep(SETTLING)
                    camera.clear()
                    rows = result['rows']
                    for done in parts(seconds):  # the machine may be taken away before the end of a long phase
                        result['rows'] = [*rows, row(options, share, done, camera)]
                        save(result, options)
                print(json.dumps(result['rows'][-1]), file=sys.stderr, flush=True)
    except Exception as error:
        result['failed'] = {'error': f'{type(error).__name__}: {error}'}
        print(f'failed: {error}', file=sys.stderr)
    save(result, options)
    print(json.dumps(result, indent=1))
    return 1 if result['failed'] else 0


def parts(seconds: float) -> Iterator[float]:
    """Wait for ``seconds``; yield the seconds elapsed after each minute, and at the end."""
    start = time.monotonic()
    for end in [*np.arange(MINUTE, seconds, MINUTE), seconds]:
        time.sleep(max(0.0, start + end - time.monotonic()))
        yield float(end)


@contextmanager
def system(options: argparse.Namespace):
    """Run the model's node and the gate, as bringup describes them, except for the engine."""
    from worldmodel_ros.bringup.description import load as describe
    from worldmodel_ros.bringup.supervisor import Supervisor
    description = describe()
    model = {'deadline_s': options.deadline, 'reserve_s': options.reserve, 'headroom_s': options.reserve / 4,
             'goal': options.film.goal if options.film else 'red', 'forecast': options.forecast,
             'candidates': options.candidates, 'frozen_camera_timeout_s': 0.0,
             'backend': options.backend, 'gpus': options.gpus, 'parallel': options.parallel}
    gate = {'deadline_s': options.deadline, 'delivery_reserve_s': options.reserve / 2,
            'command_timeout_s': max(0.13, 1.5 / options.rate)}
    nodes = description.resolve('robot', parameters={'world_model_node': model, 'command_gate': gate})
    engine = {'preset': options.preset, 'trained': options.trained, 'rate_hz': options.rate, 'gathered': options.gathered}
    nodes = [replace(node, executable=str(HERE / 'ros_tick_node.py'), respawn=False,
                     environment={ENGINE: json.dumps(engine)}) if node.name == 'world_model_node' else node
             for node in nodes]
    with tempfile.TemporaryDirectory() as logs, Supervisor(
            description.environment, options.logs or logs, activation_timeout=options.start_timeout) as supervisor:
        supervisor.add(nodes)
        supervisor.start()
        supervisor.wait_ready(options.start_timeout)
        options.domain = supervisor.domain_id
        yield logs


@contextmanager
def robot(options: argparse.Namespace):
    """Run the camera and the base, on threads of their own."""
    from ros_tick_robot import Robot
    spec = preset(options.preset)
    with Robot(spec.image_size, options.rate, options.domain, options.film) as camera:
        yield camera


def load(gpus: list, share: float) -> AbstractContextManager:
    from worldmodel_ros.demo.load import CpuLoad
    return program([sys.executable, str(HERE / 'gpu_load.py'), '--share', str(share)]) if gpus else CpuLoad()


@contextmanager
def program(command: list[str]):
    """Run another program meanwhile. Raises RuntimeError if it did not start."""
    child = subprocess.Popen(command)
    try:
        time.sleep(8.0)  # importing torch and creating its CUDA context
        if child.poll() is not None:
            raise RuntimeError(f'{command[-1]} ended with exit status {child.returncode}')
        yield
    finally:
        child.kill()
        child.wait()


def row(options: argparse.Namespace, share: float, seconds: float, camera) -> dict:
    """Return what the robot saw in one phase; no times where it got only the gate's stop."""
    images, commands, statuses = camera.taken()
    ms = 1e3 * np.array(commands)
    tiers = Counter(NAMES.get(status.tier, str(status.tier)) for status in statuses)
    verdicts = Counter(VERDICTS[status.verdict] for status in statuses)
    model = [status.latency * 1e3 for status in statuses if status.tier in (1, 2)]
    published = [status.observation_age * 1e3 for status in statuses if status.tier in (1, 2)]  # when DDS had the command
    return {'preset': options.preset, 'backend': options.backend, 'gpus': options.gpus if about_gpus() else 0,
            'parallel': options.parallel if options.gpus > 1 else 'single', 'load_share': share, 'rate_hz': options.rate,
            'seconds': seconds, 'deadline_ms': round(options.deadline * 1e3, 2), 'images': images,
            'commands': len(commands),
            'camera_to_command_ms': {name: round(float(np.quantile(ms, q)), 3) if commands else None
                                     for name, q in (('p50', 0.5), ('p99', 0.99), ('max', 1.0))},
            'late_commands_published': int((ms > options.deadline * 1e3).sum()),
            'received_to_command_ms_p50': round(float(np.median(model)), 3) if model else None,
            'received_to_command_ms_p99': round(float(np.quantile(model, 0.99)), 3) if model else None,
            'camera_to_published_ms_p50': round(float(np.median(published)), 3) if published else None,
            'tiers': dict(tiers), 'verdicts': dict(verdicts), **(decided(options, camera) if options.film else {})}


def decided(options: argparse.Namespace, camera) -> dict:
    """Summarise the decisions of a phase."""
    decisions, predictions = camera.decided()
    compared = [each for each in decisions if each.candidates]
    return {'forecast': options.forecast, 'most_candidates': options.candidates, 'decisions': len(decisions),
            'compared': dict(Counter(len(each.candidates) for each in compared)),  # the chosen one is among them
            'things_told': round(float(np.mean([len(each.things) for each in decisions])), 2) if decisions else None,
            'predictions': predictions,
            **{f'{part}_ms': {name: round(float(np.quantile([1e3 * getattr(each, f'{part}_time') for each in compared], q)), 3)
                              for name, q in (('p50', 0.5), ('p99', 0.99))} if compared else None
               for part in ('forecast', 'decision')}}


def preset(name: str):
    from worldmodel_ros.model.presets import PRESETS
    return PRESETS[name]


def about_gpus() -> list[str]:
    """Return the GPUs' names from nvidia-smi, since this process must have no context on them."""
    try:
        command = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split('\n')[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def about() -> dict:
    from worldmodel_ros.machine import machine, versions
    return {'machine': {**machine(), 'gpus': about_gpus()}, 'versions': versions()}


def save(result: dict, options: argparse.Namespace) -> None:
    count = f'x{options.gpus}' if options.gpus > 1 else ''
    gpu = short_name(result['machine']['gpus'])
    name = f'ros_tick_{gpu}{count}' + ('' if options.preset == 'base' else f'_{options.preset}')
    if options.forecast:
        name += f'_{options.candidates}_candidates'
    write_result(result, options.folder and options.folder / f'{name}.json')


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--preset', default='base')
    parser.add_argument('--trained', action='store_true', help='with its shipped weights, whose rate --rate is to be')
    parser.add_argument('--backend', default='torch-compiled')
    parser.add_argument('--gathered', action='store_true', help='pages are gathered for each layer, not read in place')
    parser.add_argument('--forecast', default='', help='scene forecast that commands are decided on; default: none')
    parser.add_argument('--candidates', type=int, default=16, help='of a decision on it, at most')
    parser.add_argument('--gpus', type=int, default=1)
    parser.add_argument('--parallel', default='sequence-fp8', help='how several GPUs share the model')
    parser.add_argument('--rate', type=float, default=60.0, help='pictures per second, each of which is a tick')
    parser.add_argument('--deadline', type=float, help='s from stamp to robot; default: one period of the camera')
    parser.add_argument('--reserve', type=float, default=0.002, help='s of it for gate and transport')
    parser.add_argument('--seconds', type=float, default=600.0, help='without the other program')
    parser.add_argument('--load-shares', type=float, nargs='*', default=[0.25, 0.5, 1.0],
                        help='of the time, in which it wants the GPU; each is a phase of its own')
    parser.add_argument('--load-seconds', type=float, default=20.0, help='of each such phase')
    parser.add_argument('--start-timeout', type=float, default=400.0)
    parser.add_argument('--logs', type=Path, help='folder for the logs of the nodes; default: a temporary one')
    parser.add_argument('--folder', type=Path)
    options = parser.parse_args()
    options.deadline = options.deadline or 1.0 / options.rate
    return options


if __name__ == '__main__':
    raise SystemExit(main())

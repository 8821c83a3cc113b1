"""Drives simulated robots by a model, without ROS: how often, and how soon, the goal is reached.

    python -m worldmodel_ros.evaluate.closed_loop --episodes 40 --backend onnx-int8
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..safety.limits import TwistLimiter
from ..sim.scene import COLOURS, GOAL_DISTANCE
from ..sim.world import LIMITS, World
from .pictures import is_moving, psnr

FIRST_SEED = 2_000_000  # training uses seeds below one million
COMMAND_DELAY = 0.03  # s from a frame to the command that answers it, as over ROS on two cores


@dataclass
class Episode:
    seed: int
    goal: str
    start_distance: float  # m
    seconds: float  # to the goal, or all that were driven
    reached: bool
    collisions: int  # steps with a contact
    psnr_db: float | None  # of the predicted chunk while the robot moved
    psnr_copy_last_db: float | None


def drive(engine, seed: int, seconds: float = 30.0, steps: int = 2) -> Episode:
    """One episode towards a goal drawn from ``seed``, with ``steps`` denoising steps a tick."""
    spec = engine.spec
    world = World(seed=seed, image_size=spec.image_size)
    rng = np.random.default_rng(seed)
    goal = COLOURS[int(rng.integers(len(COLOURS)))]
    session, limiter = engine.open_session(), TwistLimiter(LIMITS)
    executed, collisions, start = (0.0, 0.0), 0, world.goal_distance(goal)
    frames, predicted = [], []
    for tick in range(round(seconds / spec.step_period)):
        if world.goal_distance(goal) < GOAL_DISTANCE:
            break
        frames.append(world.render())
        session.observe(frames[-1], np.asarray(executed))
        future = session.imagine(session.plan(goal), steps)
        predicted.append((session.decode(future), executed))
        command = limiter.limit(tuple(future.actions[0].tolist()), executed, spec.step_period).twist
        world.step(executed, COMMAND_DELAY)
        hit = world.collided
        world.step(command, spec.step_period - COMMAND_DELAY)
        collisions += hit or world.collided
        executed = command
    ours, copy = _prediction(frames, predicted)
    return Episode(seed, goal, round(start, 2), round(len(frames) * spec.step_period, 2),
                   world.goal_distance(goal) < GOAL_DISTANCE, int(collisions), ours, copy)


def _prediction(frames: list[np.ndarray], predicted: list[tuple[np.ndarray, tuple[float, float]]]
                ) -> tuple[float | None, float | None]:
    """Mean PSNR (dB) of predicted frames and of copying the last one; each tick's command led to its frame."""
    ours, copy = [], []
    for tick, (future, _) in enumerate(predicted):
        for later, picture in enumerate(future[:len(frames) - tick - 1], tick + 1):
            if is_moving(*predicted[later][1]):
                ours.append(psnr(picture, frames[later]))
                copy.append(psnr(frames[tick], frames[later]))
    return (round(float(np.mean(ours)), 2), round(float(np.mean(copy)), 2)) if ours else (None, None)


def summarise(episodes: list[Episode]) -> dict:
    reached = [e.seconds for e in episodes if e.reached]
    seen = [e for e in episodes if e.psnr_db is not None]
    return {'episodes': len(episodes), 'reached': len(reached), 'success': round(len(reached) / len(episodes), 3),
            'median_s': round(float(np.median(reached)), 1) if reached else None,
            'steps_with_contact': round(sum(e.collisions for e in episodes) / len(episodes), 2),
            'psnr_db': round(float(np.mean([e.psnr_db for e in seen])), 2),
            'psnr_copy_last_db': round(float(np.mean([e.psnr_copy_last_db for e in seen])), 2)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.evaluate.closed_loop',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='tiny', help='shipped model or folder (default: tiny)')
    parser.add_argument('--backend', default='auto', help='auto, torch, onnx or onnx-int8')
    parser.add_argument('--episodes', type=int, default=40)
    parser.add_argument('--first-seed', type=int, default=FIRST_SEED, help='training uses seeds below 1000000')
    parser.add_argument('--seconds', type=float, default=30.0, help='limit of an episode (default: 30)')
    parser.add_argument('--steps', type=int, default=2, help='denoising steps a tick (default: 2)')
    parser.add_argument('--json', type=Path, help='file for all episodes and the summary')
    options = parser.parse_args(arguments)

    from ..engine import load
    engine = load(options.model, options.backend)
    episodes = []
    for seed in range(options.first_seed, options.first_seed + options.episodes):
        episodes.append(drive(engine, seed, options.seconds, options.steps))
        print(episodes[-1], file=sys.stderr, flush=True)
    result = {'command': 'python -m worldmodel_ros.evaluate.closed_loop ' + ' '.join(arguments or sys.argv[1:]),
              'model': options.model, 'backend': engine.backend.name, 'steps': options.steps, **summarise(episodes)}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps({**result, 'rows': [asdict(e) for e in episodes]}, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())

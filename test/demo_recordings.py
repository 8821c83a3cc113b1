"""Synthetic runs for the tests of the demo: a camera that pans over a fixed picture at a constant speed."""
import cv2
import numpy as np

from worldmodel_ros.demo.recording import (
    NS, Branch, Command, Future, GoalAttempt, Pose, Recording, Thing, Tick, WhatIf)

STEP = 0.1
START = 1_700_000_000 * NS


def panorama(offset: float) -> np.ndarray:
    """(64, 64, 3) uint8 RGB seen at ``offset`` pixels."""
    x = (np.arange(64) + offset)[None, :, None] / np.array([19.0, 13.0, 29.0])
    y = np.arange(64)[:, None, None] / np.array([23.0, 31.0, 17.0])
    return np.uint8(127 + 60 * np.sin(x * 3) + 60 * np.cos(y * 2))


def encode(image: np.ndarray, extension: str = '.png') -> bytes:
    return cv2.imencode(extension, image[:, :, ::-1])[1].tobytes()


def branch(name: str, speed: float, turn: float, steps: int = 4, risk: float = 0.1) -> Branch:
    t = np.arange(1, steps + 1) * STEP
    path = np.stack([speed * t, 0.5 * speed * turn * t ** 2, turn * t], axis=1)
    frames = tuple(encode(panorama(40 * turn * s + 20 * speed * s)) for s in t)
    return Branch(name, frames, np.full(steps, risk, np.float32), speed * steps * STEP, path)


def what_if(stamp: int, truth: bool = True) -> WhatIf:
    moves = {'forward': (0.4, 0.0), 'left': (0.3, 1.0), 'right': (0.3, -1.0), 'stop': (0.0, 0.0)}
    branches = tuple(branch(n, v, w) for n, (v, w) in moves.items())
    real = tuple(branch(n, 0.9 * v, 1.1 * w, risk=float(n == 'left')) for n, (v, w) in moves.items())
    return WhatIf(stamp, 'red', STEP, 0.11, 0.12, branches, real if truth else ())


def drive(steps: int = 40, speed: float = 0.4, latency: float = 0.03, error: int = 4,
          moving: bool = True) -> Recording:
    """A run at 10 Hz: every prediction is the truth plus ``error`` grey levels; not ``moving``: it stands."""
    rec = Recording()
    speed = speed if moving else 0.0
    for i in range(steps):
        stamp = START + round(i * STEP * NS)
        rec.add_image(stamp, panorama(1.5 * i * moving))
        rec.commands.append(Command(stamp, stamp + round(latency * NS), speed, 0.2 * moving))
        rec.ticks.append(Tick(stamp, 2 if i % 10 == 9 else 1, False, latency))
        frames = tuple(encode(panorama(1.5 * (i + k + 1) * moving) + np.uint8(error)) for k in range(4))
        rec.futures.append(Future(stamp, STEP, frames))
        angle = 0.2 * i * STEP * moving
        x, y = 2 * speed * np.sin(angle), 2 * speed * (1 - np.cos(angle))
        rec.poses.append(Pose(stamp, x, y, angle, speed, 0.2 * moving))
    rec.goals.append(GoalAttempt('red', given=0.0, reached=2.1, closest=0.4))
    rec.goals.append(GoalAttempt('blue', given=2.1, closest=1.3))
    rec.things['red'] = Thing('red', 0.5, 0.4, 0.3, 0.2, 0.2, (0.8, 0.1, 0.1))
    rec.things['blue'] = Thing('blue', 1.5, -0.6, 0.0, 0.3, 0.3, (0.1, 0.2, 0.8), round=True)
    rec.things['wall'] = Thing('', 0.0, 1.5, 0.0, 4.0, 0.05, (0.7, 0.7, 0.6))
    rec.what_ifs += [what_if(rec.image_stamps[5]), what_if(rec.image_stamps[25], truth=False)]
    return rec

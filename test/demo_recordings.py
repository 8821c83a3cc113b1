"""Synthetic runs for the tests of the demo: a camera that pans over a fixed image at a constant speed."""
import cv2
import numpy as np

from worldmodel_ros.demo.recording import (
    NS, Branch, Choice, Command, Future, GoalAttempt, Option, Pose, PredictedThing, Recording, Room, Sighting, Thing, Tick,
    WhatIf)

STEP = 0.1
START = 1_700_000_000 * NS


def panorama(offset: float) -> np.ndarray:
    """Return (64, 64, 3) uint8 RGB seen at ``offset`` pixels."""
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
    """Return a run at 10 Hz: every prediction is the truth plus ``error`` grey levels; not ``moving``: it stands."""
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


TERMS = ('reach red (weight 1)', 'keep 0.12 m to everything but red (weight 2)')
TIMES = np.arange(21) * 0.1


def choice(stamp: int, pose: Pose, mover: tuple[float, float], off: float = 0.0) -> Choice:
    """Return the decision of a robot at ``pose`` to go right, with a mover that goes along y with 0.5 m/s from a place in the
    world. The mover is forecast ``off`` m away from its true future."""
    cos, sin = np.cos(pose.yaw), np.sin(pose.yaw)
    places = np.column_stack([np.full(21, mover[0] + off), mover[1] + 0.5 * TIMES]) - (pose.x, pose.y)
    path = places @ np.array([[cos, -sin], [sin, cos]])

    def option(name: str, turn: float, terms: tuple[float, ...], contact: str = '') -> Option:
        way = np.column_stack([0.4 * TIMES, turn * TIMES ** 2])
        return Option(name, sum(terms), terms, contact, way)
    options = (option('policy', 0.0, (-0.5, -2.0), 'mover'), option('right 0.8 s', -0.3, (-0.75, 0.0)),
               option('stop 0.8 s', 0.0, (-1.25, 0.0)), option('left 0.8 s', 0.3, (-0.75, -1.0)))
    things = (PredictedThing('red', 'red', 0.16, np.array([[2.0, 0.0]])), PredictedThing('mover', 'violet', 0.135, path))
    walls = np.array([[1.0, 0.0, 3.0], [0.0, 1.0, 2.0], [-1.0, 0.0, 1.0], [0.0, -1.0, 2.0]])
    return Choice(stamp, 'right 0.8 s', options, 1, TERMS, TIMES, things, walls, 0.012, 0.004)


def task_drive(off: float = 0.0) -> Recording:
    """Return a run of a task: two rooms of 2 s, the first one done, in each of which a mover crosses."""
    rec = drive()
    rec.goals.clear()
    rec.things = {key: thing for key, thing in rec.things.items() if key != 'blue'} | {
        'movers/0': Thing('shuttle 1', 1.5, -1.0, 0.0, 0.27, 0.27, (0.5, 0.2, 0.9), round=True)}
    rec.target = 'red'
    for number, (succeeded, fate) in enumerate(((True, 'done'), (None, ''))):
        rec.rooms.append(Room('street', 7 + number, rec.image_stamps[20 * number] - 1, dict(rec.things), 'red', succeeded, fate,
                              2.0 if succeeded else 0.0))
    for i, (stamp, pose) in enumerate(zip(rec.image_stamps, list(rec.poses))):
        y = -1.0 + 0.05 * (i % 20)
        shuttle = Thing('shuttle 1', 1.5, y, 0.0, 0.27, 0.27, (0.5, 0.2, 0.9), round=True)
        rec.sightings.append(Sighting(stamp, {'shuttle 1': shuttle}))
        rec.choices.append(choice(stamp, pose, (1.5, y), off))
    return rec

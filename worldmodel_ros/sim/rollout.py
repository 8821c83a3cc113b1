"""Drives episodes and collects them: images, actions, the expert's actions, and true state.

``train.data.simulate`` keeps them as a dataset; ``collect`` returns a few as arrays.
"""
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
import math
import multiprocessing
import os
from pathlib import Path
import signal
import tempfile

import numpy as np

from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.behaviour import DEFAULT_MIX, DRIVERS, Driver
from worldmodel_ros.sim.expert import expert_action, search_action
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import LIMITS, TIMESTEP, World

TRAINING_SEEDS = range(1_000_000)  # every other seed is for evaluation
PERIOD = 0.1  # s, between two frames
MAX_LATENCY = 0.05  # s, from a frame to the start of the command that answers it
_BEHAVIOUR_STREAM = 1  # keeps the driver's random numbers independent of those of the scene of the same seed
_MEASURED_STREAM = 2  # likewise, for whether an episode has measured actions

_worker_arrays: dict[str, np.ndarray] = {}
_worker_world: list[World] = []


def array_shapes(
    episodes: int, steps: int, size: tuple[int, int]
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of every array that ``collect`` returns."""
    e, t, goals = episodes, steps, len(COLOURS)
    return {
        'frames': ((e, t, *size, 3), np.dtype(np.uint8)),
        'actions': ((e, t, 2), np.dtype(np.float32)),
        'expert': ((e, t, goals, 2), np.dtype(np.float32)),
        'search': ((e, t, 2), np.dtype(np.float32)),
        'collided': ((e, t), np.dtype(bool)),
        'goal_distance': ((e, t, goals), np.dtype(np.float32)),
        'visible': ((e, t, goals), np.dtype(bool)),
        'poses': ((e, t, 3), np.dtype(np.float32)),
        'behaviour': ((e,), np.dtype(f'U{max(map(len, DRIVERS))}')),
        'seeds': ((e,), np.dtype(np.int64)),
    }


def collect(seeds: Sequence[int], steps: int, size: tuple[int, int] = (64, 64), workers: int | None = None,
            mix: Mapping[str, float] = DEFAULT_MIX) -> dict[str, np.ndarray]:
    """Drive one episode of ``steps`` frames for each seed and return their arrays, E episodes of T frames.

    frames         uint8 (E, T, H, W, 3): camera images; frame 0 is before any action
    actions        float32 (E, T, 2): the command executed in the interval that led to frame t; zero at 0
    expert         float32 (E, T, 4, 2): the expert's command at frame t for each goal (ordered as in COLOURS)
                   as the acceleration limits allow it after actions[t]
    search         float32 (E, T, 2): the command at frame t of a search for a goal that is not in view, likewise
    collided       bool (E, T): contact with a wall or an object in the interval that led to frame t
    goal_distance  float32 (E, T, 4): m, to each goal at frame t
    visible        bool (E, T, 4): whether the camera sees each goal at frame t
    poses          float32 (E, T, 3): x, y (m) and yaw (rad) at frame t
    behaviour      str (E,): which driver of ``mix`` (name to weight) chose the commands
    seeds          int64 (E,)

    A command takes effect a random latency of up to MAX_LATENCY after the frame that it answers. An episode depends on
    its seed, the mix and the size alone. ``size`` is (height, width). ``workers`` are processes, by default as many as
    cores; with one, this process does the work. The arrays are memory-mapped to unlinked files, freed with the arrays.
    Raises ValueError for an unknown driver in the mix.
    """
    seeds = np.asarray(seeds, np.int64)
    check_mix(mix)
    workers = min(workers or os.cpu_count() or 1, max(1, len(seeds)))
    with tempfile.TemporaryDirectory(prefix='rollout-') as name:
        folder = Path(name)
        for name, (shape, dtype) in array_shapes(len(seeds), steps, size).items():
            np.lib.format.open_memmap(folder / f'{name}.npy', 'w+', dtype, shape)
        arrays = _open_arrays(folder)
        arrays['seeds'][:] = seeds
        if workers == 1:
            world = World(image_size=size)
            for index in range(len(seeds)):
                _fill(arrays, world, index, mix)
            return arrays
        with ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), _start_worker,
                                 (folder, size)) as pool:
            for _ in pool.map(_fill_episode, range(len(seeds)), [dict(mix)] * len(seeds)):
                pass
        return arrays


def check_mix(mix: Mapping[str, float]) -> None:
    """Raise ValueError for a mix that is empty or names an unknown driver, and for weights that are no shares."""
    unknown = set(mix) - set(DRIVERS)
    if unknown or not mix:
        raise ValueError(f'the mix names {sorted(unknown)}: choose from {", ".join(DRIVERS)}')
    if min(mix.values()) < 0.0 or not 0.0 < sum(mix.values()) < math.inf:
        raise ValueError(f'the mix has the weights {dict(mix)}: give finite ones, of which none is below zero and one is above')


def _open_arrays(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.load(folder / f'{name}.npy', mmap_mode='r+') for name in array_shapes(0, 0, (0, 0))}


def _start_worker(folder: Path, size: tuple[int, int]) -> None:
    _worker_arrays.update(_open_arrays(folder))
    _worker_world.append(World(image_size=size))


def _fill_episode(index: int, mix: Mapping[str, float]) -> None:
    _fill(_worker_arrays, _worker_world[0], index, mix)


def _fill(arrays: Mapping[str, np.ndarray], world: World, index: int, mix: Mapping[str, float]) -> None:
    episode = {name: array[index] for name, array in arrays.items() if array.ndim > 1}
    arrays['behaviour'][index] = drive_episode(world, int(arrays['seeds'][index]), mix, episode)


def start_worker() -> None:
    """Prepare a process for ``drive_alone`` next to a training, which has priority. An interrupt is for the training: it saves
    first, and then ends its workers."""
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def drive_alone(job: tuple[int, int, tuple[int, int], Mapping[str, float], float]) -> dict[str, np.ndarray]:
    """Drive the episode of a job, (seed, frames, image size, mix, measured), in this process's world; return arrays as
    ``collect`` does, without E, ``behaviour`` and ``seeds``."""
    seed, frames, size, mix, measured = job
    if not _worker_world:
        _worker_world.append(World(image_size=size))
    shapes = array_shapes(1, frames, size)
    arrays = {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in shapes.items() if len(shape) > 1}
    drive_episode(_worker_world[0], seed, mix, arrays, measured=measured)
    return arrays


def drive_episode(world: World, seed: int, mix: Mapping[str, float], episode: dict[str, np.ndarray],
                  drivers: Mapping[str, Callable[[np.random.Generator], Driver]] = DRIVERS, measured: float = 0.0) -> str:
    """Drive a seed's episode into ``episode``, arrays as in ``collect`` without E; return the driver's name.

    ``drivers``: what the names of ``mix`` refer to; the chosen driver is called once per frame. ``measured``: probability
    that the seed's ``actions`` are the twists measured by wheel encoders, not the commands.
    """
    rng = np.random.default_rng([seed, _BEHAVIOUR_STREAM])
    weights = np.array(list(mix.values()), float)
    name = str(rng.choice(list(mix), p=weights / weights.sum()))
    driver, limiter = drivers[name](rng), TwistLimiter(LIMITS)
    world.reset(seed)
    odometry = WheelOdometry(world) if np.random.default_rng([seed, _MEASURED_STREAM]).random() < measured else None
    executed, collided = (0.0, 0.0), False
    for t in range(len(episode['frames'])):
        targets = np.stack([expert_action(world, goal) for goal in COLOURS])
        episode['frames'][t] = world.render()
        episode['actions'][t] = executed if odometry is None else odometry.twist
        episode['expert'][t] = [limiter.limit(target, executed, PERIOD).twist for target in targets.tolist()]
        episode['search'][t] = limiter.limit(tuple(search_action(world).tolist()), executed, PERIOD).twist
        episode['collided'][t] = collided
        episode['goal_distance'][t] = [world.goal_distance(goal) for goal in COLOURS]
        episode['visible'][t] = [world.visible(goal) for goal in COLOURS]
        episode['poses'][t] = world.pose
        command = limiter.limit(driver(world, targets).tolist(), executed, PERIOD).twist
        collided = advance(world, executed, command, random_latency(rng))
        if odometry is not None:
            odometry.update(world)
        executed = command
    return name


def random_latency(rng: np.random.Generator) -> int:
    """Return the number of physics steps, up to MAX_LATENCY, after which a command takes effect."""
    return int(rng.integers(round(MAX_LATENCY / TIMESTEP) + 1))


def advance(
    world: World, previous: tuple[float, float], command: tuple[float, float], late_steps: int
) -> bool:
    """Simulate a period, the first ``late_steps`` physics steps still under ``previous``; return whether anything was hit."""
    collided = False
    if late_steps:
        world.step(previous, late_steps * TIMESTEP)
        collided = world.collided
    world.step(command, PERIOD - late_steps * TIMESTEP)
    return collided or world.collided

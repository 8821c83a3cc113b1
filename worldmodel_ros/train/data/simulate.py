"""Simulated episodes as a LeRobot dataset, written by many processes: images, actions, and what only a simulator knows.

    python -m worldmodel_ros.train.data.simulate --episodes 60 --first-seed 1000000 --out data/eval

Each process writes files of whole episodes (``datasets.shard``). An episode depends only on its seed, the image size and
the mix of drivers, not on the number of processes. The seeds are in meta/info.json.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldmodel_ros.datasets.layout import Layout
from worldmodel_ros.datasets.shard import Shard, ShardWriter
from worldmodel_ros.datasets.writer import describe, new_folder
from worldmodel_ros.model.presets import PRESETS, Preset

# The simulator is imported by the processes that use it, after their GPU is chosen (see ``_start_worker``).

EXPERT, SEARCH, CONTACT, DISTANCE, VISIBLE, POSE = (
    'label.expert_action', 'label.search_action', 'label.contact', 'label.goal_distance', 'label.goal_visible',
    'label.pose')


@dataclass(frozen=True)
class Drives:
    """``episodes`` simulated episodes of ``frames`` images of the preset's size, with seeds from ``first_seed`` on."""

    first_seed: int
    episodes: int
    frames: int
    preset: Preset
    episodes_per_file: int = 16

    @property
    def layout(self) -> Layout:
        """The dataset's features. Labels are flat: (goals x actions) numbers for the expert's commands."""
        goals, actions = self.preset.goals, self.preset.action_names

        def label(kind: str, names: Sequence[str] | None, size: int = 1) -> dict:
            return {'dtype': kind, 'shape': [len(names) if names else size], 'names': list(names) if names else None}
        return Layout(round(1 / self.preset.step_period), self.preset.image_size, actions, {
            EXPERT: label('float32', [f'{goal}.{action}' for goal in goals for action in actions]),
            SEARCH: label('float32', actions),
            CONTACT: label('bool', None), DISTANCE: label('float32', goals), VISIBLE: label('bool', goals),
            POSE: label('float32', ('x', 'y', 'yaw'))})


def simulate(folder: Path, drives: Drives, workers: int | None = None, mix: Mapping[str, float] | None = None) -> None:
    """
    Write the dataset, with progress to stderr; by default as many processes as cores, and the usual mix of drivers.

    Raises FileExistsError if there is anything in the folder, and ValueError for an unknown driver.
    """
    from worldmodel_ros.sim.behaviour import DEFAULT_MIX
    from worldmodel_ros.sim.rollout import check_mix
    mix = dict(DEFAULT_MIX if mix is None else mix)
    check_mix(mix)
    new_folder(folder)
    files = range(-(-drives.episodes // drives.episodes_per_file))
    workers = min(workers or os.cpu_count() or 1, len(files))
    shards: dict[int, Shard] = {}
    began, told = time.monotonic(), 0.0
    for number, shard in _written(folder, drives, files, mix, workers):
        shards[number] = shard
        seconds = time.monotonic() - began
        if seconds - told > 5.0 or len(shards) == len(files):
            told, frames = seconds, sum(shard.frames for shard in shards.values())
            print(f'[data] {folder.name}: {sum(len(s.episodes) for s in shards.values())}/{drives.episodes} '
                  f'episodes, {frames / seconds:.0f} frames/s', file=sys.stderr, flush=True)
    describe(folder, drives.layout, [shards[number] for number in sorted(shards)], _tasks(mix), {
        'simulation': {'seeds': f'{drives.first_seed}:{drives.first_seed + drives.episodes}', 'mix': mix}})


def _written(folder: Path, drives: Drives, files: Sequence[int], mix: Mapping[str, float], workers: int
             ) -> Iterator[tuple[int, Shard]]:
    """Yield the files' numbers and shards as they are finished."""
    if workers == 1:
        for number in files:
            yield number, write_file(folder, drives, number, mix)
        return
    context = multiprocessing.get_context('spawn')
    gpus, turns = _drawing_gpus(), context.Queue()
    for worker in range(workers if gpus else 0):
        turns.put(gpus[worker % len(gpus)])
    with ProcessPoolExecutor(workers, context, _start_worker, (turns if gpus else None,)) as pool:
        jobs = {pool.submit(write_file, folder, drives, number, mix): number for number in files}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def write_file(folder: Path, drives: Drives, number: int, mix: Mapping[str, float]) -> Shard:
    """Simulate and write the episodes of one file of the dataset."""
    from worldmodel_ros.sim.rollout import array_shapes, drive_episode
    from worldmodel_ros.sim.world import World
    first = number * drives.episodes_per_file
    last = min(first + drives.episodes_per_file, drives.episodes)
    writer = ShardWriter(folder, drives.layout, _tasks(mix), number, first, first * drives.frames)
    world = World(image_size=drives.preset.image_size)
    # One step more than is kept, for the action executed after the last frame.
    shapes = array_shapes(1, drives.frames + 1, drives.preset.image_size)
    arrays = {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in shapes.items() if len(shape) > 1}
    for episode in range(first, last):
        task = _task(drive_episode(world, drives.first_seed + episode, mix, arrays))
        for t in range(drives.frames):
            writer.add(arrays['frames'][t], arrays['actions'][t], arrays['actions'][t + 1], task, {
                EXPERT: arrays['expert'][t].ravel(), SEARCH: arrays['search'][t], CONTACT: bool(arrays['collided'][t]),
                DISTANCE: arrays['goal_distance'][t], VISIBLE: arrays['visible'][t], POSE: arrays['poses'][t]})
        writer.end_episode()
    return writer.close()


def _task(driver: str) -> str:
    return f'driven by {driver}'


def _tasks(mix: Mapping[str, float]) -> dict[str, int]:
    """Numbers of the tasks, the same in every process."""
    return {_task(driver): number for number, driver in enumerate(mix)}


def _drawing_gpus() -> list[str]:
    """GPUs that EGL can render on, if the choice is free; each is tried in its own process."""
    if os.environ.get('MUJOCO_GL', '').lower() != 'egl' or 'MUJOCO_EGL_DEVICE_ID' in os.environ:
        return []
    tried = [subprocess.Popen([sys.executable, '-c', 'import mujoco.egl'], stderr=subprocess.DEVNULL,
                              env={**os.environ, 'MUJOCO_EGL_DEVICE_ID': str(gpu)})
             for gpu in range(len(list(Path('/dev').glob('nvidia[0-9]*'))))]
    return [str(gpu) for gpu, process in enumerate(tried) if process.wait() == 0]


def _start_worker(turns: multiprocessing.Queue | None) -> None:
    """Choose the worker's GPU before MuJoCo is imported, which fixes its device."""
    if turns is not None:
        os.environ['MUJOCO_EGL_DEVICE_ID'] = turns.get()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.data.simulate',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--episodes', type=int, default=60)
    parser.add_argument('--frames', type=int, default=120, help='frames an episode, 10 a second (default: 120)')
    parser.add_argument('--first-seed', type=int, default=0, help='seeds below 1000000 are for training')
    parser.add_argument('--preset', choices=PRESETS, default='tiny', help='decides the size of the images')
    parser.add_argument('--workers', type=int, help='processes (default: one for each core)')
    parser.add_argument('--out', type=Path, required=True, help='new folder for the dataset')
    options = parser.parse_args(arguments)
    drives = Drives(options.first_seed, options.episodes, options.frames, PRESETS[options.preset])
    simulate(options.out, drives, options.workers)
    print(json.dumps({'episodes': drives.episodes, 'frames': drives.episodes * drives.frames}))
    return 0


if __name__ == '__main__':
    sys.exit(main())

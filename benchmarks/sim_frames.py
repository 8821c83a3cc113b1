"""How long the simulator takes for one frame, 0.1 s of physics and an image of 64x64, in each kind of scene."""
import argparse
import time
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.sim.task_scenes import SCENES, Variant, task_scene
from worldmodel_ros.sim.world import World


def measure(world: World, frames: int) -> dict:
    """Return milliseconds of the physics and of the image, p50 and p99, of a robot that drives in circles."""
    times = np.empty((frames, 2))
    for i in range(-10, frames):  # the first frames warm up
        began = time.perf_counter()
        world.step((0.2, 1.0))
        stepped = time.perf_counter()
        world.render()
        if i >= 0:
            times[i] = stepped - began, time.perf_counter() - stepped
    rows = {'physics': times[:, 0], 'picture': times[:, 1], 'frame': times.sum(1)}
    return {f'{name}_ms': {'p50': round(float(np.median(row)) * 1e3, 3), 'p99': round(float(np.quantile(row, 0.99)) * 1e3, 3)}
            for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--frames', type=int, default=300, help='of each kind of scene (default: 300)')
    parser.add_argument('--seed', type=int, default=5000000)
    parser.add_argument('--json', type=Path, help='file for the result')
    chosen = parser.parse_args()
    world, rows = World(), {}
    for kind in SCENES:
        for name, variant in ((kind, Variant()), (f'{kind}, shifted', Variant(shifted=True))):
            if 'shifted' in name and kind != 'street':
                continue
            world.load(task_scene(kind, chosen.seed, variant))
            rows[name] = measure(world, chosen.frames)
    write_result({**provenance(('mujoco', 'numpy')), 'scenes': rows}, chosen.json, show=True)


if __name__ == '__main__':
    main()

"""Times the warp by camera_info that shows a model the image of another camera, compared with cropping and scaling."""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.inputs.camera import Lens, View
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.sim.cameras import WIDE, WIDER

SIZE = (64, 64)
# By name: size, focal length, distortion.
CAMERAS = {
    '640x480, plumb_bob, 110 degrees across': Lens(WIDE.size, (WIDE.focal,) * 2, WIDE.centre, 'plumb_bob', WIDE.distortion),
    '640x480, plumb_bob, 110 degrees down': Lens(WIDER.size, (WIDER.focal,) * 2, WIDER.centre, 'plumb_bob', WIDER.distortion),
    '640x480, equidistant': Lens((480, 640), (240.0,) * 2, (319.5, 239.5), 'equidistant', (-0.02, 0.001, 0.0, 0.0)),
    '1920x1080, plumb_bob': Lens((1080, 1920), (480.0,) * 2, (959.5, 539.5), 'plumb_bob', (-0.05, 0.003, 0.0, 0.0, 0.0))}


def milliseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return p50 and p99 of a call, in wall-clock time and in CPU time, which other load affects less."""
    times = []
    for k in range(-10, repeats):  # the first ones warm up
        wall, core = time.perf_counter(), time.thread_time()
        call()
        if k >= 0:
            times.append((time.perf_counter() - wall, time.thread_time() - core))
    wall, core = np.array(times).T * 1e3
    return {name: round(float(np.quantile(values, q)), 3)
            for name, values, q in (('p50', wall, 0.5), ('p99', wall, 0.99), ('core_p50', core, 0.5), ('core_p99', core, 0.99))}


def measure(lens: Lens, repeats: int) -> dict:
    """Return milliseconds for one image of a lens: the warp, cropping and scaling instead, and the map, which is made once."""
    image = np.random.default_rng(0).integers(0, 256, (*lens.size, 3), np.uint8)
    view = View(lens, 90.0, SIZE)
    return {'warp_ms': milliseconds(lambda: view(image, SIZE), repeats),
            'crop_ms': milliseconds(lambda: fit(image, SIZE), repeats),
            'map_ms': milliseconds(lambda: View(lens, 90.0, SIZE), 20), 'is': view.in_words()}


def main() -> None:
    """Measure every camera."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--repeats', type=int, default=1000)
    parser.add_argument('--json', type=Path, metavar='FILE')
    chosen = parser.parse_args()
    cv2.setNumThreads(1)
    write_result({**provenance(('numpy', 'opencv-python-headless')),
                  'cameras': {name: measure(lens, chosen.repeats) for name, lens in CAMERAS.items()}}, chosen.json, show=True)


if __name__ == '__main__':
    main()

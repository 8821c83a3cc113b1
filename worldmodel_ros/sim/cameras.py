"""Cameras other than the simulator's own: larger images, a wider view, distortion, another mount."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np

from worldmodel_ros.sim.world import World


@dataclass(frozen=True)
class RobotCamera:
    """A camera with a lens, as described by a calibration (sensor_msgs/CameraInfo, ``plumb_bob``).

    ``size``: (height, width) of its images. ``focal`` and ``centre``: pixels. ``distortion``: k1, k2, p1, p2, k3. ``higher``
    (m) and ``lower_pitch`` (rad, downwards): how its mount differs from the simulated robot's own.
    """

    size: tuple[int, int]
    focal: float
    centre: tuple[float, float]
    distortion: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    higher: float = 0.0
    lower_pitch: float = 0.0

    def render(self, world: World) -> np.ndarray:
        """Return what the camera sees of a world, uint8 (H, W, 3) RGB, without noise."""
        size, fov, maps = self._drawing
        ideal = world.draw_camera(size, fov, self.higher, self.lower_pitch)
        return ideal if maps is None else cv2.remap(ideal, *maps, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)

    @cached_property
    def _drawing(self) -> tuple[tuple[int, int], float, tuple[np.ndarray, np.ndarray] | None]:
        """Size and vertical field of view (degrees) of a pinhole image that contains the view, and the map from it."""
        height, width = self.size
        (cx, cy), focal = self.centre, self.focal
        if not any(self.distortion) and (cx, cy) == ((width - 1) / 2, (height - 1) / 2):
            return self.size, 2.0 * math.degrees(math.atan(height / 2 / focal)), None
        matrix = np.array([[focal, 0.0, cx], [0.0, focal, cy], [0.0, 0.0, 1.0]])
        pixels = np.stack(np.meshgrid(np.arange(width), np.arange(height)), 2).reshape(-1, 1, 2).astype(float)
        slopes = cv2.undistortPoints(pixels, matrix, np.array(self.distortion)).reshape(height, width, 2)
        across, down = np.abs(slopes).max((0, 1))
        rows, columns = 2 * math.ceil(down * focal) + 2, 2 * math.ceil(across * focal) + 2
        places = slopes * focal + ((columns - 1) / 2, (rows - 1) / 2)
        return (rows, columns), 2.0 * math.degrees(math.atan(rows / 2 / focal)), cv2.convertMaps(
            places.astype(np.float32), None, cv2.CV_16SC2)


TRAINED = RobotCamera((64, 64), 32.0, (31.5, 31.5))  # the simulator's own: 90 degrees both ways
# Two webcams with wide lenses, slight barrel distortion, and a slightly off-centre axis: 110 degrees across, and 110 degrees
# down.
WIDE = RobotCamera((480, 640), 249.0, (311.5, 242.5), (-0.05, 0.003, 0.001, -0.001, 0.0))
WIDER = RobotCamera((480, 640), 178.0, (313.5, 235.5), (-0.03, 0.001, 0.001, -0.001, 0.0))

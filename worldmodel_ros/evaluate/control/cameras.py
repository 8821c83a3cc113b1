"""Cameras other than the trained one, for controllers that see: corrected as by the node, uncorrected, mounted elsewhere."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from worldmodel_ros.inputs.camera import Lens, View
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.sim.cameras import TRAINED, WIDE, WIDER, RobotCamera
from worldmodel_ros.sim.scene import CAMERA_FOV_DEG
from worldmodel_ros.sim.world import World

_TRAINED_SIZE = (64, 64)


@dataclass(frozen=True)
class OtherCamera:
    """A robot's camera, whose images are warped to the trained view by its calibration or, if not ``corrected``, cropped and
    scaled. ``level``: its pitch is known, and corrected."""

    camera: RobotCamera
    corrected: bool = True
    level: bool = False

    @cached_property
    def _view(self) -> View:
        camera = self.camera
        lens = Lens(camera.size, (camera.focal, camera.focal), camera.centre, 'plumb_bob', camera.distortion)
        return View(lens, CAMERA_FOV_DEG, _TRAINED_SIZE, math.degrees(camera.lower_pitch) if self.level else 0.0)

    def look(self, world: World, size: tuple[int, int]) -> np.ndarray:
        """Return the model's input, uint8 (H, W, 3) RGB of ``size`` (H, W)."""
        image = self.camera.render(world)
        return self._view(image, size) if self.corrected else fit(image, size)


HEIGHTS = (-0.10, -0.05, -0.03, 0.03, 0.05, 0.10)  # m, by which the trained camera stands higher
PITCHES = (-10, -5, -2, 2, 5, 10)                         # degrees, by which it looks further down, uncorrected

CAMERAS: Mapping[str, OtherCamera] = {
    'camera_wide': OtherCamera(WIDE), 'camera_wide_uncorrected': OtherCamera(WIDE, corrected=False),
    'camera_wider': OtherCamera(WIDER), 'camera_wider_uncorrected': OtherCamera(WIDER, corrected=False),
    'camera_128': OtherCamera(replace(TRAINED, size=(128, 128), focal=64.0, centre=(63.5, 63.5)), corrected=False),
    'camera_higher': OtherCamera(replace(WIDE, higher=0.1)),
    'camera_pitched': OtherCamera(replace(WIDER, lower_pitch=math.radians(5.0)), level=True),
    'camera_pitched_uncorrected': OtherCamera(replace(WIDER, lower_pitch=math.radians(5.0))),
    **{f'camera_height_{higher:+.2f}': OtherCamera(replace(TRAINED, higher=higher)) for higher in HEIGHTS},
    **{f'camera_pitch_{steeper:+d}': OtherCamera(replace(TRAINED, lower_pitch=math.radians(steeper))) for steeper in PITCHES}}

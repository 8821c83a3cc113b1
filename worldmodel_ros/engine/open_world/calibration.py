"""A robot's camera and base as inputs of the networks: intrinsics of the resized image, and 3D poses."""
from __future__ import annotations

import numpy as np

from ...model.wan.camera import Intrinsics


def fitted(k: np.ndarray, size: tuple[int, int], to: tuple[int, int]) -> Intrinsics:
    """Return the intrinsics of images of ``size`` (height, width), with the matrix K (3, 3) of a rectified CameraInfo, after
    ``inputs.images.fit`` has centre-cropped them to the aspect ratio of ``to`` and scaled them. Raises ValueError for an
    invalid K."""
    if not np.isfinite(k).all() or min(k[0, 0], k[1, 1], *size) <= 0.0:
        raise ValueError(f'K {k.tolist()} of images of {size[0]}x{size[1]} is that of no calibrated camera')
    scale = min(size[0] / to[0], size[1] / to[1])
    height, width = max(1, round(to[0] * scale)), max(1, round(to[1] * scale))
    return Intrinsics.of_ros(k).cropped((size[0] - height) // 2, (size[1] - width) // 2).scaled((height, width), to)


def base_pose(pose: np.ndarray) -> np.ndarray:
    """Convert x, y, yaw on the ground to a pose (4, 4)."""
    x, y, yaw = pose
    out = np.eye(4)
    out[0, :2], out[1, :2] = (np.cos(yaw), -np.sin(yaw)), (np.sin(yaw), np.cos(yaw))
    out[:2, 3] = x, y
    return out

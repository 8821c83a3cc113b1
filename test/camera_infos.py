"""CameraInfo messages of test cameras, without ROS."""
import math
from types import SimpleNamespace


def camera_info(size, across, distortion=(), model='plumb_bob', **other):
    """Return the CameraInfo of a pinhole of ``size`` (H, W) with ``across`` degrees, before distortion."""
    height, width = size
    f, cx, cy = width / 2 / math.tan(math.radians(across) / 2), (width - 1) / 2, (height - 1) / 2
    return SimpleNamespace(**{
        'height': height, 'width': width, 'distortion_model': model, 'd': list(distortion),
        'k': [f, 0.0, cx, 0.0, f, cy, 0.0, 0.0, 1.0], 'p': [f, 0.0, cx, 0.0, 0.0, f, cy, 0.0, 0.0, 0.0, 1.0, 0.0],
        'binning_x': 0, 'binning_y': 0, 'roi': SimpleNamespace(x_offset=0, y_offset=0, height=0, width=0), **other})

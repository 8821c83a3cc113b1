"""A camera's raw images, any encoding, size, step and stamp: refused by name, or RGB of the model's size."""
from __future__ import annotations

from array import array

import numpy as np
from pixel_encodings import ALIKE, EXACT
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.inputs import images
from worldmodel_ros.inputs.ticks import Frames, FrameSettings
from worldmodel_ros.inputs.images import ImageError

from . import ros
from .harness import Bytes

SIZE = (16, 16)
_EVERY = FrameSettings(every_image=True)


def seeds() -> list[bytes]:
    """Return an image in each encoding, with and without padded rows."""
    frame = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    found = []
    for encoding, encode in {**EXACT, **ALIKE}.items():
        rows = np.ascontiguousarray(encode(frame)).reshape(6, -1)
        for padding in (0, 3):
            padded = np.pad(rows, ((0, 0), (0, padding)))
            found.append(serialize_message(Image(height=6, width=8, encoding=encoding, step=padded.shape[1],
                                                 data=array('B', padded.tobytes()))))
    return found


def judge(message: Image | CompressedImage) -> bool:
    """Read an image, alone and as one of a camera's."""
    frames = Frames(0.1, SIZE)
    stamp = message.header.stamp.sec * 10 ** 9 + message.header.stamp.nanosec
    try:
        for k in range(3):
            frames.take(message, stamp + k * 10 ** 8, True, 0.1 * k, _EVERY)
        rgb = images.read(message, SIZE)
    except ImageError:
        return False
    assert rgb.shape == (*SIZE, 3) and rgb.dtype == np.uint8
    return True


TARGET = Bytes(seeds, ros.target_of(Image, judge), inputs=100_000, mutate=ros.damaged(Image), resident=True,
               constant=8 * 2 ** 20, factor=16.0)

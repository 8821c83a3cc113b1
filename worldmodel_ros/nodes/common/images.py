"""Pictures as ROS messages."""

from array import array

import cv2
import numpy as np
from builtin_interfaces.msg import Time
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Header

_JPEG_QUALITY = (cv2.IMWRITE_JPEG_QUALITY, 90)


def to_jpeg(rgb: np.ndarray, stamp: Time, frame_id: str) -> CompressedImage:
    """Return RGB, uint8 (H, W, 3), as JPEG."""
    _, encoded = cv2.imencode('.jpg', cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), _JPEG_QUALITY)
    # An ndarray would be copied element by element, which takes a thousand times as long.
    return CompressedImage(
        header=Header(stamp=stamp, frame_id=frame_id), format='jpeg', data=array('B', encoded.tobytes()))

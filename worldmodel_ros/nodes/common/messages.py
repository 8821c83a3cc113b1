"""Conversions between Python values and message fields: stamps, headers, arrays and images."""

from array import array

import numpy as np
from builtin_interfaces.msg import Duration, Time
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Header

NS = 1_000_000_000  # per second
_JPEG_QUALITY = 90  # of 100


def time_message(stamp: int) -> Time:
    """Return ``stamp`` [ns] as a message."""
    return Time(sec=stamp // NS, nanosec=stamp % NS)


def duration_message(duration: int) -> Duration:
    """Return ``duration`` [ns] as a message."""
    return Duration(sec=duration // NS, nanosec=duration % NS)


def nanoseconds(message: Time | Duration) -> int:
    """Return a time or a duration in ns."""
    return message.sec * NS + message.nanosec


def header(stamp: int, frame_id: str) -> Header:
    """Return a header for ``stamp`` [ns]."""
    return Header(stamp=time_message(stamp), frame_id=frame_id)


def float32s(values: np.ndarray) -> array:
    """Return an array of any shape as the flat value of a float32[] field."""
    return array('f', np.ascontiguousarray(values, np.float32).tobytes())


def to_jpeg(rgb: np.ndarray, stamp: Time, frame_id: str) -> CompressedImage:
    """Return RGB, uint8 (H, W, 3), as JPEG."""
    import cv2  # lazily: the gate and the recorder encode no images and start faster without it
    _, encoded = cv2.imencode('.jpg', cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), (cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY))
    # An ndarray would be copied element by element, a thousand times slower.
    return CompressedImage(
        header=Header(stamp=stamp, frame_id=frame_id), format='jpeg', data=array('B', encoded.tobytes()))


def frames(pictures: np.ndarray, stamp: int, step_period: float, frame_id: str) -> list:
    """Return RGB frames, uint8 (T, H, W, 3), as JPEG, each with the stamp of its time; ``stamp`` [ns]: the observation's."""
    return [to_jpeg(picture, time_message(stamp + round((k + 1) * step_period * NS)), frame_id)
            for k, picture in enumerate(pictures)]

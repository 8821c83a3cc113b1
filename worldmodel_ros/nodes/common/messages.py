"""Stamps, headers and arrays as the fields of messages."""

from array import array

import numpy as np
from builtin_interfaces.msg import Duration, Time
from std_msgs.msg import Header

NS = 1_000_000_000  # in a second


def time_message(stamp: int) -> Time:
    """Return `stamp` [ns] as a message."""
    return Time(sec=stamp // NS, nanosec=stamp % NS)


def duration_message(duration: int) -> Duration:
    """Return `duration` [ns] as a message."""
    return Duration(sec=duration // NS, nanosec=duration % NS)


def nanoseconds(message: Time | Duration) -> int:
    """Return a time or a duration in ns."""
    return message.sec * NS + message.nanosec


def header(stamp: int, frame_id: str) -> Header:
    """Return a header for `stamp` [ns]."""
    return Header(stamp=time_message(stamp), frame_id=frame_id)


def float32s(values: np.ndarray) -> array:
    """Return an array of any shape as the value of a float32[] field."""
    return array('f', np.ascontiguousarray(values, np.float32).tobytes())

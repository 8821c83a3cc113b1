"""Faults that the simulated robot can be told to have, to try out what the others make of them."""

from collections.abc import Mapping
from typing import Any

from sensor_msgs.msg import Image


def spoil(message: Image, faults: Mapping[str, Any]) -> None:
    """Put the faults `camera_encoding` and `camera_break` into a sound image."""
    message.encoding = faults['camera_encoding']
    kind = faults['camera_break']
    if kind == 'empty':
        del message.data[:]
    elif kind == 'short':
        del message.data[len(message.data) // 2:]
    elif kind == 'wrong_size':
        message.height *= 2

"""Faults that the simulated robot can be told to have, to try out what the others make of them."""

from collections.abc import Mapping
from typing import Any

from sensor_msgs.msg import Image

from worldmodel_ros.nodes.common.parameters import ALLOW_FAULTS, Param

BREAKS = ('none', 'empty', 'short', 'wrong_size')
MAX_CLOCK_OFFSET = 900.0  # s

FAULTS = (
    ALLOW_FAULTS,
    Param('camera_stop', False, 'Fault: publish no more images.', fault=True),
    Param('camera_freeze', False, 'Fault: publish the same picture again and again, with new stamps.',
          fault=True),
    Param('camera_encoding', 'rgb8', 'Fault unless rgb8: the encoding that raw images claim to have.',
          fault=True),
    Param('camera_break', 'none', 'Fault unless none: raw images without data, with half of their data, or '
          'with twice the height that the data have.', choices=BREAKS, fault=True),
    Param('clock_stop', False, 'Fault: publish no more /clock (with publish_clock).', fault=True),
    Param('clock_offset_s', 0.0, 'Fault unless 0: added to all stamps and to /clock; a change is a jump.',
          low=-MAX_CLOCK_OFFSET, high=MAX_CLOCK_OFFSET, fault=True),
)


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

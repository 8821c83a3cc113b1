"""
Raw images in the encodings of sensor_msgs/Image to RGB, by cv_bridge where it can be trusted, else by OpenCV alone.

A cv_bridge need not know every encoding (that of ROS 2 Jazzy knows yuv422 and yuv422_yuy2, but not their newer names
uyvy and yuyv), need not fit the numpy that is installed, and need not be right: the one on PyPI reads padded rows
wrongly without an error. So one that is found is probed with every encoding, and is used for those that it converts
to exactly the same pixels as the conversion here; a recording is then read alike on any machine.
"""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from .images import Image

# Channels in memory, and OpenCV's conversion to RGB (None: it is RGB already). OpenCV names Bayer patterns by
# other pixels than ROS does; its aliases with all four letters are the ones that agree.
ENCODINGS: dict[str, tuple[int, int | None]] = {
    'rgb8': (3, None), 'bgr8': (3, cv2.COLOR_BGR2RGB), 'rgba8': (4, cv2.COLOR_RGBA2RGB),
    'bgra8': (4, cv2.COLOR_BGRA2RGB), 'mono8': (1, cv2.COLOR_GRAY2RGB),
    'uyvy': (2, cv2.COLOR_YUV2RGB_UYVY), 'yuv422': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuyv': (2, cv2.COLOR_YUV2RGB_YUYV), 'yuv422_yuy2': (2, cv2.COLOR_YUV2RGB_YUYV),
    'bayer_rggb8': (1, cv2.COLOR_BayerRGGB2RGB), 'bayer_bggr8': (1, cv2.COLOR_BayerBGGR2RGB),
    'bayer_gbrg8': (1, cv2.COLOR_BayerGBRG2RGB), 'bayer_grbg8': (1, cv2.COLOR_BayerGRBG2RGB)}
_PROBE = (24, 50)  # rows and columns of pixels: even, and wide enough for OpenCV's vectorised loops
_PADDING = 6      # bytes at the end of each row

Converter = Callable[['Image'], np.ndarray]


def convert_colour(message: Image) -> np.ndarray:
    """Return a raw image that was checked as RGB, uint8 (H, W, 3) of the message's size."""
    channels, code = ENCODINGS[message.encoding]
    rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
    pixels = rows[:, :message.width * channels].reshape(message.height, message.width, channels)
    if code is None:
        return pixels
    return cv2.cvtColor(np.ascontiguousarray(pixels), code)


@lru_cache(maxsize=1)
def converter() -> Converter:
    """
    Return what converts a checked image to RGB, and may raise anything.

    The first call may take a second, if there is a cv_bridge to be probed: call it before the first image.
    """
    if 'ROS_DISTRO' not in os.environ or importlib.util.find_spec('cv_bridge') is None:
        return convert_colour
    # In a process of its own, because a cv_bridge that was built for another numpy may crash rather than
    # raise.
    program = f'import {__name__} as colours; print(*colours.probed(colours.cv_bridge_converter()))'
    probe = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    trusted = ENCODINGS.keys() & probe.stdout.split() if probe.returncode == 0 else ()
    if not trusted:
        return convert_colour
    try:
        convert = cv_bridge_converter()
    except ImportError:  # its libraries need not go together with those that are loaded here already
        return convert_colour
    return lambda message: (convert if message.encoding in trusted else convert_colour)(message)


def cv_bridge_converter() -> Converter:
    """Return a converter that is cv_bridge. Raises ImportError where there is none."""
    from cv_bridge import CvBridge
    bridge = CvBridge()
    return lambda message: bridge.imgmsg_to_cv2(message, 'rgb8')


def probed(convert: Converter) -> list[str]:
    """Return the encodings of which a converter makes what `convert_colour` makes of them, with padded rows too."""
    return [encoding for encoding in ENCODINGS if _agrees(convert, encoding)]


def _agrees(convert: Converter, encoding: str) -> bool:
    height, width = _PROBE
    step = width * ENCODINGS[encoding][0] + _PADDING
    data = np.random.default_rng(0).integers(0, 256, height * step, np.uint8)
    message = SimpleNamespace(
        height=height, width=width, encoding=encoding, is_bigendian=0, step=step, data=array('B', data.tobytes()))
    try:
        return np.array_equal(convert(message), convert_colour(message))
    except Exception:
        return False

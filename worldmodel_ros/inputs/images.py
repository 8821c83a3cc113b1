"""
Reads image messages as the model sees them: RGB, uint8 (H, W, 3), at the model's size.

A message is any object with the fields of sensor_msgs/Image or sensor_msgs/CompressedImage; ``data`` may be any
buffer of bytes. So the image is the same, bit for bit, whether it came over a topic or out of a bag.

Messages are checked strictly before conversion, because a wrongly read image is worse than none. Colours are converted
by cv_bridge if it can be trusted, else by OpenCV alone. A cv_bridge may not know every encoding (that of ROS 2 Jazzy
knows yuv422 and yuv422_yuy2, but not their newer names uyvy and yuyv), may not match the installed numpy, and may be
wrong: the one on PyPI reads padded rows wrongly without an error. So an installed one is probed with every encoding, and
is used for those that it converts to exactly the same pixels as the conversion here; a recording then reads the same on
any machine.
"""
from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Protocol

import cv2
import numpy as np

# Channels in memory, and OpenCV's conversion to RGB (None: already RGB). OpenCV names Bayer patterns by other
# pixels than ROS does; its aliases with all four letters agree.
ENCODINGS: dict[str, tuple[int, int | None]] = {
    'rgb8': (3, None), 'bgr8': (3, cv2.COLOR_BGR2RGB), 'rgba8': (4, cv2.COLOR_RGBA2RGB),
    'bgra8': (4, cv2.COLOR_BGRA2RGB), 'mono8': (1, cv2.COLOR_GRAY2RGB),
    'uyvy': (2, cv2.COLOR_YUV2RGB_UYVY), 'yuv422': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuyv': (2, cv2.COLOR_YUV2RGB_YUYV), 'yuv422_yuy2': (2, cv2.COLOR_YUV2RGB_YUYV),
    'bayer_rggb8': (1, cv2.COLOR_BayerRGGB2RGB), 'bayer_bggr8': (1, cv2.COLOR_BayerBGGR2RGB),
    'bayer_gbrg8': (1, cv2.COLOR_BayerGBRG2RGB), 'bayer_grbg8': (1, cv2.COLOR_BayerGRBG2RGB)}
_PROBE = (24, 50)  # rows and columns of pixels: even, and wide enough for OpenCV's vectorised loops
_PADDING = 6      # bytes at the end of each row
_DEPTH = ('16UC1', '32FC1', 'mono16')
# Bounds for compressed images: a few bytes can encode an image of any size, in any number of scans.
MAX_PIXELS = 2 ** 24
_MAX_SCANS = 64  # of a JPEG; progressive ones have about ten
_PNG = b'\x89PNG\r\n\x1a\n'
_MARKER = re.compile(rb'\xff+([^\x00\xff])', re.DOTALL)
_FRAMES = {*range(0xc0, 0xd0)} - {0xc4, 0xc8, 0xcc}  # markers of a frame header, which contains the size
_BARE = {0x01, *range(0xd0, 0xd8)}                   # markers without a length


class Image(Protocol):
    """A raw image: sensor_msgs/Image, as any library represents it."""

    height: int
    width: int
    encoding: str
    step: int
    data: Sequence[int]


class CompressedImage(Protocol):
    """A JPEG or PNG: sensor_msgs/CompressedImage, as any library represents it."""

    format: str
    data: Sequence[int]


Converter = Callable[[Image], np.ndarray]
Fit = Callable[[np.ndarray, tuple[int, int]], np.ndarray]  # brings RGB, uint8 (H, W, 3), to a size (H, W)


class ImageError(ValueError):
    """An image that cannot be used. ``kind`` is the kind of fault, for counters; the text says what to do."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def fit(rgb: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crop an image (H, W, 3) around its centre to the aspect of ``size`` = (H, W) and scale it to that; contiguous."""
    height, width = rgb.shape[:2]
    if (height, width) != size:
        scale = min(height / size[0], width / size[1])
        h, w = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        top, left = (height - h) // 2, (width - w) // 2
        # Average over all pixels, as a camera of that resolution would: picking single ones would alias.
        rgb = cv2.resize(rgb[top:top + h, left:left + w], size[::-1], interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(rgb)


def read(message: Image | CompressedImage, size: tuple[int, int], view: Fit = fit) -> np.ndarray:
    """Return an image, raw or compressed, as ``to_rgb`` or ``compressed_to_rgb`` does. Raises ImageError."""
    return to_rgb(message, size, view) if hasattr(message, 'encoding') else compressed_to_rgb(message, size, view)


def to_rgb(message: Image, size: tuple[int, int], view: Fit = fit) -> np.ndarray:
    """
    Return a raw image as RGB, uint8 (H, W, 3), brought to ``size`` by ``view``: by default cropped around its centre to that
    aspect and scaled.

    ``size`` is (H, W) in pixels. The result may share the memory of the message. Raises ImageError.
    """
    _check(message)
    try:
        rgb = converter()(message)
    except Exception as error:  # from cv_bridge or OpenCV; no caller expects theirs
        raise ImageError('not convertible', f'{message.width} x {message.height} pixels in {message.encoding} '
                         f'cannot be converted to RGB: {type(error).__name__}: {error}') from error
    return view(rgb, size)


def compressed_to_rgb(message: CompressedImage, size: tuple[int, int], view: Fit = fit) -> np.ndarray:
    """Return a JPEG or PNG as ``to_rgb`` does a raw image. Raises ImageError."""
    encoding = message.format.split(';')[0].strip()
    if 'compressedDepth' in message.format or encoding in _DEPTH:
        raise _depth(message.format)
    data = bytes(message.data)
    if not data:
        raise ImageError(
            'empty', 'the compressed image has no data: look for a failing camera driver or encoder')
    _check_complete(data)
    _check_size(data, message.format)
    try:
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        bgr = None
    if bgr is None:
        raise _undecodable(data, message.format)
    return view(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB), size)


def convert_colour(message: Image) -> np.ndarray:
    """Return a checked raw image as RGB, uint8 (H, W, 3) of the message's size."""
    channels, code = ENCODINGS[message.encoding]
    rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
    pixels = rows[:, :message.width * channels].reshape(message.height, message.width, channels)
    if code is None:
        return pixels
    return cv2.cvtColor(np.ascontiguousarray(pixels), code)


@lru_cache(maxsize=1)
def converter() -> Converter:
    """
    Return a function that converts a checked image to RGB, and may raise anything.

    The first call may take a second, if there is a cv_bridge to probe: call it before the first image.
    """
    if 'ROS_DISTRO' not in os.environ or importlib.util.find_spec('cv_bridge') is None:
        return convert_colour
    # In a subprocess, because a cv_bridge built for another numpy may crash rather than raise.
    program = f'import {__name__} as images; print(*images.probed(images.cv_bridge_converter()))'
    probe = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    trusted = ENCODINGS.keys() & probe.stdout.split() if probe.returncode == 0 else ()
    if not trusted:
        return convert_colour
    try:
        convert = cv_bridge_converter()
    except ImportError:  # its libraries may conflict with those already loaded here
        return convert_colour
    return lambda message: (convert if message.encoding in trusted else convert_colour)(message)


def cv_bridge_converter() -> Converter:
    """Return a converter that uses cv_bridge. Raises ImportError if there is none."""
    from cv_bridge import CvBridge
    bridge = CvBridge()
    return lambda message: bridge.imgmsg_to_cv2(message, 'rgb8')


def probed(convert: Converter) -> list[str]:
    """Return the encodings that a converter handles exactly as ``convert_colour`` does, also with padded rows."""
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


def _check(message: Image) -> None:
    height, width, step = message.height, message.width, message.step
    encoding, length = message.encoding, len(message.data)
    if encoding in _DEPTH:
        raise _depth(encoding)
    if encoding not in ENCODINGS:
        raise ImageError('wrong encoding', f'encoding {encoding!r} is not supported: publish one of '
                         f'{", ".join(ENCODINGS)}')
    if not (height and width and length):
        raise ImageError('empty', f'the image is empty ({width} x {height} pixels, {length} bytes): look for '
                         'a failing camera driver')
    channels = ENCODINGS[encoding][0]
    if step < width * channels:
        raise ImageError('wrong size', f'step is {step}, but a row of {width} pixels in {encoding} takes '
                         f'{width * channels} bytes: correct the camera driver')
    if length != step * height:
        raise ImageError('wrong size', f'{length} bytes of data, but {height} rows of step {step} are '
                         f'{step * height}: the image was cut short, or the camera driver is wrong')
    if channels == 2 and width % 2:
        raise ImageError(
            'wrong size', f'width is {width}, but {encoding} stores pixels in pairs: use an even width')
    if encoding.startswith('bayer') and (height < 4 or width < 4 or height % 2 or width % 2):
        raise ImageError('wrong size', f'{width} x {height} pixels in {encoding}: use an even width and '
                         'height, of at least 4')


def _check_complete(data: bytes) -> None:
    """Raise ImageError for a truncated image: OpenCV would silently fill the rest with grey."""
    end = data.rstrip(b'\0')  # some cameras pad
    cut_jpeg = data.startswith(b'\xff\xd8') and not end.endswith(b'\xff\xd9')
    cut_png = data.startswith(b'\x89PNG') and b'IEND' not in data[-16:]
    if cut_jpeg or cut_png:
        raise ImageError('cut short', f'the compressed image ends too early ({len(data)} bytes, no end '
                         'marker): look for a lossy connection to the camera')


def _check_size(data: bytes, form: str) -> None:
    """Raise ImageError for data that is neither JPEG nor PNG, or that would take long, or much memory, to decode."""
    size = struct.unpack_from('>II', data, 16) if data.startswith(_PNG) and len(data) > 24 else _jpeg_size(data)
    if size is None:
        raise _undecodable(data, form)
    if size[0] * size[1] > MAX_PIXELS:
        raise ImageError('too large', f'the compressed image has {size[0]} x {size[1]} pixels, {MAX_PIXELS} are decoded at '
                         'most: set the camera to a lower resolution')
    if data.startswith(b'\xff\xd8') and (scans := data.count(b'\xff\xda')) > _MAX_SCANS:
        raise ImageError('too large', f'the JPEG has {scans} scans, {_MAX_SCANS} are decoded at most: publish baseline JPEG')


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG, found as libjpeg finds them; None if there are none."""
    at = 2 if data.startswith(b'\xff\xd8') else len(data)
    while found := _MARKER.search(data, at):
        marker, at = found[1][0], found.end()
        if marker in _FRAMES and at + 7 <= len(data):
            height, width = struct.unpack_from('>HH', data, at + 3)
            return width, height
        if marker not in _BARE:
            if marker in (0xd8, 0xd9, 0xda) or at + 2 > len(data):
                return None  # image data begin, or end, before a frame header
            at += struct.unpack_from('>H', data, at)[0]
    return None


def _undecodable(data: bytes, form: str) -> ImageError:
    return ImageError('not decodable', f'{len(data)} bytes of format {form!r} cannot be decoded as an image by OpenCV: publish '
                      'JPEG or PNG')


def _depth(encoding: str) -> ImageError:
    return ImageError('depth image', f'{encoding!r} is a depth or 16-bit image, but the model needs colour: '
                      'remap the image topic to the colour camera')

"""A camera's compressed images: JPEG and PNG that are cut, damaged, or say that they are huge."""
from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from random import Random
from zlib import crc32

import cv2
import numpy as np
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage

from . import mutate, ros
from .harness import Bytes
from .images import judge

_FORMATS = ('jpeg', 'png', 'rgb8; jpeg compressed bgr8', '16UC1; compressedDepth', '')
_LARGEST = 320 * 2 ** 20  # bytes: the largest picture that is decoded, twice, and a progressive one's coefficients


def seeds() -> list[bytes]:
    """Return pictures in all formats that OpenCV writes, a camera's and others that nobody should send."""
    frame = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    forms = [('.jpg', ()), ('.jpg', (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)), ('.png', ()), ('.bmp', ()), ('.tiff', ())]
    found = []
    for suffix, options in forms:
        try:
            done, data = cv2.imencode(suffix, frame, options)
        except cv2.error:
            continue  # this OpenCV has it not
        if done:
            found.append(_message(data.tobytes(), 'png' if suffix == '.png' else 'jpeg'))
    _, grey = cv2.imencode('.png', frame[..., 0])
    return [*found, _message(grey.tobytes(), 'png')]


def _message(data: bytes, form: str) -> bytes:
    return serialize_message(CompressedImage(format=form, data=array('B', data)))


def damaged(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return a message with a damaged picture, or a damaged message."""
    message = ros.read(CompressedImage, data)
    if message is None or random.random() < 0.2:
        return mutate.havoc(data, random, corpus)
    picture, choice = bytes(message.data), random.random()
    if choice < 0.4:
        picture = _lying_size(picture, random)
    if choice > 0.3:
        picture = mutate.havoc(picture, random, [picture])
    if random.random() < 0.5:  # else most would be refused for their end alone
        picture += b'\xff\xd9' if picture.startswith(b'\xff\xd8') else b'IEND\xaeB`\x82'
    return _message(picture, random.choice(_FORMATS) if random.random() < 0.2 else message.format)


def _lying_size(picture: bytes, random: Random) -> bytes:
    size = [random.choice((0, 1, 255, 4000, 16_000, 30_000, 65_535)) for _ in range(2)]
    if picture.startswith(b'\x89PNG'):
        header = b'IHDR' + struct.pack('>II', *size) + picture[24:29]
        return picture[:12] + header + struct.pack('>I', crc32(header)) + picture[33:]
    for marker in (b'\xff\xc0', b'\xff\xc2'):
        at = picture.find(marker)
        if at > 0:
            return picture[:at + 5] + struct.pack('>HH', *size) + picture[at + 9:]
    return picture


TARGET = Bytes(seeds, ros.target_of(CompressedImage, judge), inputs=50_000, mutate=damaged, resident=True,
               constant=_LARGEST)

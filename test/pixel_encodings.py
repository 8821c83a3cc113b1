"""Pixels as cameras encode them, the inverse of worldmodel_ros.inputs.images."""
import numpy as np


def alpha(pixels):
    return np.dstack([pixels, np.full(pixels.shape[:2], 9, np.uint8)])


def mosaic(pixels, pattern):
    """Return a Bayer sensor's view of RGB; ``pattern`` names the colours of the top left 2 x 2 pixels."""
    channel = ['rgb'.index(colour) for colour in pattern]
    result = np.empty(pixels.shape[:2], np.uint8)
    for k, c in enumerate(channel):
        result[k // 2::2, k % 2::2] = pixels[k // 2::2, k % 2::2, c]
    return result


def uyvy(pixels, chroma=0):
    """
    Return pixels in pairs that share chroma, ITU-R BT.601 in video range; ``chroma``: its byte, 0 or 1.
    """
    red, green, blue = np.moveaxis(pixels.astype(float), 2, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    cb, cr = 128 + (blue - luma) * 0.564 * 224 / 255, 128 + (red - luma) * 0.713 * 224 / 255
    packed = np.empty((*pixels.shape[:2], 2), np.uint8)
    packed[..., 1 - chroma] = 16 + luma * 219 / 255
    packed[:, ::2, chroma] = cb[:, ::2]
    packed[:, 1::2, chroma] = cr[:, ::2]
    return packed


EXACT = {
    'rgb8': lambda p: p, 'bgr8': lambda p: p[..., ::-1], 'rgba8': alpha,
    'bgra8': lambda p: alpha(p[..., ::-1])}
ALIKE = {f'bayer_{pattern}8': lambda p, pattern=pattern: mosaic(p, pattern)
         for pattern in ('rggb', 'bggr', 'gbrg', 'grbg')}
ALIKE.update({'yuv422': uyvy, 'uyvy': uyvy, 'yuv422_yuy2': lambda p: uyvy(p, 1),
              'yuyv': lambda p: uyvy(p, 1)})

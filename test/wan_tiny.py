"""A network of the Wan family small enough for a test, with weights and inputs that any program can reproduce.

All numbers come from NumPy's frozen Mersenne Twister, each tensor's by its name: the program that made the fixtures of
``test/fixtures/wan`` (tools/wan_reference.py) drew the same.
"""
import zlib

import numpy as np
import torch

GRID = 5, 7  # rows and columns of tokens in a frame
LATENT = 10, 14
HEADS, HEAD_DIM, LAYERS, FFN, TEXT_WIDTH, TEXT_TOKENS, TEXT_ROWS = 2, 128, 3, 512, 32, 24, 5


def draw(name, *shape, scale=1.0):
    """Return float32 numbers determined by a name."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy((scale * numbers).astype(np.float32))


def weight(name, shape):
    """Return a tensor of a checkpoint, without zeros or ones, since either would hide a mistake."""
    if len(shape) > 1 and not name.endswith('modulation'):
        return draw(name, *shape, scale=1.0 / np.sqrt(np.prod(shape[1:])))
    if 'norm' in name and name.endswith('weight'):
        return 1.0 + draw(name, *shape, scale=0.2)
    return draw(name, *shape, scale=0.5 if name.endswith('modulation') else 0.1)


class Drawn:
    """``model.weights.Weights``, from ``weight``."""

    def take(self, name, shape, part):
        whole = weight(name, tuple(shape))
        return whole if part is None else part.of(whole)


def text():
    return draw('text', TEXT_ROWS, TEXT_WIDTH)


def noise(chunk, frames):
    """Return the noise of each step of a chunk."""
    return lambda step: draw(f'noise {chunk} {step}', 16, frames, *LATENT)


def condition(chunk, frames):
    return draw(f'condition {chunk}', 20, frames, *LATENT)


def poses(frames):
    """Return the poses of a camera that turns and moves, (frames, 4, 4), float64."""
    out = np.tile(np.eye(4), (frames, 1, 1))
    for at in range(frames):
        yaw, pitch = 0.07 * at, 0.2 * np.sin(0.4 * at)
        turn = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
        tilt = np.array([[1, 0, 0], [0, np.cos(pitch), -np.sin(pitch)], [0, np.sin(pitch), np.cos(pitch)]])
        out[at, :3, :3] = turn @ tilt
        out[at, :3, 3] = 0.1 * at, 0.02 * np.sin(at), 0.3 * np.sqrt(at)
    return out


INTRINSICS = 70.0, 66.0, 55.0, 41.0  # fx, fy, cx, cy of an image of LATENT * 8 pixels

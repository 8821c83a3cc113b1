"""Camera control: from poses and intrinsics to the rays that LingBot-World's networks take.

A pose is camera-to-world, (4, 4) with translations in metres, in the camera's optical frame (x right, y down, z forward; REP
103). A chunk's control is one pose per latent frame, relative to the previous one. Poses are computed in float64.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .config import PATCH, VAE_STRIDE


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera without distortion, in pixels: focal lengths and principal point; the centre of pixel (0, 0) is
    (0.5, 0.5)."""

    fx: float
    fy: float
    cx: float
    cy: float

    @classmethod
    def of_ros(cls, k: np.ndarray) -> Intrinsics:
        """Return those of the matrix K (3, 3) of a rectified ``CameraInfo``, where the centre of pixel (0, 0) is (0, 0)."""
        return cls(float(k[0, 0]), float(k[1, 1]), float(k[0, 2]) + 0.5, float(k[1, 2]) + 0.5)

    def scaled(self, size: tuple[int, int], to: tuple[int, int]) -> Intrinsics:
        """Return those after scaling the image from ``size`` to ``to``, (height, width) each."""
        y, x = to[0] / size[0], to[1] / size[1]
        return Intrinsics(self.fx * x, self.fy * y, self.cx * x, self.cy * y)

    def cropped(self, top: float, left: float) -> Intrinsics:
        """Return those after cutting ``top`` and ``left`` pixels off the image."""
        return Intrinsics(self.fx, self.fy, self.cx - left, self.cy - top)


def video_size(height: int, width: int, area: int = 480 * 832) -> tuple[int, int]:
    """Return the video size of the published models for an image: its shape, at most ``area`` pixels, whole tokens.

    480x832 gives 464x832, as there: both sides are rounded down, and rounding errors leave a little less than 480. Any size of
    whole tokens can be sampled without this function.
    """
    token = VAE_STRIDE * PATCH
    ratio = height / width
    sides = math.sqrt(area * ratio), math.sqrt(area / ratio)
    return tuple(int(side // VAE_STRIDE // PATCH * token) for side in sides)


def inverse(poses: np.ndarray) -> np.ndarray:
    """Invert rigid transforms (..., 4, 4)."""
    out = np.zeros_like(poses, np.float64)
    turned = np.swapaxes(poses[..., :3, :3], -1, -2)
    out[..., :3, :3], out[..., 3, 3] = turned, 1.0
    out[..., :3, 3] = -(turned @ poses[..., :3, 3, None])[..., 0]
    return out


def relative_poses(poses: np.ndarray, previous: np.ndarray | None, divisor: float) -> np.ndarray:
    """Return each of poses (F, 4, 4) relative to the one before, ``previous`` (4, 4) for the first: float64 (F, 4, 4).

    Without ``previous`` the first starts the sequence: the identity. Translations are divided by ``divisor``, in metres: it is
    fixed, so that a chunk does not depend on what comes later. The published code divides by the longest step of the whole
    trajectory (``longest_step``); here the robot's fastest step, its top speed times the time of a latent frame, replaces that.
    """
    if not divisor > 0.0:
        raise ValueError(f'translations cannot be divided by {divisor} m')
    poses = np.asarray(poses, np.float64)
    before = np.concatenate([(poses[0] if previous is None else np.asarray(previous, np.float64))[None], poses[:-1]])
    steps = inverse(before) @ poses
    if previous is None:
        steps[0] = np.eye(4)
    steps[:, :3, 3] /= divisor
    return steps


def longest_step(poses: np.ndarray) -> float:
    """Return the published code's divisor: the longest distance between successive poses (F, 4, 4), 1 if there is none."""
    steps = relative_poses(poses, None, 1.0)
    return float(np.linalg.norm(steps[:, :3, 3], axis=1).max()) or 1.0


def resample_poses(times: np.ndarray, poses: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Resample poses (n, 4, 4) at rising ``times`` (n,) in s to other times (m,): translations linearly, rotations along the
    shortest arc (slerp, Shoemake 1985). Raises ValueError outside of ``times``."""
    times, poses, at = (np.asarray(x, np.float64) for x in (times, poses, at))
    if len(times) < 2 or not (np.diff(times) > 0.0).all() or at.min() < times[0] or at.max() > times[-1]:
        raise ValueError(f'poses of rising times from {times.min()} to {times.max()} do not tell those from {at.min()} to '
                         f'{at.max()}')
    left = np.clip(times.searchsorted(at, 'right') - 1, 0, len(times) - 2)
    share = (at - times[left]) / (times[left + 1] - times[left])
    out = poses[left].copy()
    out[:, :3, 3] += share[:, None] * (poses[left + 1] - poses[left])[:, :3, 3]
    turn = np.swapaxes(out[:, :3, :3], 1, 2) @ poses[left + 1][:, :3, :3]
    out[:, :3, :3] = out[:, :3, :3] @ _exponential(share[:, None] * _logarithm(turn))
    return out


def twist_poses(start: np.ndarray, twists: np.ndarray, period: float, optical: np.ndarray) -> np.ndarray:
    """Return the camera's pose after each of a plan's twists: float64 (F, 4, 4).

    ``start`` (4, 4), the base's pose; ``twists`` (F, 6), linear (m/s) and angular (rad/s) velocities in the base's frame, each
    held for ``period`` s; ``optical`` (4, 4), the camera's optical frame in the base's (tf from base to camera).
    """
    pose, out = np.asarray(start, np.float64), []
    for twist in np.asarray(twists, np.float64):
        turn = _exponential(twist[None, 3:] * period)[0]
        step = np.eye(4)
        step[:3, :3], step[:3, 3] = turn, _left_jacobian(twist[3:] * period) @ twist[:3] * period
        pose = pose @ step
        out.append(pose @ optical)
    return np.stack(out)


def rays(poses: np.ndarray, intrinsics: Intrinsics, size: tuple[int, int], device: torch.device | str = 'cpu') -> Tensor:
    """Return origin and unit direction of each pixel's ray, float32 (F, height, width, 6), for relative poses (F, 4, 4).

    The networks call these six numbers Pluecker coordinates; the moment is not among them.
    """
    y, x = (torch.arange(count, device=device, dtype=torch.float32) + 0.5 for count in size)
    y, x = torch.meshgrid((y - intrinsics.cy) / intrinsics.fy, (x - intrinsics.cx) / intrinsics.fx, indexing='ij')
    directions = torch.nn.functional.normalize(torch.stack([x, y, torch.ones_like(x)], -1), dim=-1)
    poses = torch.from_numpy(np.asarray(poses, np.float32)).to(device)
    turned = directions @ poses[:, None, :3, :3].transpose(-1, -2)
    return torch.cat([poses[:, None, None, :3, 3].expand_as(turned), turned], -1)


def ray_tokens(rays: Tensor) -> Tensor:
    """Arrange rays (F, height, width, 6) for ``dit.WanDiT.camera_control``: all of a token's pixels side by side, (N, 1536),
    with N = F * height / 16 * width / 16."""
    f, height, width, c = rays.shape
    s, p = VAE_STRIDE, PATCH
    if height % (s * p) or width % (s * p):
        raise ValueError(f'{height}x{width} pixels are no tokens of {s * p}x{s * p}')
    x = rays.view(f, height // (s * p), p, s, width // (s * p), p, s, c)  # frame, row, p1, s1, column, p2, s2, number
    return x.permute(0, 1, 4, 7, 3, 6, 2, 5).reshape(f * height // (s * p) * width // (s * p), c * s * s * p * p)


def _logarithm(rotations: np.ndarray) -> np.ndarray:
    """Return the rotation vectors (n, 3) of matrices (n, 3, 3), via quaternions, which are exact also at half turns."""
    m = rotations
    diagonal = np.stack([m[:, 0, 0], m[:, 1, 1], m[:, 2, 2]], 1)
    trace = diagonal.sum(1, keepdims=True)
    # Four times each product of two parts (w, x, y, z); the row with the largest square is the most exact one.
    square = 1.0 + np.concatenate([trace, 2.0 * diagonal - trace], 1)
    wx, wy, wz = m[:, 2, 1] - m[:, 1, 2], m[:, 0, 2] - m[:, 2, 0], m[:, 1, 0] - m[:, 0, 1]
    xy, xz, yz = m[:, 1, 0] + m[:, 0, 1], m[:, 0, 2] + m[:, 2, 0], m[:, 2, 1] + m[:, 1, 2]
    w2, x2, y2, z2 = square.T
    table = (w2, wx, wy, wz), (wx, x2, xy, xz), (wy, xy, y2, yz), (wz, xz, yz, z2)
    products = np.stack([np.stack(row, 1) for row in table], 1)
    q = products[np.arange(len(m)), square.argmax(1)]
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    q *= np.where(q[:, :1] < 0.0, -1.0, 1.0)
    length = np.linalg.norm(q[:, 1:], axis=1, keepdims=True)
    angle = 2.0 * np.arctan2(length, q[:, :1])
    return q[:, 1:] * np.where(length > 1e-12, angle / np.maximum(length, 1e-12), 2.0)


def _exponential(vectors: np.ndarray) -> np.ndarray:
    """Return the rotation matrices (n, 3, 3) of rotation vectors (n, 3) (Rodrigues)."""
    angle = np.linalg.norm(vectors, axis=1)[:, None, None]
    cross = _cross(vectors)
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * np.sinc(angle / (2 * np.pi)) ** 2 * cross @ cross


def _left_jacobian(vector: np.ndarray) -> np.ndarray:
    """Return the mean of the rotations on the way to ``vector`` (3,), which integrates a velocity that turns with the body."""
    angle, cross = float(np.linalg.norm(vector)), _cross(vector[None])[0]
    if angle < 1e-6:
        return np.eye(3) + 0.5 * cross
    return np.eye(3) + (1 - math.cos(angle)) / angle ** 2 * cross + (angle - math.sin(angle)) / angle ** 3 * cross @ cross


def _cross(vectors: np.ndarray) -> np.ndarray:
    x, y, z = vectors.T
    zero = np.zeros_like(x)
    return np.stack([np.stack(row, 1) for row in ((zero, -z, y), (z, zero, -x), (-y, x, zero))], 1)

"""
Camera poses of clients: their validation, the robot's actions that lead to them, and the rays of their pixels.

A pose is camera-to-world, (4, 4) with translations in metres, of the camera's optical frame (x right, y down, z forward;
OpenCV, REP 103). Everything is computed in float64.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel_ros.model.presets import Preset

MOST = 128           # poses of one request
REACH = 0.05, math.radians(5.0)  # m and rad by which the robot's camera may miss a pose
_FARTHEST = 1e6      # m, and pixels
_ORTHONORMAL = 1e-3  # largest error of a rotation's products of rows
_MOTIONS = ('linear.x', 'linear.y', 'linear.z', 'angular.x', 'angular.y', 'angular.z')  # of the base, m/s and rad/s
_STRAIGHT = 1e-9     # rad below which a motion does not turn
_HALF_TURN = 3.1     # rad: close to pi the axis of a turn is not determined
# The optical frame in the camera body's (x forward, y left, z up).
_OPTICAL = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


class PoseError(ValueError):
    """A camera that is not accepted; the text says why."""


def read(camera: Any) -> tuple[np.ndarray, np.ndarray]:
    """
    Return poses (N, 4, 4) and intrinsics (N, 4), fx, fy, cx, cy in pixels, of a map {``poses``, ``intrinsics``}; a single row
    of intrinsics applies to all poses. Raises PoseError.
    """
    if not isinstance(camera, Mapping):
        raise PoseError('camera must be a map with poses (N, 4, 4) and intrinsics (N, 4)')
    given, rows = (_array(camera, name) for name in ('poses', 'intrinsics'))
    if given.ndim != 3 or given.shape[1:] != (4, 4) or not 0 < len(given) <= MOST:
        raise PoseError(f'poses must be (N, 4, 4), N from 1 to {MOST}, and are {given.shape}')
    if rows.shape not in ((4,), (1, 4), (len(given), 4)):
        raise PoseError(f'intrinsics must be ({len(given)}, 4), as there are {len(given)} poses, and are {rows.shape}')
    poses, intrinsics = given.astype(np.float64), rows.astype(np.float64)  # only now that their sizes are bounded
    for name, values in (('poses', poses), ('intrinsics', intrinsics)):
        if not np.isfinite(values).all():
            raise PoseError(f'{name} are not finite')
    if max(np.abs(poses).max(), np.abs(intrinsics).max()) > _FARTHEST:
        raise PoseError(f'poses and intrinsics have numbers up to {_FARTHEST:g}')
    turns = poses[:, :3, :3]
    errors = np.abs(np.swapaxes(turns, 1, 2) @ turns - np.eye(3)).max((1, 2))
    wrong = (errors > _ORTHONORMAL) | (np.linalg.det(turns) < 0.0) | (np.abs(poses[:, 3] - [0, 0, 0, 1]) > 1e-6).any(1)
    if wrong.any():
        raise PoseError(f'pose {int(wrong.argmax())} is no rigid transform: its rotation must be orthonormal within '
                        f'{_ORTHONORMAL:g}, and its last row 0, 0, 0, 1')
    intrinsics = np.broadcast_to(intrinsics.reshape(-1, 4), (len(poses), 4))
    if not (intrinsics[:, :2] > 0.0).all():
        raise PoseError('focal lengths must be above 0')
    u, _, v = np.linalg.svd(turns)
    poses[:, :3, :3] = u @ v  # the closest rotation
    return poses, intrinsics


def mount_pose(mount: Sequence[float]) -> np.ndarray:
    """Return the optical frame in the base's, (4, 4), of a camera body at x, y, z [m] and roll, pitch, yaw [rad]."""
    roll, pitch, yaw = mount[3:]
    (cr, sr), (cp, sp), (cy, sy) = ((math.cos(a), math.sin(a)) for a in (roll, pitch, yaw))
    pose = np.eye(4)
    pose[:3, :3] = np.array([[cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
                             [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr], [-sp, cp * sr, cp * cr]]) @ _OPTICAL
    pose[:3, 3] = mount[:3]
    return pose


def unsupported(spec: Preset) -> str:
    """Return why a model cannot follow a camera; empty: it can."""
    unknown = [name for name in spec.action_names if name not in _MOTIONS]
    return f'the actions {", ".join(unknown)} of model {spec.name} are no motion of a camera' if unknown else ''


def follow(start: np.ndarray, poses: np.ndarray, mount: np.ndarray, spec: Preset) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the actions (N, A) that move a base at ``start`` (4, 4) along camera ``poses`` (N, 4, 4), one per step of the model,
    and the base's pose after each, (N, 4, 4). ``mount``: the optical frame in the base's.

    An action is the constant motion to where the base should be, reduced to the model's actions and clipped to their limits;
    the next one starts from where that leads. Raises PoseError for a pose that is missed by more than REACH.
    """
    chosen = [_MOTIONS.index(name) for name in spec.action_names]
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    base, actions, reached = start, [], []
    for number, pose in enumerate(poses):
        wanted = twist(_inverse(base) @ pose @ _inverse(mount)) / spec.step_period
        motion = np.zeros(6)
        motion[chosen] = np.clip(wanted[chosen], low, high)
        base = base @ transform(motion * spec.step_period)
        missed = _inverse(base @ mount) @ pose
        distance, turn = float(np.linalg.norm(missed[:3, 3])), _angle(missed[:3, :3])
        if distance > REACH[0] or turn > REACH[1]:
            ranges = ', '.join(f'{name} from {a:g} to {b:g}' for name, a, b in zip(spec.action_names, low, high))
            raise PoseError(f'pose {number} is missed by {distance:.3f} m and {math.degrees(turn):.1f} degrees: in '
                            f'{spec.step_period:g} s the robot of model {spec.name} moves its camera by {ranges} alone')
        actions.append(motion[chosen])
        reached.append(base)
    return np.array(actions, np.float32).reshape(-1, spec.actions), np.array(reached).reshape(-1, 4, 4)


def twist(pose: np.ndarray) -> np.ndarray:
    """Return the constant motion (6,), linear and angular, that reaches a transform (4, 4) in one unit of time. Raises
    PoseError for half a turn."""
    turn, angle = pose[:3, :3], _angle(pose[:3, :3])
    if angle > _HALF_TURN:
        raise PoseError('a pose is half a turn from the one before')
    axis = 0.5 * np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    rotation = axis * (angle / math.sin(angle) if angle > _STRAIGHT else 1.0)
    cross = _cross(rotation)
    # The inverse of ``transform``'s integral (Barfoot, State Estimation for Robotics, 7.1.5).
    bend = (1.0 - 0.5 * angle / math.tan(0.5 * angle)) / angle ** 2 if angle > 1e-4 else 1.0 / 12.0
    return np.concatenate([(np.eye(3) - 0.5 * cross + bend * cross @ cross) @ pose[:3, 3], rotation])


def transform(motion: np.ndarray) -> np.ndarray:
    """Return the transform (4, 4) that a constant motion (6,) reaches in one unit of time."""
    cross, angle = _cross(motion[3:]), float(np.linalg.norm(motion[3:]))
    if angle > 1e-4:
        a, b, c = math.sin(angle) / angle, (1 - math.cos(angle)) / angle ** 2, (angle - math.sin(angle)) / angle ** 3
    else:
        a, b, c = 1.0 - angle ** 2 / 6, 0.5 - angle ** 2 / 24, 1.0 / 6 - angle ** 2 / 120
    pose = np.eye(4)
    pose[:3, :3] += a * cross + b * cross @ cross
    pose[:3, 3] = (np.eye(3) + b * cross + c * cross @ cross) @ motion[:3]
    return pose


def pluecker(poses: np.ndarray, intrinsics: np.ndarray, size: tuple[int, int], form: str = 'origin') -> np.ndarray:
    """
    Return the ray of each pixel, float32 (N, H, W, 6), in the frame of ``poses`` (N, 4, 4): its origin and unit direction
    (``form`` 'origin', as in LingBot-World), or its moment, origin x direction, and unit direction ('moment', proper Pluecker
    coordinates). The centre of pixel (0, 0) is at (0.5, 0.5); each pose has its own intrinsics (N, 4).
    """
    fx, fy, cx, cy = (column[:, None, None] for column in intrinsics.T)
    y, x = np.mgrid[:size[0], :size[1]] + 0.5
    camera = np.stack(np.broadcast_arrays((x - cx) / fx, (y - cy) / fy, 1.0), -1)
    camera /= np.linalg.norm(camera, axis=-1, keepdims=True)
    directions = camera @ np.swapaxes(poses[:, None, :3, :3], -1, -2)
    origins = np.broadcast_to(poses[:, None, None, :3, 3], directions.shape)
    first = np.cross(origins, directions) if form == 'moment' else origins
    return np.concatenate([first, directions], -1).astype(np.float32)


def fitted(intrinsics: np.ndarray, size: tuple[int, int], to: tuple[int, int]) -> np.ndarray:
    """Return the intrinsics (N, 4) of an image of ``size`` (H, W) after ``inputs.images.fit`` to the size ``to``."""
    scale = min(size[0] / to[0], size[1] / to[1])
    h, w = max(1, round(to[0] * scale)), max(1, round(to[1] * scale))
    top, left = (size[0] - h) // 2, (size[1] - w) // 2
    return (intrinsics - [0, 0, left, top]) * [to[1] / w, to[0] / h, to[1] / w, to[0] / h]


def base_of(pose: np.ndarray, mount: np.ndarray) -> np.ndarray:
    """Return the pose of the base whose camera is at ``pose``."""
    return pose @ _inverse(mount)


def _array(camera: Mapping[str, Any], name: str) -> np.ndarray:
    value = camera.get(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in 'fiu':
        raise PoseError(f'camera has no {name}, an array of numbers')
    return value


def _inverse(pose: np.ndarray) -> np.ndarray:
    out = np.eye(4)
    out[:3, :3] = pose[:3, :3].T
    out[:3, 3] = -pose[:3, :3].T @ pose[:3, 3]
    return out


def _angle(turn: np.ndarray) -> float:
    """Return the angle of a rotation matrix (3, 3) [rad], accurate also for small angles."""
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    return math.atan2(float(np.linalg.norm(axis)), float(np.trace(turn)) - 1.0)


def _cross(vector: np.ndarray) -> np.ndarray:
    x, y, z = vector
    return np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])

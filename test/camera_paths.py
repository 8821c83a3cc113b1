"""Paths of a camera on a robot, integrated from its commands in small steps; independent of the code under test."""
import math

import numpy as np

STEP = 0.1  # s
INTRINSICS = np.float32([32.0, 32.0, 32.0, 32.0])  # 64x64 pixels, 90 degrees


def base(x, y, yaw):
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, -s, 0, x], [s, c, 0, y], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def mounted(x=0.10, z=0.25, pitch=0.1396):
    """Return the optical frame of a camera that looks ahead and down."""
    forward, left = np.array([math.cos(pitch), 0, -math.sin(pitch)]), np.array([0.0, 1.0, 0.0])
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2], pose[:3, 3] = -left, np.cross(forward, -left), forward, (x, 0, z)
    return pose


def path(commands, mount=None, start=(0.3, -0.2, 0.7), pieces=2000):
    """Return poses (N + 1, 4, 4) of the camera, before and after each of N commands (v, w) of one step."""
    mount = mounted() if mount is None else mount
    x, y, yaw = start
    poses = [base(x, y, yaw) @ mount]
    for v, w in commands:
        halves = yaw + w * STEP / pieces * (np.arange(pieces) + 0.5)  # midpoint rule
        x, y, yaw = x + v * STEP * np.cos(halves).mean(), y + v * STEP * np.sin(halves).mean(), yaw + w * STEP
        poses.append(base(x, y, yaw) @ mount)
    return np.array(poses)


def camera(poses, intrinsics=INTRINSICS):
    return {'poses': poses, 'intrinsics': np.broadcast_to(intrinsics, (len(poses), 4)).copy()}


def commands(count, seed=3):
    """Return commands that a robot of the shipped model can execute."""
    return np.random.default_rng(seed).uniform((-0.25, -1.4), (0.55, 1.4), (count, 2))

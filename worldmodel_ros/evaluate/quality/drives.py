"""Simulated episodes with images and ground truth, what other commands would have led to, and bounds of prediction."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.evaluate.drive.pictures import is_moving
from ...safety.motion import TwistLimiter
from ...sim.behaviour import DEFAULT_MIX, DRIVERS, Driver
from ...sim.rollout import MAX_LATENCY, PERIOD, array_shapes, drive_episode
from ...sim.scene import CAMERA_X, COLOURS, TRACK, Scene
from ...sim.world import LIMITS, World

COMMAND_DELAY = 0.03  # s from a frame to the command that answers it, as over ROS on two cores
NO_GOAL = -1
_MEAN_LATENCY = MAX_LATENCY / 2  # s
MOVING_SHARE = 0.5    # of the steps to a horizon; with less, copying the last frame is nearly perfect


@dataclass(frozen=True)
class Drive:
    """T frames of one seed's room, 0.1 s apart.

    frames uint8 (T, H, W, 3); actions float32 (T, 2), m/s and rad/s, executed in the period before each frame; poses
    (T, 3), x and y in m and yaw in rad; bearings and distances (T, 4), rad in the axes of base_link (positive to the
    left) and m, from the camera to each object's centre; visible bool (T, 4); goals int (T,), which of COLOURS the
    driver drives to from each frame on, NO_GOAL where it has none. ``snapshots``: the world at each frame.
    """

    seed: int
    driver: str
    scene: Scene
    frames: np.ndarray
    actions: np.ndarray
    poses: np.ndarray
    bearings: np.ndarray
    distances: np.ndarray
    visible: np.ndarray
    goals: np.ndarray
    snapshots: tuple[np.ndarray, ...]

    def goal(self, start: int, steps: int) -> int:
        """Return which of COLOURS the driver drives to from frame ``start`` on, for at least ``steps``; or NO_GOAL."""
        goals = set(self.goals[start:start + steps].tolist())
        return goals.pop() if len(goals) == 1 else NO_GOAL

    def is_moving(self, start: int, steps: int) -> bool:
        """Return whether the robot really moves in most of the ``steps`` steps after frame ``start``; one that is commanded
        to drive on into a wall does not."""
        x, y, yaw = np.diff(self.poses[start:start + steps + 1], axis=0).T / PERIOD
        turns = np.remainder(yaw * PERIOD + np.pi, 2 * np.pi) - np.pi
        moves = [is_moving(*motion) for motion in zip(np.hypot(x, y).tolist(), (turns / PERIOD).tolist())]
        return sum(moves) > MOVING_SHARE * steps


def objects_from_camera(world: World) -> np.ndarray:
    """Return bearing (rad, in base_link's axes) and distance (m, horizontal) of each object from the camera, (4, 2)."""
    x, y, yaw = world.pose
    dx, dy, _ = world.scene.camera_offset
    ahead = CAMERA_X + dx
    eye = (x + math.cos(yaw) * ahead - math.sin(yaw) * dy, y + math.sin(yaw) * ahead + math.cos(yaw) * dy)
    found = []
    for colour in COLOURS:
        px, py = world.position(colour)
        found.append((math.remainder(math.atan2(py - eye[1], px - eye[0]) - yaw, math.tau),
                      math.hypot(px - eye[0], py - eye[1])))
    return np.array(found)


def record_drive(seed: int, frames: int, image_size: tuple[int, int], mix: Mapping[str, float] = DEFAULT_MIX
                 ) -> Drive:
    """Record an episode in a seed's room, by the drivers of the training data; ``mix``: their names and weights."""
    arrays = {name: np.zeros(shape[1:], dtype)
              for name, (shape, dtype) in array_shapes(1, frames, image_size).items() if len(shape) > 1}
    world, witness = World(seed, image_size), _Witness()
    driver = drive_episode(world, seed, mix, arrays, {name: witness.next_to(make) for name, make in DRIVERS.items()})
    objects = np.stack(witness.objects)
    return Drive(seed, driver, world.scene, arrays['frames'], arrays['actions'], arrays['poses'], objects[..., 0],
                 objects[..., 1], arrays['visible'], np.array(witness.goals), tuple(witness.snapshots))


class _Witness:
    """Records the world's whole state whenever a driver is called, which is at every frame."""

    def __init__(self) -> None:
        self.snapshots: list[np.ndarray] = []
        self.objects: list[np.ndarray] = []
        self.goals: list[int] = []

    def next_to(self, make: Callable[[np.random.Generator], Driver]) -> Callable[[np.random.Generator], Driver]:
        """Wrap a driver's factory so that its drivers are watched."""
        def watched(rng: np.random.Generator) -> Driver:
            driver = make(rng)

            def drive(world: World, expert: np.ndarray) -> np.ndarray:
                self.snapshots.append(world.snapshot())
                self.objects.append(objects_from_camera(world))
                command = driver(world, expert)
                self.goals.append(getattr(driver, 'goal', NO_GOAL))
                return command
            return drive
        return watched


@dataclass(frozen=True)
class Branch:
    """What would have followed frame t of an episode: ``actions`` (K, 2), as the robot executes them; images, poses and
    ``collided`` (K,) after each."""

    actions: np.ndarray
    frames: np.ndarray
    poses: np.ndarray
    collided: np.ndarray


def drive_branch(drive: Drive, start: int, commands: np.ndarray, period: float) -> Branch:
    """Drive ``commands`` (K, 2) from frame ``start`` on in truth, each for ``period`` s, within the robot's accelerations."""
    world = World(drive.seed, drive.frames.shape[1:3])
    world.restore(drive.snapshots[start])
    limiter, previous = TwistLimiter(LIMITS), tuple(drive.actions[start].tolist())
    actions, frames, poses, collided = [], [], [], []
    for command in commands.tolist():
        twist = limiter.limit(command, previous, period).twist
        hit = execute(world, previous, twist, period)
        actions.append(twist)
        frames.append(world.render())
        poses.append(world.pose)
        collided.append(hit)
        previous = twist
    return Branch(np.array(actions, np.float32), np.stack(frames), np.array(poses), np.array(collided))


def execute(world: World, previous: tuple[float, float], command: tuple[float, float], period: float) -> bool:
    """Simulate one period, which begins under the previous command; return whether anything was hit."""
    world.step(previous, COMMAND_DELAY)
    hit = world.collided
    world.step(command, period - COMMAND_DELAY)
    return hit or world.collided


def resimulate(drive: Drive, start: int, steps: list[int], period: float, nominal_gains: bool) -> np.ndarray:
    """
    Return images (len(steps), H, W, 3), ``steps`` periods after frame ``start``, under the executed commands: the bound of
    what can be predicted from the camera.

    A command begins a random latency after its frame, which no camera shows. A simulator that knows the room, the robot and
    every command, but not the latencies, is what a perfect world model could be; with nominal motor gains, what one could
    be that does not learn from its window how this robot's wheels differ.
    """
    world = World(drive.seed, drive.frames.shape[1:3])
    world.restore(drive.snapshots[start])
    gains = world.scene.wheel_gain if nominal_gains else (1.0, 1.0)
    frames = []
    for step in range(1, max(steps) + 1):
        world.step(_without_gains(drive.actions[start + step - 1], gains), _MEAN_LATENCY)
        world.step(_without_gains(drive.actions[start + step], gains), period - _MEAN_LATENCY)
        if step in steps:
            frames.append(world.render())
    return np.stack(frames)


def _without_gains(action: np.ndarray, gains: tuple[float, float]) -> np.ndarray:
    """The command whose wheel speeds, times the gains, are those of ``action``."""
    v, w = action.tolist()
    left, right = (v - w * TRACK / 2) / gains[0], (v + w * TRACK / 2) / gains[1]
    return np.array([(left + right) / 2, (right - left) / TRACK])

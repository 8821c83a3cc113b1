"""Episodes in the scenes of all tasks, with the place of everything: made by processes, held on the training device.

Nearly all drivers ignore what moves by itself; the one that looks at it does so between open-loop pieces. No policy is trained
on these episodes, and nothing tells which task a scene is for.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.evaluate.control.learned import BALLS, slots
from worldmodel_ros.model.scene_forecast import HORIZONS, SLOTS
from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.behaviour import Expert, Smooth, Steps
from worldmodel_ros.sim.expert import expert_action
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.rollout import PERIOD, advance, random_latency
from worldmodel_ros.sim.scene import COLOURS, Scene
from worldmodel_ros.sim.task_scenes import Variant, task_scene
from worldmodel_ros.sim.world import LIMITS, World

FRAMES = 112  # of an episode: a long clip, and what comes after it
FRAME_SIZE = (64, 64)
SHUTTLES = len(COLOURS) + len(BALLS)  # first slot of the others
KINDS: Mapping[str, float] = {'intercept': 0.26, 'street': 0.28, 'second_ball': 0.1, 'follow': 0.1, 'avoid_red': 0.08,
                              'pass_behind': 0.08, 'rooms': 0.1}
DRIVERS: Mapping[str, float] = {'steps': 0.25, 'smooth': 0.1, 'expert': 0.1, 'chase': 0.35, 'glance': 0.2}
_STOPS = 0.25  # share of the scenes whose shuttles stop at random
_STREAM = 41  # keeps the driver's random numbers apart from those of the scene of the same seed
_LOW, _HIGH = np.array([LIMITS.v_min, -LIMITS.w_max]), np.array([LIMITS.v_max, LIMITS.w_max])


class Chase:
    """Looks at and drives towards a thing, usually a mover, for a piece; then drives open-loop for another."""

    def __init__(self, rng: np.random.Generator, scene: Scene) -> None:
        self._rng, self._left = rng, 0
        self._names = [mover.name for mover in scene.movers] * 3 + list(COLOURS)

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        rng = self._rng
        if self._left == 0:
            self._left, self._open = int(rng.integers(4, 22)), rng.random() < 0.4
            self._target = self._names[int(rng.integers(len(self._names)))]
            self._speed = rng.uniform(-0.15, LIMITS.v_max) if rng.random() < 0.8 else 0.0
            self._command = rng.uniform(_LOW, _HIGH) * (1.0, 0.6)
        self._left -= 1
        if self._open:
            return self._command
        bearing = world.goal_bearing(self._target)
        command = np.array([self._speed * max(0.0, math.cos(bearing)), np.clip(2.5 * bearing, -LIMITS.w_max, LIMITS.w_max)])
        return command + rng.standard_normal(2) * (0.05, 0.15)


class Glance:
    """Looks at a thing, usually a mover, turns away from it, drives or stands, and turns back: what was seen must be remembered
    while it is out of view."""

    def __init__(self, rng: np.random.Generator, scene: Scene) -> None:
        self._rng, self._names = rng, [mover.name for mover in scene.movers] * 3 + list(COLOURS)
        self._parts: list[tuple[int, np.ndarray | None]] = []

    def __call__(self, world: World, expert: np.ndarray) -> np.ndarray:
        rng = self._rng
        if not self._parts:
            self._target = self._names[int(rng.integers(len(self._names)))]
            turn, rate = rng.choice((-1.0, 1.0)), rng.uniform(0.6, 1.0) * LIMITS.w_max
            quarters = math.radians(rng.uniform(60.0, 180.0)) / rate / PERIOD  # periods that the turn takes
            away = rng.uniform(-0.2, LIMITS.v_max), rng.uniform(-0.3, 0.3)
            self._parts = [(int(rng.integers(6, 16)), None), (round(quarters), np.array([0.0, turn * rate])),
                           (int(rng.integers(3, 36)), np.array(away) * (rng.random() < 0.7)),
                           (round(quarters), np.array([0.0, -turn * rate]))]
        (left, command), *rest = self._parts
        self._parts = [(left - 1, command), *rest] if left > 1 else rest
        if command is not None:
            return command
        turn = np.clip(2.5 * world.goal_bearing(self._target), -LIMITS.w_max, LIMITS.w_max)
        return np.array([0.2, turn]) + rng.standard_normal(2) * (0.05, 0.1)


def shapes(size: tuple[int, int] = FRAME_SIZE) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and type of each array of an episode of T frames.

    frames; executed (T, 2), the command issued at the frame before, m/s and rad/s; measured (T, 2), by the wheels over the
    last period; pose (T, 3) in the room, m and rad; place (T, SLOTS, 2), m in the room, NaN where there is none; visible
    (T, SLOTS); room (2,), half of its sides in m.
    """
    return {'frames': ((FRAMES, *size, 3), np.dtype(np.uint8)), 'executed': ((FRAMES, 2), np.dtype(np.float32)),
            'measured': ((FRAMES, 2), np.dtype(np.float32)), 'pose': ((FRAMES, 3), np.dtype(np.float32)),
            'place': ((FRAMES, SLOTS, 2), np.dtype(np.float32)), 'visible': ((FRAMES, SLOTS), np.dtype(bool)),
            'room': ((2,), np.dtype(np.float32))}


def make(seed: int, world: World) -> dict[str, np.ndarray]:
    """Return the episode of a seed, arrays as in ``shapes``; moves ``world``, and depends only on the seed and image size."""
    rng = np.random.default_rng([seed, _STREAM])
    kind, name = (str(rng.choice(list(mix), p=list(mix.values()))) for mix in (KINDS, DRIVERS))
    scene = task_scene(kind, seed, Variant(stops=bool(rng.random() < _STOPS)))
    world.load(scene)
    makers: dict[str, Callable[[], Callable]] = {
        'steps': lambda: Steps(rng), 'smooth': lambda: Smooth(rng), 'expert': lambda: Expert(rng),
        'chase': lambda: Chase(rng, scene), 'glance': lambda: Glance(rng, scene)}
    driver, odometry, limiter = makers[name](), WheelOdometry(world), TwistLimiter(LIMITS)
    executed, names = (0.0, 0.0), slots(scene)
    episode = {key: np.zeros(shape, kind) for key, (shape, kind) in shapes(world.image_size).items()}
    episode['place'][:] = np.nan
    episode['room'][:] = scene.width / 2, scene.depth / 2
    for t in range(FRAMES):
        episode['frames'][t], episode['executed'][t] = world.render(), executed
        episode['measured'][t], episode['pose'][t] = odometry.twist, world.pose
        for slot, thing in enumerate(names):
            if thing:
                episode['place'][t, slot], episode['visible'][t, slot] = world.position(thing), world.visible(thing)
        expert = np.stack([expert_action(world, goal) for goal in COLOURS]) if name == 'expert' else np.zeros((4, 2))
        command = limiter.limit(np.asarray(driver(world, expert)).tolist(), executed, PERIOD).twist
        advance(world, executed, command, random_latency(rng))
        odometry.update(world)
        executed = command
    return episode


class Store:
    """Episodes on the training device; they can be added during training. Once it is full, new ones replace the oldest, but
    none while ``reading`` is held; the first ``kept``, which are for judging, stay."""

    def __init__(self, capacity: int, device: torch.device | str, kept: int = 0) -> None:
        """``kept``: fewer than ``capacity``. Raises MemoryError if the device has no room for so many."""
        self.count, self.added = 0, 0  # episodes held, and added so far
        self.reading = threading.Lock()
        self._kept = kept
        # On a GPU, other errors do not mean lack of memory; for a CPU, PyTorch has no out-of-memory error.
        full = torch.cuda.OutOfMemoryError if torch.device(device).type == 'cuda' else RuntimeError
        try:
            self.arrays = {name: torch.zeros((capacity, *shape), dtype=torch.from_numpy(np.zeros(0, kind)).dtype, device=device)
                           for name, (shape, kind) in shapes().items()}
        except full as error:
            size = capacity * sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes().values())
            raise MemoryError(f'{capacity} episodes are {size / 1e9:.1f} GB, which {device} has no room for') from error

    def add(self, episodes: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Add episodes, as ``make`` returns them."""
        capacity = len(self.arrays['pose'])
        number = torch.arange(self.added, self.added + len(episodes))
        place = torch.where(number < capacity, number, self._kept + (number - self._kept) % (capacity - self._kept))
        device = self.arrays['pose'].device
        arrived = {name: torch.from_numpy(np.stack([episode[name] for episode in episodes])).to(device) for name in self.arrays}
        place = place.to(device)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        with self.reading:  # on a device, what was read before comes first in its queue
            for name, array in self.arrays.items():
                array[place] = arrived[name]
            self.added += len(episodes)
            self.count = min(self.added, capacity)


@dataclass
class Truth:
    """Forecast targets for each of T frames of B clips, in base_link at that frame, m: ``known`` (B, T, SLOTS), whether the
    clip has shown a thing so far; ``unseen`` (B, T, SLOTS), frames since it last did; ``now`` (B, T, SLOTS, 2); ``ahead``
    (B, T, J, SLOTS, 2) and ``counts``, its mask; ``walls`` (B, T, 6). Shuttles are in the scene's order, which images do not
    show."""

    known: Tensor
    unseen: Tensor
    now: Tensor
    ahead: Tensor
    counts: Tensor
    walls: Tensor


def truth(arrays: Mapping[str, Tensor], episode: Tensor, start: Tensor, frames: int, mirrored: Tensor | None = None) -> Truth:
    """Return the truth of clips of ``frames`` frames from ``start`` (B,) of episodes (B,) on; with left and right exchanged
    where bool ``mirrored`` (B,)."""
    device = episode.device
    t = start[:, None] + torch.arange(frames, device=device)
    row = episode[:, None]
    later = t[..., None] + torch.tensor(HORIZONS, device=device)
    inside, later = later < FRAMES, later.clamp(max=FRAMES - 1)
    visible = arrays['visible'][row, t]
    known, frame = visible.cummax(1).values, torch.arange(frames, device=device)[:, None]
    unseen = frame - torch.where(visible, frame, 0).cummax(1).values
    pose = arrays['pose'][row, t]
    now = _in_base(arrays['place'][row, t], pose[:, :, None]).nan_to_num(0.0)
    ahead = _in_base(arrays['place'][row[..., None], later], pose[:, :, None, None]).nan_to_num(0.0)
    walls = _walls(pose, arrays['room'][row])
    if mirrored is not None:
        other_side = torch.tensor([1.0, -1.0], device=device)
        now = torch.where(mirrored[:, None, None, None], now * other_side, now)
        ahead = torch.where(mirrored[:, None, None, None, None], ahead * other_side, ahead)
        walls = torch.where(mirrored[:, None, None], walls[..., [0, 1, 2, 5, 4, 3]] * torch.tensor(
            [1.0, -1.0, 1.0, 1.0, 1.0, 1.0], device=device), walls)
    return Truth(known, unseen, now, ahead, known[:, :, None] & inside[..., None], walls)


def _in_base(places: Tensor, pose: Tensor) -> Tensor:
    away, cos, sin = places - pose[..., :2], pose[..., 2].cos(), pose[..., 2].sin()
    return torch.stack([cos * away[..., 0] + sin * away[..., 1], cos * away[..., 1] - sin * away[..., 0]], -1)


def _walls(pose: Tensor, half: Tensor) -> Tensor:
    """For the wall whose normal is nearest to the robot's heading: cosine and sine of four times its direction in base_link;
    metres to it and to the others, each a quarter turn further."""
    yaw = pose[..., 2]
    quarter = torch.round(yaw / (math.pi / 2)) * (math.pi / 2)
    direction = quarter - yaw
    angles = quarter[..., None] + torch.arange(4, device=pose.device) * (math.pi / 2)
    normals = torch.stack([angles.cos(), angles.sin()], -1)
    reach = torch.where(normals[..., 0].abs() > 0.5, half[..., :1], half[..., 1:])
    metres = reach - (normals * pose[..., None, :2]).sum(-1)
    return torch.cat([torch.stack([(4 * direction).cos(), (4 * direction).sin()], -1), metres], -1)

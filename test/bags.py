"""
Bags for the tests: drives of the simulated robot, as rosbag2 writes them, intact or faulty.

    write_bag(tmp_path / 'drive', simulated_drive(seconds=4.0))                       # MCAP, JPEG, TwistStamped
    write_bag(tmp_path / 'drive', gap(simulated_drive(), 2.0, 0.5), encoding='bayer_rggb8', storage='sqlite3')

A fault of the drive is a function from Drive to Drive; a fault of the file changes a bag that was written.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from bag_messages import ACTIONS, TYPES, image_message, string
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from worldmodel_ros.safety.motion import TwistLimiter
from worldmodel_ros.sim.expert import STOP_DISTANCE, expert_action
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import LIMITS, World

NS = 1_000_000_000
START = 1_700_000_000 * NS
SEED = 2_000_000            # a room that was never trained on, with a goal in view
IMAGE_DELAY = 5_000_000     # ns, from a frame's stamp to its receipt by the recorder
COMMAND_DELAY = 30_000_000  # ns, from a frame's stamp to the receipt of the command that answers it


@dataclass(frozen=True)
class Drive:
    """
    What a recorder of a drive receives. ``frames[k]``, uint8 (H, W, 3) RGB, has ``stamps[k]`` and was received at
    ``received[k]``. ``commands`` and ``goals`` are (time of receipt, value). From ``clock_step[0]`` on, all clocks are off by
    ``clock_step[1]``. All times in ns.
    """

    frames: tuple[np.ndarray, ...]
    stamps: tuple[int, ...]
    received: tuple[int, ...]
    commands: tuple[tuple[int, tuple[float, float]], ...]
    goals: tuple[tuple[int, str], ...]
    clock_step: tuple[int, int] = (0, 0)

    def index(self, seconds: float) -> int:
        """Return the index of the first frame at least ``seconds`` after the first one."""
        return next(k for k, s in enumerate(self.stamps) if s - self.stamps[0] >= seconds * NS)


@lru_cache(maxsize=8)
def simulated_drive(seconds: float = 4.0, seed: int = SEED, size: tuple[int, int] = (64, 64), rate: float = 10.0,
                    teleport_at: float | None = None) -> Drive:
    """
    Return the expert's drive to one goal after another, commanding 10 times a second, seen by a camera of ``rate`` Hz
    (200 must be a multiple of it). ``teleport_at`` s: the robot is in another room from there on.
    """
    world, limiter = World(seed, size), TwistLimiter(LIMITS)
    frames, stamps, commands = [], [], []
    goal = min(COLOURS, key=lambda colour: abs(world.goal_bearing(colour)))
    goals = [(START, goal)]
    executed, upcoming, wait = (0.0, 0.0), None, 0.0
    for k in range(round(seconds * 200)):  # physics steps of 5 ms
        now = START + k * 5_000_000
        if teleport_at is not None and k == round(teleport_at * 200):
            world.reset(seed + 1)
        if k % round(200 / rate) == 0:
            frames.append(world.render())
            stamps.append(now)
        if k % 20 == 0:
            if world.goal_distance(goal) < STOP_DISTANCE + 0.05:
                goal = COLOURS[(COLOURS.index(goal) + 1) % len(COLOURS)]
                goals.append((now, goal))
            upcoming, wait = limiter.limit(tuple(expert_action(world, goal).tolist()), executed, 0.1).twist, 0.03
        if upcoming and wait < 0.0025:
            executed, upcoming = upcoming, None
            commands.append((now, executed))
        wait -= 0.005
        world.step(executed, 0.005)
    return Drive(tuple(frames), tuple(stamps), tuple(s + IMAGE_DELAY for s in stamps), tuple(commands), tuple(goals))


def at_rate(drive: Drive, rate: float) -> Drive:
    """Resample the camera: at each time the newest frame, which may repeat the previous one."""
    count = int((drive.stamps[-1] - drive.stamps[0]) / NS * rate)
    times = [drive.stamps[0] + round(k * NS / rate) for k in range(count)]
    frames = tuple(drive.frames[k] for k in np.searchsorted(drive.stamps, times, side='right') - 1)
    return replace(drive, frames=frames, stamps=tuple(times), received=tuple(t + IMAGE_DELAY for t in times))


def gap(drive: Drive, at: float, seconds: float) -> Drive:
    """Drop the camera from ``at`` s on, for ``seconds``."""
    start, end = drive.index(at), drive.index(at + seconds)
    return _select(drive, [k for k in range(len(drive.frames)) if not start <= k < end])


def frozen(drive: Drive, at: float, seconds: float) -> Drive:
    """Repeat the image of ``at`` s, with new stamps, for ``seconds``."""
    start, end = drive.index(at), drive.index(at + seconds)
    frames = [drive.frames[start if start <= k < end else k] for k in range(len(drive.frames))]
    return replace(drive, frames=tuple(frames))


def shift_stamps(drive: Drive, at: float, seconds: float) -> Drive:
    """Step the camera's clock, not the recorder's, by ``seconds`` at ``at`` s: ahead, or back if negative."""
    start = drive.index(at)
    stamps = [s + round(seconds * NS) * (k >= start) for k, s in enumerate(drive.stamps)]
    return replace(drive, stamps=tuple(stamps))


def shift_time(drive: Drive, at: float, seconds: float) -> Drive:
    """Step all clocks by ``seconds`` at ``at`` s, as when a simulation is reset while it is recorded."""
    return replace(drive, clock_step=(drive.stamps[drive.index(at)], round(seconds * NS)))


def zero_stamps(drive: Drive) -> Drive:
    """Leave the stamps empty, as some camera drivers do."""
    return replace(drive, stamps=(0,) * len(drive.stamps))


def late(drive: Drive, seconds: float) -> Drive:
    """Delay the receipt of images by ``seconds``."""
    return replace(drive, received=tuple(t + round(seconds * NS) for t in drive.received))


def mixed_sizes(drive: Drive, at: float) -> Drive:
    """Make the images twice as wide and high from ``at`` s on."""
    start = drive.index(at)
    return replace(drive, frames=tuple(
        np.repeat(np.repeat(f, 2, 0), 2, 1) if k >= start else f for k, f in enumerate(drive.frames)))


def shuffled_commands(drive: Drive, seed: int = 0) -> Drive:
    """Permute the drive's commands over their times, so that the images do not follow from them."""
    order = np.random.default_rng(seed).permutation(len(drive.commands))
    return replace(drive, commands=tuple(
        (time, drive.commands[k][1]) for (time, _), k in zip(drive.commands, order)))


def without_commands(drive: Drive) -> Drive:
    """Remove the commands."""
    return replace(drive, commands=())


def _select(drive: Drive, kept: list[int]) -> Drive:
    return replace(drive, **{name: tuple(getattr(drive, name)[k] for k in kept)
                             for name in ('frames', 'stamps', 'received')})


def write_bag(path: Path, drive: Drive, *, storage: str = 'mcap', encoding: str = 'jpeg',
              action: str = 'TwistStamped', image_topic: str = '/camera/image_raw', action_topic: str = '/cmd_vel',
              goal_topic: str | None = '/goal', compression: str = 'none', extra: tuple = ()) -> Path:
    """
    Write a rosbag2 folder at ``path`` and return it.

    ``encoding``: 'jpeg', 'png', one of sensor_msgs/Image's, or '16UC1' for depth; compressed ones go to
    ``image_topic``/compressed. ``action``: a key of bag_messages.ACTIONS. ``compression``: none, message, file or
    storage (chunks of an MCAP), by zstd. ``extra``: more messages, (topic, type, time of receipt, message).
    """
    compressed = encoding in ('jpeg', 'png')
    topic, kind = (f'{image_topic}/compressed', 'CompressedImage') if compressed else (image_topic, 'Image')
    def clock(time: int) -> int:
        return time + drive.clock_step[1] * (time >= drive.clock_step[0])
    messages = [(topic, f'sensor_msgs/msg/{kind}', received, image_message(frame, clock(at), encoding))
                for frame, at, received in zip(drive.frames, drive.stamps, drive.received)]
    build = ACTIONS[action]
    messages += [(action_topic, build.type, at, build.make(command, clock(at))) for at, command in drive.commands]
    if goal_topic:
        messages += [(goal_topic, 'std_msgs/msg/String', at, string(goal)) for at, goal in drive.goals]
    messages += extra
    writer = Writer(path, version=9, storage_plugin=StoragePlugin[storage.upper()])
    writer.set_compression(CompressionMode[compression.upper()], CompressionFormat.ZSTD)
    with writer:
        connections = {}
        for topic, kind, at, message in sorted(messages, key=lambda m: m[2]):
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=TYPES)
            writer.write(connections[topic], clock(at), TYPES.serialize_cdr(message, kind))
    return path


def real_drive() -> Path:
    """Return a donkeycar's bag: the folder in WORLDMODEL_TEST_BAG, or one next to the checkout; else skip the test."""
    beside = Path(__file__).resolve().parents[2] / 'shared' / 'data' / 'donkeycar_lap_a'
    path = Path(os.environ.get('WORLDMODEL_TEST_BAG') or beside)
    if not path.exists():
        pytest.skip(f'no real drive at {path}: set WORLDMODEL_TEST_BAG to a bag folder of a donkeycar')
    return path


def bag_file(bag: Path) -> Path:
    """Return the storage file of a bag folder."""
    (file,) = [p for p in bag.iterdir() if p.name != 'metadata.yaml']
    return file


def truncate(bag: Path, share: float = 0.6) -> Path:
    """Cut off the storage file of a bag, as a crash or a full disk does, and remove its metadata.yaml."""
    file = bag_file(bag)
    with file.open('r+b') as stream:
        stream.truncate(round(file.stat().st_size * share))
    (bag / 'metadata.yaml').unlink()
    return bag


def corrupt(bag: Path, share: float = 0.5, length: int = 64) -> Path:
    """Overwrite some bytes in the middle of a bag's storage file."""
    file = bag_file(bag)
    with file.open('r+b') as stream:
        stream.seek(round(file.stat().st_size * share))
        stream.write(b'\xaa' * length)
    return bag

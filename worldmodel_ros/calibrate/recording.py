"""Reads the signals of a recording, and fits all that they determine about the robot."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.problems import BagError, MessageError
from worldmodel_ros.bags.source import Bag, open_bag
from worldmodel_ros.inputs.camera import CameraError, Lens
from worldmodel_ros.inputs.images import ImageError, read as read_image
from worldmodel_ros.inputs.odometry import yaw_of
from worldmodel_ros.inputs.ticks import is_usable
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.motion import MOTOR_LAG, increments
from . import vision
from .response import CannotTell, Estimate, Response, fit

NS = 1_000_000_000
_OTHER_CLOCK = 1.0       # s, from stamp to receipt, from which on a stamp is of another clock
_FASTEST = 5.0           # m/s, beyond which a change of pose is no motion
_GAP = 5.0               # typical times between two readings, after which what happened between them is not known
_SILENCE = 10.0          # s without any message, after which another part begins: the clock was set, or the recorder paused
_STEP_BACK = 1.0         # s, after which it does, too
_MOST_IMAGES = 1500      # to keep; of a longer recording, the first ones
_ODOMETRY = 'nav_msgs/msg/Odometry'
AXES = ('speed', 'turn')


@dataclass(frozen=True)
class Signals:
    """
    N commands (m/s and rad/s) from their ``command_times`` on [s]; M poses (x, y, yaw) of odometry; grey images. ``lens`` is
    None without a camera_info. ``notes``: what is wrong with the recording.
    """

    command_times: np.ndarray
    commands: np.ndarray
    pose_times: np.ndarray = field(default_factory=lambda: np.empty(0))
    poses: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))
    image_times: np.ndarray = field(default_factory=lambda: np.empty(0))
    images: Sequence[np.ndarray] = ()
    lens: Lens | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """
    What was fitted, by name, and why the rest was not. ``speed`` and ``turn`` are from odometry, ``turn_seen`` is the turning
    from images, whose gain is in pixels and therefore left out.
    """

    responses: dict[str, Response]
    estimates: dict[str, Estimate]
    refused: dict[str, str]

    @property
    def parameters(self) -> dict[str, float]:
        """The part that world_model_node takes as parameters."""
        latencies = [self.responses[name].latency.value for name in AXES if name in self.responses]
        found = {'command_delay_s': round(max(0.0, sum(latencies) / len(latencies) - MOTOR_LAG), 3)} if latencies else {}
        if 'camera_pitch_deg' in self.estimates:
            found['camera_pitch_deg'] = round(self.estimates['camera_pitch_deg'].value, 2)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it for YAML."""
        told: dict[str, Any] = {}
        for name, response in self.responses.items():
            told[name] = {'latency_s': response.latency.to_dict(), 'explained': round(response.explained, 3)}
            if name in AXES:
                told[name]['gain'] = response.gain.to_dict()
        told |= {name: estimate.to_dict() for name, estimate in self.estimates.items()}
        return {'told': told, 'refused': self.refused, 'parameters': {'world_model_node': self.parameters}}


def calibrate(signals: Signals) -> Calibration:
    """Fit all that the signals determine."""
    responses: dict[str, Response] = {}
    estimates: dict[str, Estimate] = {}
    refused: dict[str, str] = {}

    def attempt(kept: dict, name: str, measure: Callable[[], Any]) -> None:
        try:
            kept[name] = measure()
        except CannotTell as error:
            refused[name] = str(error)

    for axis, name in enumerate(AXES):
        attempt(responses, name, lambda axis=axis, name=name: _by_odometry(signals, axis, f'{name} command'))
    attempt(responses, 'turn_seen', lambda: _by_images(signals))
    attempt(estimates, 'turn_slip', lambda: _slip(signals))
    attempt(estimates, 'camera_pitch_deg', lambda: vision.pitch(*_calibrated(signals)))
    return Calibration(responses, estimates, refused)


def _by_odometry(signals: Signals, axis: int, what: str) -> Response:
    if len(signals.poses) < 2:
        raise CannotTell('no odometry was recorded: record nav_msgs/Odometry')
    moved, steps = np.array(increments(signals.poses)), np.diff(signals.pose_times)
    # Of a robot that was put elsewhere, or whose odometry began again, the rest of a recording still tells.
    jumped = np.linalg.norm(np.diff(signals.poses[:, :2], axis=0), axis=1) > _FASTEST * steps
    moved[:, jumped | (steps > _GAP * np.median(steps))] = np.nan
    return fit(signals.command_times, signals.commands[:, axis], signals.pose_times, moved[axis], what)


def _by_images(signals: Signals) -> Response:
    if len(signals.images) < 2:
        raise CannotTell('no images were recorded')
    shifts = np.array([vision.shift(a, b) for a, b in zip(signals.images, signals.images[1:])])
    sound = np.isfinite(shifts)
    if sound.mean() < 0.8:
        raise CannotTell(f'in {1.0 - sound.mean():.0%} of the images nothing can be followed: record where there are corners')
    return fit(signals.command_times, signals.commands[:, 1], signals.image_times, shifts, 'turn command')


def _slip(signals: Signals) -> Estimate:
    """Return the share of the turning measured by the wheels that does not happen."""
    ratio = vision.turn_ratio(*_calibrated(signals))
    return Estimate(1.0 - ratio.value, 1.0 - ratio.high, 1.0 - ratio.low)


def _calibrated(signals: Signals) -> tuple[Sequence[np.ndarray], np.ndarray, Lens]:
    """Return the images, the poses at which they were taken, and the lens."""
    if len(signals.images) < 2:
        raise CannotTell('no images were recorded')
    if signals.lens is None:
        raise CannotTell('no camera_info tells the focal length: calibrate the camera, and record camera_info')
    (height, width), (h, w) = signals.images[0].shape, signals.lens.size
    if (height, width) != (h, w):
        raise CannotTell(f'camera_info is of {w} x {h} pixels, and the images have {width} x {height}: write '
                         'the topic of the one that belongs to these images as camera_info_topic into the file of --config')
    if len(signals.poses) < 2:
        raise CannotTell('no odometry was recorded, which tells where images were taken')
    inside = (signals.image_times >= signals.pose_times[0]) & (signals.image_times <= signals.pose_times[-1])
    x, y, yaw = signals.poses.T
    at = [np.interp(signals.image_times[inside], signals.pose_times, values) for values in (x, y, np.unwrap(yaw))]
    return [image for image, kept in zip(signals.images, inside) if kept], np.stack(at, 1), signals.lens


def read(path: Path, config: Path | None = None, odometry: str = '') -> Signals:
    """
    Return the signals of a rosbag2 recording. ``config``: as for ``evaluate bag``; ``odometry``: the topic, if there are
    several.

    Commands count from their receipt: the stamp of a gated one is that of the image that it answers. If time jumps, the
    longest part is used. Raises BagError.
    """
    with open_bag(path) as bag:
        mapping = find_mapping(bag, TINY, config)
        if mapping.action_topic is None or bag.topics[mapping.action_topic].type == _ODOMETRY:
            raise BagError(f'{path} has no commands: record what the base is told (cmd_vel) together with what it does')
        odometry = _odometry_topic(bag, odometry)
        lens: Lens | None = None
        part = longest = _Part()
        parts = 1
        for record in bag.messages([*mapping.topics, *filter(None, [odometry])]):
            name, log = record.topic.name, record.log_ns / NS
            if part.ends_before(log):
                longest, part, parts = _longer(longest, part), _Part(), parts + 1
            part.extend(log)
            try:
                message = bag.deserialize(record.topic, record.raw)
                if name == mapping.image_topic:
                    if len(part.images) < _MOST_IMAGES:
                        image = cv2.cvtColor(read_image(message, (0, 0), _whole), cv2.COLOR_RGB2GRAY)
                        if not part.images or image.shape == part.images[0].shape:  # nothing can be followed into another size
                            part.images.append(image)
                            part.image_stamps.append((_stamp(message), log))
                elif name == mapping.info_topic:
                    lens = lens or Lens.of(message, mapping.rectified)
                elif name == odometry:
                    pose = _pose(message)
                    if all(map(math.isfinite, pose)):
                        part.poses.append(pose)
                        part.pose_stamps.append((_stamp(message), log))
                elif name == mapping.action_topic:
                    action = mapping.action(message)
                    if is_usable(action):
                        part.commands.append((log, *action))
            except (MessageError, ImageError, CameraError):
                continue  # skip unreadable messages
        notes = [problem.text for problem in bag.problems]
    longest = _longer(longest, part)
    if not longest.commands:
        raise BagError(f'{path}: not one command on {mapping.action_topic} can be read')
    if parts > 1:
        notes.append(f'{path} has {parts} parts, between which the time of receipt goes back or nothing is recorded for '
                     f'{_SILENCE:g} s: only the longest, of {longest.seconds:.0f} s, is used')
    rows = with_time_out(np.array(longest.commands), mapping.executed_timeout)
    start = rows[0, 0]
    pose_times, image_times = _times(longest.pose_stamps), _times(longest.image_stamps)
    order, shown = _rising(pose_times), _rising(image_times)
    return Signals(rows[:, 0] - start, rows[:, 1:], pose_times[order] - start, np.array(longest.poses).reshape(-1, 3)[order],
                   image_times[shown] - start, [longest.images[k] for k in shown], lens, tuple(notes))


@dataclass
class _Part:
    """
    The messages of a recording between two jumps of time: commands (time, *action), poses and images, with their stamps and
    times of receipt. ``first`` and ``last`` receipt [s].
    """

    commands: list[tuple[float, ...]] = field(default_factory=list)
    poses: list[tuple[float, ...]] = field(default_factory=list)
    pose_stamps: list[tuple[float, float]] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)
    image_stamps: list[tuple[float, float]] = field(default_factory=list)
    first: float = math.inf
    last: float = -math.inf

    @property
    def seconds(self) -> float:
        return self.last - self.first

    def ends_before(self, log: float) -> bool:
        """Whether a message received at ``log`` is of another part."""
        return self.last > -math.inf and not self.last - _STEP_BACK <= log <= self.last + _SILENCE

    def extend(self, log: float) -> None:
        self.first, self.last = min(self.first, log), max(self.last, log)


def _longer(*parts: _Part) -> _Part:
    """Return the longest part that has commands."""
    return max(parts, key=lambda part: (bool(part.commands), part.seconds))


def with_time_out(rows: np.ndarray, timeout: float) -> np.ndarray:
    """Return commands (N, 3), time first, with zeros added where a base has braked after ``timeout`` s (0: never)."""
    if not timeout:
        return rows
    silent = np.flatnonzero(np.diff(rows[:, 0]) > timeout)
    stops = np.stack([rows[silent, 0] + timeout, *np.zeros((2, len(silent)))], 1)
    return np.insert(rows, silent + 1, stops, 0)


def _odometry_topic(bag: Bag, wanted: str) -> str:
    found = [topic.name for topic in bag.topics.values() if topic.type == _ODOMETRY and topic.count]
    if wanted and wanted not in found:
        raise BagError(f'{bag.path} has no odometry on {wanted}; there is {", ".join(found) or "none"}')
    if wanted or len(found) < 2:
        return wanted or ''.join(found)
    known = [name for name in found if name.endswith('/odom')]
    if len(known) != 1:
        raise BagError(f'{bag.path} has odometry on {", ".join(found)}: choose that of the wheels with --odometry')
    return known[0]


def _whole(rgb: np.ndarray, _: tuple[int, int]) -> np.ndarray:
    return rgb


def _stamp(message: Any) -> float:
    return message.header.stamp.sec + message.header.stamp.nanosec / NS


def _pose(message: Any) -> tuple[float, float, float]:
    at = message.pose.pose.position
    return at.x, at.y, yaw_of(message.pose.pose.orientation)


def _times(stamps: list[tuple[float, float]]) -> np.ndarray:
    """Return the stamps [s], NaN for single ones that are of another clock; or the times of receipt if most of them are."""
    if not stamps:
        return np.empty(0)
    own, received = np.array(stamps).T
    sound = np.abs(received - own) < _OTHER_CLOCK
    return np.where(sound, own, np.nan) if abs(np.median(received - own)) < _OTHER_CLOCK else received


def _rising(times: np.ndarray) -> np.ndarray:
    """Return the indices of times that are greater than all before them, NaN aside."""
    highest = np.fmax.accumulate(np.concatenate([[-np.inf], times]))[:-1]
    return np.flatnonzero(times > highest)

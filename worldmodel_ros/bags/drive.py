"""
Turns a bag into the ticks that the live world model node would have received, with their executed actions.

Both use the same functions (worldmodel_ros.inputs) to check, read and average; the receipt of a message is its time in the
bag. Unlike in the node, an image whose stamp is off from its receipt is used, and noted in ``Drive.health``.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from worldmodel_ros.inputs.camera import Correction
from worldmodel_ros.inputs.odometry import Reading, WheelReadings
from worldmodel_ros.inputs.ticks import NS, ExecutedActions, Frames, FrameSettings, Pace, is_usable
from worldmodel_ros.inputs.images import ImageError
from worldmodel_ros.model.presets import Preset
from .ahead import ahead
from .health import Health
from .mapping import Mapping
from .problems import MessageError
from .source import Bag, Record

_AHEAD = 64  # maximum number of prefetched ticks
_PATIENCE = 5 * NS  # for the actions of a tick, after its receipt


@dataclass(frozen=True)
class Tick:
    """
    A frame of the model, with the actions around it.

    ``index`` counts ticks from 0 and ``episode`` episodes; each begins a new session. ``stamp_ns`` is the image's,
    ``log_ns`` its receipt. ``image``: uint8 (H, W, 3) RGB at the model's size. ``executed``, float32 (A,): the
    time-weighted mean action since the previous tick (over one step period, for the first of an episode), as in the node.
    ``recorded``, float32 (A,): the first action received within a step period from the stamp on, else the one in force; None
    before the first one. ``goal``: '' if unknown. ``wheels``: pose (3,), m and rad, and twist (2,), m/s and rad/s, measured by
    the odometry, as in the node; None if not measured or not requested.
    """

    index: int
    episode: int
    stamp_ns: int
    log_ns: int
    image: np.ndarray
    executed: np.ndarray
    recorded: np.ndarray | None
    goal: str
    wheels: tuple[np.ndarray, np.ndarray] | None = None


class _Seen(NamedTuple):
    """A tick whose actions are not complete yet."""

    stamp: int
    log: int
    image: np.ndarray
    new_episode: bool
    goal: str


class Drive:
    """
    The ticks of a bag; can be iterated over repeatedly. ``health`` and ``camera`` are those of the newest iteration.

    Reading and decoding run ahead of the caller in a thread, by a bounded number of ticks.
    """

    def __init__(self, bag: Bag, mapping: Mapping, preset: Preset, settings: FrameSettings,
                 seconds: float | None, skip: float, wheels: bool = False) -> None:
        self.bag, self.mapping, self.preset, self.settings = bag, mapping, preset, settings
        self.seconds, self.skip = seconds, skip
        self.odometry_topic = mapping.odometry_topic if wheels else None
        self.health, self.camera = Health(preset), self._correction()

    @property
    def images(self) -> int:
        """Number of images in the bag, as stated by the bag; ``health.images`` approaches it."""
        return self.bag.topics[self.mapping.image_topic].count

    @property
    def has_actions(self) -> bool:
        """Whether there are messages on the topic of actions, as stated by the bag."""
        return self.mapping.action_topic is not None and self.bag.topics[self.mapping.action_topic].count != 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the mapping, problems of the files, and what is wrong with the data that was read so far."""
        findings = self.health.findings() if self.health.images else []
        return (*self.mapping.notes, *(problem.text for problem in self.bag.problems),
                *(f'{self.bag.path}: {finding.text}' for finding in findings if finding.severity != 'info'))

    def __iter__(self) -> Iterator[Tick]:
        self.health, self.camera = Health(self.preset), self._correction()
        return ahead(_Reading(self).ticks(), _AHEAD)

    def _correction(self) -> Correction:
        camera = self.preset.camera
        correction = Correction(camera.vertical_fov if camera else None, self.preset.image_size, self.mapping.rectified)
        if camera and self.mapping.pitch is not None:
            correction.turn(self.mapping.pitch - camera.pitch)
        return correction


def read_drive(bag: Bag, mapping: Mapping, preset: Preset, settings: FrameSettings = FrameSettings(),
               seconds: float | None = None, skip: float = 0.0, wheels: bool = False) -> Drive:
    """
    Return the ticks of a bag, to be iterated over. ``settings`` are those of the live node. ``wheels``: include odometry, if
    there is any.

    ``skip`` and ``seconds``: images earlier and later than this after the first one are left out, also of ``Drive.health``
    (which includes prefetched images if the caller ends the iteration early).
    """
    return Drive(bag, mapping, preset, settings, seconds, skip, wheels)


class _Reading:
    """One pass over a bag."""

    def __init__(self, drive: Drive) -> None:
        preset = drive.preset
        self._bag, self._mapping, self._settings, self._health = drive.bag, drive.mapping, drive.settings, drive.health
        self._goals, self._period = preset.goals, round(preset.step_period * NS)
        self._frames = Frames(preset.step_period, preset.image_size)
        self._camera = drive.camera
        self._executed = ExecutedActions(preset.actions, preset.step_period, drive.mapping.executed_timeout)
        self._wheels, self._wheels_topic = WheelReadings(preset.step_period), drive.odometry_topic
        self._topics = [*drive.mapping.topics, *((self._wheels_topic,) if self._wheels_topic else ())]
        self._seen: deque[_Seen] = deque()
        self._goal = ''
        self._index = self._episode = -1
        self._stamp: int | None = None  # of the newest yielded tick
        self._began: int | None = None  # receipt of the first image
        self._limit = math.inf if drive.seconds is None else drive.seconds * NS
        self._skip = drive.skip * NS
        self._is_early = drive.skip > 0.0

    def ticks(self) -> Iterator[Tick]:
        now = None
        for record in self._bag.messages(self._topics):
            if now is not None and record.log_ns < now:
                yield from self._finish(None)  # time was set back: later actions do not belong to these ticks
            now, is_image = record.log_ns, record.topic.name == self._mapping.image_topic
            if is_image and self._began is None:
                self._began = now
            is_beyond = self._began is not None and now - self._began > self._limit
            if self._is_early and self._began is not None:  # for good: time may be set back
                self._is_early = now - self._began < self._skip
            if not (is_image and (is_beyond or self._is_early)):
                self._take(record)
            yield from self._finish(now)
            if is_beyond and not self._seen:
                return
        yield from self._finish(None)

    def _take(self, record: Record) -> None:
        name = record.topic.name
        try:
            message = self._bag.deserialize(record.topic, record.raw)
            if name == self._wheels_topic and not self._wheels.add(Reading.of(message)):
                raise MessageError(f'{name}: the odometry is not finite')
            if name == self._mapping.image_topic:
                self._take_image(message, record.log_ns)
            elif name == self._mapping.action_topic:
                self._take_action(self._mapping.action(message), record.log_ns)
            elif name == self._mapping.info_topic:
                if self._camera.take(message):
                    self._frames.view = self._camera.view
                    self._frames.forget()  # images of the former view are not a valid history
            elif name == self._mapping.goal_topic:
                self._take_goal(message.data.strip(), record.log_ns)
        except MessageError as error:
            self._health.unreadable(name, record.log_ns, str(error))

    def _take_image(self, message: Any, log: int) -> None:
        own = message.header.stamp.sec * NS + message.header.stamp.nanosec
        stamp = own if self._mapping.image_stamps == 'header' else log
        try:
            pace, image = self._frames.take(message, stamp, self._executed.moving(log), log / NS, self._settings)
        except ImageError as error:
            self._health.refused(message, stamp, log, error)
            return
        self._health.image(message, stamp, log, pace)
        if image is not None:
            # An image that shares the message's memory is read-only, and would keep all of it alive.
            image = image if image.flags.owndata else image.copy()
            self._seen.append(_Seen(stamp, log, image, pace is Pace.NEW_EPISODE, self._goal))

    def _take_action(self, action: tuple[float, ...], log: int) -> None:
        if not is_usable(action):
            self._health.not_finite(log)
            return
        self._health.action(action, log)
        if self._executed.ran_out(log):
            self._health.ran_out(log, self._mapping.executed_timeout)
        self._executed.add(log, action)

    def _take_goal(self, goal: str, log: int) -> None:
        if goal and goal not in self._goals:
            self._health.unknown_goal(goal, log)  # like the node, keep the previous goal
        else:
            self._goal = goal

    def _finish(self, now: int | None) -> Iterator[Tick]:
        """Yield the ticks whose actions are complete at the time ``now`` [ns]; None: all ticks."""
        while self._seen and (now is None or self._is_complete(self._seen[0], now)):
            seen = self._seen.popleft()
            self._index += 1
            if seen.new_episode:
                self._episode += 1
                self._stamp = None
            executed = self._executed.mean(self._stamp, seen.stamp)
            recorded = self._executed.first(seen.stamp, seen.stamp + self._period)
            self._stamp = seen.stamp
            yield Tick(self._index, self._episode, seen.stamp, seen.log, seen.image, executed,
                       None if recorded is None else np.asarray(recorded, np.float32), seen.goal,
                       self._wheels.at(seen.stamp) if self._wheels_topic else None)

    def _is_complete(self, seen: _Seen, now: int) -> bool:
        # Otherwise a stamp far ahead of its receipt would hold up ticks until the end of the bag.
        return now > min(seen.stamp + self._period, seen.log + _PATIENCE)

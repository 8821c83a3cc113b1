"""
The camera's topic: which images are ticks, and the observations that they make.

What is broken is refused, the age is watched, and the episodes are numbered.
"""

import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.node import Node
from rclpy.qos import ReliabilityPolicy
from rclpy.utilities import get_rmw_implementation_identifier
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.control.responder import Observation
from worldmodel_ros.inputs.executed import ExecutedActions
from worldmodel_ros.inputs.images import ImageError
from worldmodel_ros.inputs.ticks import Frames, FrameSettings, Pace
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.messages import NS, nanoseconds
from worldmodel_ros.nodes.world_model.parameters import frame_settings

_LOG_INTERVAL = 2.0  # s
SEGMENT = 512 * 1024  # bytes, shared memory of a Fast DDS participant by default
_UNHEARD = 3.0  # s, that discovery may take
_PROFILE = 'FASTRTPS_DEFAULT_PROFILES_FILE'

# Of this process, counted from a random number: no two processes share one, whatever the clock of the host does. Of so
# many bits that a reader in JavaScript does not round it.
_EPISODES = itertools.count(secrets.randbits(48))


class Taken(NamedTuple):
    """`sound`: the image could be used, though it need not be a tick. `observation`: None if it is none."""

    sound: bool
    observation: Observation | None = None


class IntakeSettings(NamedTuple):
    """
    Times in s. `deadline`: from the stamp of an image to its answer. `future_tolerance`: so far ahead of ROS time a stamp
    may be. `frames`: which images are ticks.
    """

    deadline: float
    future_tolerance: float
    frames: FrameSettings

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> 'IntakeSettings':
        """Return what the node's parameters say."""
        return cls(parameters['deadline_s'], parameters['future_tolerance_s'], frame_settings(parameters))


class Intake:
    """
    The images of one activation. `goal` is given to each observation; `frames` finds the ticks among them.

    `settings` and `goal` may be changed at any time; `ros_now` returns ROS time [ns].
    """

    def __init__(self, spec: Any, settings: IntakeSettings, executed: ExecutedActions,
                 ros_now: Callable[[], int], refusals: Refusals, advice: 'LargeImageAdvice',
                 logger: RcutilsLogger) -> None:
        self.goal = ''
        self.camera_frame = ''
        self.stamp = 0         # ns, of the newest observation
        self.episode = 0
        self.delay = 0.0       # s, age of the newest image on receipt
        self._sequence = 0
        self.settings, self._executed, self._ros_now = settings, executed, ros_now
        self._refusals, self._advice, self._logger = refusals, advice, logger
        self.frames = Frames(spec.step_period, spec.image_size)
        self._starts_over = False
        self._begin_episode()

    def next_sequence(self) -> int:
        """Return the next number within the episode."""
        self._sequence += 1
        return self._sequence

    def begin_episode(self) -> None:
        """Make the next image the first of a new episode, and trust the camera again. From any thread."""
        self._starts_over = True

    def take(self, message: Image | CompressedImage) -> Taken:
        """Judge an image that was received just now."""
        received, settings = time.monotonic(), self.settings
        if self._starts_over:
            self._starts_over = False
            self.frames.forget()
        stamp = nanoseconds(message.header.stamp)
        now = self._ros_now()
        self.delay = age = (now - stamp) / NS
        if age < -settings.future_tolerance:
            return self._refuse('stamp in the future', f'the image is stamped {-age:.3f} s ahead of ROS '
                                'time: synchronise the clocks, and give all nodes the same use_sim_time')
        try:
            pace, picture = self.frames.take(
                message, stamp, self._executed.moving(now), received, settings.frames)
        except ImageError as error:
            self._advice.refused(message, error)
            return self._refuse(error.kind, str(error))
        if pace.refused:
            return self._refuse(pace.value, f'the stamp is {stamp / NS:.3f} s: the camera driver must stamp '
                                'each image with the time it was taken, never the same twice')
        if pace is Pace.BETWEEN:
            return Taken(True)
        self._advice.received(message)
        if pace is Pace.FROZEN:
            self._refusals.count(f'image: {pace.value}')
            return Taken(True)
        if pace is Pace.NEW_EPISODE:
            self._begin_episode()
        self.stamp, self.camera_frame = stamp, message.header.frame_id
        deadline = settings.deadline
        stale = f'the image was {age * 1e3:.0f} ms old on receipt, {deadline * 1e3:.0f} ms are allowed'
        return Taken(True, Observation(
            picture, stamp, received, received + deadline - max(0.0, age), self.episode, self.next_sequence(),
            self.goal, stale if age > deadline else ''))

    def _begin_episode(self) -> None:
        self.episode = next(_EPISODES)
        self._sequence = 0

    def _refuse(self, kind: str, text: str) -> Taken:
        self._refusals.count(f'image: {kind}')
        self._logger.warning(f'image refused: {text}', throttle_duration_sec=_LOG_INTERVAL)
        return Taken(False)


class LargeImageAdvice:
    """
    Warns, once, that images are lost because they do not fit in the shared memory of Fast DDS.

    With best effort such images arrive rarely, or broken, or never, and nothing else says why.
    """

    def __init__(self, node: Node, topic: str) -> None:
        """`topic`: fully resolved."""
        self._node, self._topic = node, topic
        self._bytes = 0
        self._given = 'fastrtps' not in get_rmw_implementation_identifier()

    def refused(self, message: Image | CompressedImage, error: ImageError) -> None:
        """An image could not be used."""
        size = self._note(message)
        if size > SEGMENT and error.kind in ('empty', 'wrong size'):
            self._warn(f'an image of {size} bytes arrived broken')

    def received(self, message: Image | CompressedImage) -> None:
        """An image could be used."""
        self._note(message)

    def silent(self, seconds: float) -> None:
        """No image came for `seconds`."""
        if self._given:
            return
        if self._bytes > SEGMENT:
            self._warn(f'images of {self._bytes} bytes come with gaps')
        elif seconds >= _UNHEARD and not self._bytes and self._has_best_effort_publisher():
            self._warn(f'it has a publisher, but no image has come for {seconds:.0f} s')

    def _note(self, message: Image | CompressedImage) -> int:
        claimed = message.step * message.height if isinstance(message, Image) else 0
        self._bytes = max(len(message.data), claimed)
        return self._bytes

    def _has_best_effort_publisher(self) -> bool:
        return any(publisher.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
                   for publisher in self._node.get_publishers_info_by_topic(self._topic))

    def _warn(self, what: str) -> None:
        if self._given:
            return
        self._given = True
        profile = os.environ.get(_PROFILE)
        remedy = (f'it is set to {profile} here: set it for the camera driver too' if profile else
                  f'start the camera driver and this node with {_PROFILE}='
                  'SHARE/config/fastdds_large_images.xml, where SHARE is what '
                  '`ros2 pkg prefix --share worldmodel_ros` prints')
        self._node.get_logger().warning(
            f'{self._topic}: {what}. Best-effort images that do not fit in the shared memory of Fast DDS '
            f'({SEGMENT} bytes by default) are lost. Remedy: {remedy}; or use image_transport:=compressed')

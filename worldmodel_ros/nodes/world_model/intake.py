"""
Makes observations of images: finds the ticks, refuses what is broken, watches the age, numbers the episodes.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rclpy.impl.rcutils_logger import RcutilsLogger
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.control.responder import Observation
from worldmodel_ros.inputs.executed import ExecutedActions
from worldmodel_ros.inputs.frames import Frames
from worldmodel_ros.inputs.images import ImageError
from worldmodel_ros.inputs.ticks import NS, Pace
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.world_model.camera import LargeImageAdvice
from worldmodel_ros.nodes.world_model.messages import nanoseconds
from worldmodel_ros.nodes.world_model.parameters import frame_settings

_LOG_INTERVAL = 2.0  # s

# Of this process, counted from a random number: no two processes share one, whatever the clock of the host does. Of so
# many bits that a reader in JavaScript does not round it.
_EPISODES = itertools.count(secrets.randbits(48))


class Taken(NamedTuple):
    """`sound`: the image could be used, though it need not be a tick. `observation`: None if it is none."""

    sound: bool
    observation: Observation | None = None


class Intake:
    """
    The images of one activation. `goal` is given to each observation.

    `settings` are the node's parameters, read anew for every image; `ros_now` returns ROS time [ns].
    """

    def __init__(self, spec: Any, settings: Mapping[str, Any], executed: ExecutedActions,
                 ros_now: Callable[[], int], refusals: Refusals, advice: LargeImageAdvice,
                 logger: RcutilsLogger) -> None:
        self.goal = ''
        self.camera_frame = ''
        self.stamp = 0         # ns, of the newest observation
        self.episode = 0
        self.delay = 0.0       # s, age of the newest image on receipt
        self._sequence = 0
        self._settings, self._executed, self._ros_now = settings, executed, ros_now
        self._refusals, self._advice, self._logger = refusals, advice, logger
        self._frames = Frames(spec.step_period, spec.image_size)
        self._begin_anew = False
        self._begin_episode()

    @property
    def frozen(self) -> bool:
        """Whether the camera repeats one image although images should differ: the robot moves, or they are noisy."""
        return self._frames.frozen

    @property
    def image_size(self) -> tuple[int, int]:
        """Size (H, W) of the images that are handed on [pixels]."""
        return self._frames.size

    @image_size.setter
    def image_size(self, size: tuple[int, int]) -> None:
        self._frames.size = size

    def next_sequence(self) -> int:
        """Return the next number within the episode."""
        self._sequence += 1
        return self._sequence

    def begin_episode(self) -> None:
        """Make the next image the first of a new episode, and trust the camera again. From any thread."""
        self._begin_anew = True

    def take(self, message: Image | CompressedImage) -> Taken:
        """Judge an image that was received just now."""
        received, settings = time.monotonic(), self._settings
        if self._begin_anew:
            self._begin_anew = False
            self._frames.forget()
        stamp = nanoseconds(message.header.stamp)
        now = self._ros_now()
        self.delay = age = (now - stamp) / NS
        if age < -settings['future_tolerance_s']:
            return self._refuse('stamp in the future', f'the image is stamped {-age:.3f} s ahead of ROS '
                                'time: synchronise the clocks, and give all nodes the same use_sim_time')
        try:
            pace, picture = self._frames.take(
                message, stamp, self._executed.moving(now), received, frame_settings(settings))
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
        deadline = settings['deadline_s']
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

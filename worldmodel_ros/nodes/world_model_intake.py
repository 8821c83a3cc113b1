"""
Makes observations of images: finds the ticks, refuses what is broken, watches the age, numbers the episodes.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from rclpy.impl.rcutils_logger import RcutilsLogger
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.engine.answers import Observation
from worldmodel_ros.nodes import images
from worldmodel_ros.nodes.diagnostics import Refusals
from worldmodel_ros.nodes.world_model_camera import LargeImageAdvice
from worldmodel_ros.nodes.world_model_inputs import NS, ExecutedActions, FramePacer, FrozenCamera, Pace
from worldmodel_ros.nodes.world_model_messages import nanoseconds

_LOG_INTERVAL = 2.0  # s


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
        self._spec, self._settings, self._executed, self._ros_now = spec, settings, executed, ros_now
        self._refusals, self._advice, self._logger = refusals, advice, logger
        self._pacer, self._frozen = FramePacer(spec.step_period), FrozenCamera()
        self._begin_anew = False
        self._begin_episode()

    @property
    def frozen(self) -> bool:
        """Whether the camera shows the same picture again and again although the robot moves."""
        return self._frozen.frozen

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
            self._pacer.forget()
            self._frozen.forget()
        stamp = nanoseconds(message.header.stamp)
        self.delay = age = (self._ros_now() - stamp) / NS
        pace = self._pacer.classify(stamp, settings['tick_tolerance_s'], settings['time_jump_s'])
        if pace.refused:
            return self._refuse(pace.value, f'the stamp is {stamp / NS:.3f} s: the camera driver must stamp '
                                'each image with the time it was taken, never the same twice')
        if age < -settings['future_tolerance_s']:
            return self._refuse('stamp in the future', f'the image is stamped {-age:.3f} s ahead of ROS '
                                'time: synchronise the clocks, and give all nodes the same use_sim_time')
        if pace is Pace.BETWEEN:
            self._pacer.take(stamp, pace)
            return Taken(True)
        try:
            picture = self._picture(message)
        except images.ImageError as error:
            self._advice.refused(message, error)
            return self._refuse(error.kind, str(error))
        self._advice.received(message)
        was_frozen = self._frozen.frozen
        if self._frozen.update(
                message.data, self._executed.moving, received, settings['frozen_camera_timeout_s'],
                settings['frozen_camera_recovery']):
            self._refusals.count('image: frozen camera')
            return Taken(True)
        if was_frozen:
            pace = Pace.NEW_EPISODE  # what was shown in between is not what happened
        if pace is Pace.NEW_EPISODE:
            self._begin_episode()
        self._pacer.take(stamp, pace)
        self.stamp, self.camera_frame = stamp, message.header.frame_id
        deadline = settings['deadline_s']
        stale = f'the image was {age * 1e3:.0f} ms old on receipt, {deadline * 1e3:.0f} ms are allowed'
        return Taken(True, Observation(
            picture, stamp, received, received + deadline - max(0.0, age), self.episode, self.next_sequence(),
            self.goal, stale if age > deadline else ''))

    def _picture(self, message: Image | CompressedImage) -> np.ndarray:
        convert = images.to_rgb if isinstance(message, Image) else images.compressed_to_rgb
        return convert(message, self._spec.image_size)

    def _begin_episode(self) -> None:
        # From the clock, so that they rise across restarts too: the gate refuses those of the past.
        self.episode = max(time.time_ns(), self.episode + 1)
        self._sequence = 0

    def _refuse(self, kind: str, text: str) -> Taken:
        self._refusals.count(f'image: {kind}')
        self._logger.warning(f'image refused: {text}', throttle_duration_sec=_LOG_INTERVAL)
        return Taken(False)

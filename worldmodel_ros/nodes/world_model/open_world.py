"""
The world model node with an open world model: images, odometry and the camera's calibration in, predicted video out.

There is no policy: nothing here publishes a command. The networks have their own thread (``engine.open_world.worker``), which
publishes the predictions; the executor's thread only receives.
"""

import importlib.util
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from visualization_msgs.msg import MarkerArray

from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.inputs.mount import Frames
from worldmodel_ros.motion import path
from worldmodel_ros.msg import ActionChunk, PredictedFuture, Timings
from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import float32s, frames, header, time_message, to_jpeg
from worldmodel_ros.nodes.common.qos import CAMERA, STATUS
from worldmodel_ros.nodes.world_model.camera import STATIC
from worldmodel_ros.nodes.world_model.inputs import ExecutedTopic, Intake, IntakeSettings, LargeImageAdvice, OdometryTopic
from worldmodel_ros.nodes.world_model.outputs import Statistics, predicted_path

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.ladder import Rung
    from worldmodel_ros.engine.open_world.worker import Made, Seen, VideoFuture

_LOG_INTERVAL = 2.0  # s
_SHOWN = 4  # every so many images of a prediction, one is shown in predicted_image


def _tier(rung: 'Rung') -> int:
    """Return the tier of a message: TWO_STEP for the full number of steps, ONE_STEP for fewer."""
    if rung.smaller:
        return ActionChunk.TIER_SMALLER
    return ActionChunk.TIER_TWO_STEP if rung.whole else ActionChunk.TIER_ONE_STEP


def _quality(rung: 'Rung') -> str:
    """Return how a prediction was made, in words."""
    of = ' of the smaller model' if rung.smaller else ''
    return f'{rung.steps} steps{of}' + ('' if rung.whole else ', fewer than published')


class World:
    """Publishers of a configured node with an open world model, and its topics of camera calibration and odometry."""

    def __init__(self, node: LifecycleNode, world: Any, settings: Mapping[str, Any], refusals: Refusals) -> None:
        self._node, self._world, self._settings, self._refusals = node, world, settings, refusals
        make = node.create_lifecycle_publisher
        self.future = make(PredictedFuture, 'predicted_future', STATUS)
        self.image = make(CompressedImage, 'predicted_image/compressed', STATUS)
        self.path = make(MarkerArray, 'predicted_path', STATUS)
        self.odometry = OdometryTopic(node, world.spec, refusals)
        self.intrinsics = world.description.intrinsics
        self._calibrated = False
        self.optical: np.ndarray | None = None  # the camera's optical frame in the base, from tf
        self.mounted: Callable[[], None] = lambda: None  # called when that changes
        self._frames, self._camera_frame = Frames(), ''
        self._subscriptions = [node.create_subscription(CameraInfo, 'camera/camera_info', self._hear, CAMERA)]
        if importlib.util.find_spec('tf2_msgs'):
            from tf2_msgs.msg import TFMessage  # from the distribution, or built with this package (CMakeLists.txt)
            self._subscriptions.append(node.create_subscription(TFMessage, '/tf_static', self._on_transforms, STATIC))

    def destroy(self) -> None:
        """Destroy publishers and subscriptions."""
        for publisher in (self.future, self.image, self.path):
            self._node.destroy_lifecycle_publisher(publisher)
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self.odometry.destroy()

    def activation(self, executed: ExecutedTopic, advice: LargeImageAdvice) -> 'WorldActivation':
        """Return a new activation, to be started."""
        return WorldActivation(self._node, self, self._world, self._settings, executed, advice, self._refusals)

    def report(self, activation: 'WorldActivation | None') -> diagnostics.Report:
        """Return the state of the model, for /diagnostics."""
        values = {'model': self._world.spec.name, 'preset': self._world.preset.name, 'backend': self._world.backend,
                  'calibration': 'camera_info' if self._calibrated else 'world.json' if self.intrinsics else 'none',
                  'camera_in_base': 'world.json' if self.optical is None else f'tf, {self._camera_frame}'}
        if activation is None:
            return diagnostics.Report(diagnostics.STALE, 'not active', {**values, **self._refusals.values()})
        level, text = activation.judge()
        return diagnostics.Report(level, text, {**values, **activation.values(), **self._refusals.values()})

    def _on_transforms(self, message: Any) -> None:
        """Process transforms of /tf_static."""
        for transform in message.transforms:
            self._frames.add(transform)
        self._look_up()

    def _look_up(self) -> None:
        found = self._frames.pose(self._settings['base_frame'].lstrip('/'), self._camera_frame) if self._camera_frame else None
        if found is not None and (self.optical is None or not np.allclose(found, self.optical)):
            self.optical = found
            self.mounted()

    def _hear(self, message: CameraInfo) -> None:
        """Apply the calibration of a rectified camera to the part of its images that the model sees."""
        if message.header.frame_id.lstrip('/') != self._camera_frame:
            self._camera_frame = message.header.frame_id.lstrip('/')
            self._look_up()
        from worldmodel_ros.engine.open_world.calibration import fitted
        try:
            self.intrinsics = fitted(
                np.reshape(message.k, (3, 3)), (message.height, message.width), self._world.spec.image_size)
        except ValueError as error:
            self._refusals.count('camera_info')
            self._node.get_logger().warning(f'camera_info refused: {error}', **at_most_every(_LOG_INTERVAL))
            return
        if not self._calibrated and any(message.d):
            self._node.get_logger().warning(
                'camera_info tells of a distortion, which these models do not know: give them rectified images (image_proc)')
        self._calibrated = True


class WorldActivation:
    """One activation of a node with an open world model. Call its methods on the executor's thread, except ``predicted`` and
    ``failed``, which the worker's thread calls."""

    def __init__(self, node: LifecycleNode, parts: World, world: Any, settings: Mapping[str, Any], executed: ExecutedTopic,
                 advice: LargeImageAdvice, refusals: Refusals) -> None:
        from worldmodel_ros.engine.open_world.worker import GAP, WorldWorker  # lazily: torch is heavy
        self._node, self._parts, self._world, self._settings = node, parts, world, settings
        self.executed, self._refusals = executed, refusals
        self.intake = Intake(world.spec, IntakeSettings.of(settings), executed.actions,
                             lambda: node.get_clock().now().nanoseconds, refusals, advice, node.get_logger(), GAP)
        self.worker = WorldWorker(world, self.predicted, self.failed, settings['world_observes'], settings['world_chunks'],
                                  settings['world_deadline_s'])
        self._mounted()
        parts.mounted = self._mounted
        self.statistics = Statistics()  # stays empty: there are no ticks
        self._pose = np.zeros(3)  # x, y, yaw, from executed actions if there is no odometry
        self._stamp, self._odometry = 0, False
        self._counting = threading.Lock()
        self._images = self._predictions = self._failures = 0
        self._made: Made | None = None
        self._late, self._failure, self._newest = 0, '', -math.inf

    def start(self) -> None:
        """Begin to predict."""
        self.worker.start()

    def stop(self) -> None:
        """End the worker's thread, after its current chunk."""
        self._parts.mounted = lambda: None
        self.worker.stop()

    def take(self, message: Image | CompressedImage) -> None:
        """Submit an image to the worker, if it is a frame of the video."""
        from worldmodel_ros.engine.open_world.calibration import base_pose
        from worldmodel_ros.engine.open_world.worker import Seen
        _, observation = self.intake.take(message)
        if observation is None:
            return
        self._images += 1
        self._newest = time.monotonic()
        base = self._base(observation.stamp)
        if self._parts.intrinsics is None:
            self._refusals.count('image: camera not calibrated')
            self._node.get_logger().warning(
                'nothing is predicted: camera/camera_info has not been heard, and world.json has no intrinsics',
                **at_most_every(_LOG_INTERVAL))
            return
        twist = self.executed.actions.mean(None, observation.stamp)
        self.worker.submit(Seen(observation.image, observation.stamp, observation.received, base_pose(base), twist,
                                self._parts.intrinsics, observation.episode, observation.sequence))

    def set_goal(self, goal: str, task: Any) -> None:
        """Do nothing: without a policy the node accepts no goal."""

    def settings_changed(self) -> None:
        """Apply the current parameters."""
        self.intake.settings = IntakeSettings.of(self._settings)

    def predicted(self, seen: 'Seen', future: 'VideoFuture', made: 'Made') -> None:
        """Publish a predicted video."""
        with self._counting:
            self._predictions, self._made, self._failure = self._predictions + 1, made, ''
            late = made.seconds > (self._settings['world_deadline_s'] or math.inf)
            self._late = self._late + 1 if late else self._late
        camera, base_frame = self.intake.camera_frame, self._settings['base_frame']
        period = self._world.spec.step_period
        self._parts.future.publish(PredictedFuture(
            header=header(seen.stamp, camera), episode_id=seen.episode, sequence=seen.sequence,
            tier=_tier(made.rung), command_tier=ActionChunk.TIER_NONE, age=time.monotonic() - seen.received,
            step_period=period, frames=frames(future.frames, seen.stamp, period, camera),
            actions=ActionChunk(header=header(seen.stamp, base_frame), episode_id=seen.episode, sequence=seen.sequence,
                                step_period=period, names=list(self._world.spec.action_names),
                                values=float32s(future.actions)),
            progress=math.nan, timings=Timings(total=made.seconds, predicted=made.expected)))
        self._parts.path.publish(predicted_path(future, seen.stamp, period, base_frame))
        if self._parts.image.get_subscription_count():
            shown = np.hstack([seen.image, *future.frames[_SHOWN - 1::_SHOWN]])
            self._parts.image.publish(to_jpeg(shown, time_message(seen.stamp), camera))

    def failed(self, error: Exception) -> None:
        """Report a failure, which ended the session. Does not return if the GPU is lost."""
        end_if_lost(error)
        with self._counting:
            self._failures, self._failure = self._failures + 1, f'{type(error).__name__}: {error}'
        self._refusals.count(f'engine: {type(error).__name__}')
        self._node.get_logger().error(f'the model failed, and begins again with the next image:\n'
                                      f'{"".join(traceback.format_exception(error))}', **at_most_every(_LOG_INTERVAL))

    def judge(self) -> tuple[bytes, str]:
        """Return level and message of a report."""
        silent = time.monotonic() - self._newest
        if self._parts.intrinsics is None:
            return diagnostics.ERROR, 'camera/camera_info has not been heard, and world.json has no intrinsics'
        if silent > self._settings['camera_timeout_s']:
            return diagnostics.ERROR, 'no image that can be used has come' + (f' for {silent:.1f} s' if self._images else '')
        with self._counting:
            failure = self._failure
        return (diagnostics.ERROR, failure) if failure else (diagnostics.OK, 'predicting; commands nothing')

    def values(self) -> dict[str, Any]:
        """Return key-value pairs of a report."""
        with self._counting:
            made = self._made
            return {'images': self._images, 'predictions': self._predictions, 'prediction_s': made.seconds if made else 0.0,
                    'deadline_s': self._settings['world_deadline_s'], 'late': self._late,
                    'quality': _quality(made.rung) if made else 'none yet',
                    'failures': self._failures,
                    'odometry': self._parts.odometry.in_words(self._odometry)}

    def _mounted(self) -> None:
        """Apply the camera pose from tf, in a new episode: poses of two mounts must not be mixed."""
        if self._parts.optical is not None:
            self.worker.optical = self._parts.optical
            self.intake.begin_episode()

    def _base(self, stamp: int) -> np.ndarray:
        """Return the base's pose x, y, yaw at an image's stamp, from odometry, else from executed actions."""
        measured = self._parts.odometry.readings.at(stamp)
        if (measured is not None) != self._odometry:
            self._odometry = measured is not None
            self.intake.begin_episode()  # poses of two origins must not be mixed
        if measured is not None:
            self._pose = measured[0]
        elif self._stamp and stamp > self._stamp:
            seconds = (stamp - self._stamp) * 1e-9
            x, y, yaw = path(self.executed.actions.mean(self._stamp, stamp)[None], seconds)[0]
            c, s = math.cos(self._pose[2]), math.sin(self._pose[2])
            self._pose = self._pose + [c * x - s * y, s * x + c * y, yaw]
        self._stamp = stamp
        return self._pose


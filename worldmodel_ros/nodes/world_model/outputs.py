"""The topics that the world model node publishes: the command at once, all else from a thread of its own."""

import math
import queue
import threading
import time
from array import array
from collections.abc import Callable

import numpy as np
from geometry_msgs.msg import Point
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.control.maneuvers import path
from worldmodel_ros.control.responder import Answer, Prediction
from worldmodel_ros.msg import ActionChunk, DeadlineStatus, PredictedFuture, Timings
from worldmodel_ros.nodes.common.images import to_jpeg
from worldmodel_ros.nodes.common.messages import NS, float32s, header, time_message
from worldmodel_ros.nodes.common.qos import COMMAND, STATUS

_WAITING = 8  # messages at most that wait to be published
_LINE_WIDTH = 0.03  # m
_GAP = 2  # pixels, between two pictures of a strip


class Outputs:
    """
    The publishers of an engine's results. `command` is safe from any thread; so are the others, which return
    at once.
    """

    def __init__(self, node: LifecycleNode, action_names: tuple[str, ...], step_period: float,
                 base_frame: str) -> None:
        self._node, self._names = node, list(action_names)
        self._period, self._base_frame = step_period, base_frame
        make = node.create_lifecycle_publisher
        self._publishers = [
            make(ActionChunk, 'action_chunk', COMMAND), make(DeadlineStatus, 'deadline_status', STATUS),
            make(PredictedFuture, 'predicted_future', STATUS),
            make(CompressedImage, 'predicted_image/compressed', STATUS),
            make(MarkerArray, 'predicted_path', STATUS)]
        self._command, self._status, self._future, self._image, self._path = self._publishers
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self.skipped = 0

    def start(self) -> None:
        """Start the publishing thread."""
        thread = threading.Thread(target=self._run, name='publishing', daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Publish what waits, and end the thread."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def destroy(self) -> None:
        """Destroy the publishers."""
        for publisher in self._publishers:
            self._node.destroy_lifecycle_publisher(publisher)

    def command(self, answer: Answer) -> None:
        """Publish the command of an answer, if it has one, before this returns."""
        if answer.tier is not Tier.NONE:
            self._command.publish(action_chunk(answer, self._names, self._period, self._base_frame))

    def status(self, answer: Answer, age: float, camera_frame: str) -> None:
        """Publish how a tick stood; `age` as in `deadline_status`."""
        self._later(lambda: self._status.publish(deadline_status(answer, age, camera_frame)))

    def prediction(self, prediction: Prediction, camera_frame: str) -> None:
        """Publish a predicted future and its pictures."""
        def publish() -> None:
            self._future.publish(predicted_future(
                prediction, self._names, self._period, self._base_frame, camera_frame))
            stamp = time_message(prediction.observation.stamp)
            self._path.publish(predicted_path(prediction, self._period, self._base_frame))
            if self._image.get_subscription_count():
                self._image.publish(to_jpeg(strip(prediction), stamp, camera_frame))
        self._later(publish)

    def _later(self, publish: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(publish)
        except queue.Full:
            self.skipped += 1  # never block control on visualisation

    def _run(self) -> None:
        while (publish := self._queue.get()) is not None:
            try:
                publish()
            except Exception as error:
                self._node.get_logger().error(f'publishing failed: {error!r}', throttle_duration_sec=5.0)


def action_chunk(answer: Answer, names: list[str], step_period: float, frame_id: str) -> ActionChunk:
    """Return the command of an answer; without values for a stop."""
    return ActionChunk(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), step_period=step_period, names=names,
        values=array('f') if answer.actions is None else float32s(answer.actions))


def deadline_status(answer: Answer, age: float, frame_id: str) -> DeadlineStatus:
    """Return how a tick stood; `age` is that of the observation at the answer, by ROS time [s]."""
    counts = answer.counts
    return DeadlineStatus(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), verdict=int(answer.verdict), budget=answer.budget, latency=answer.latency,
        observation_age=age, predicted=answer.predicted, reason=answer.reason, two_step=counts.two_step,
        one_step=counts.one_step, smaller=counts.smaller, plan_only=counts.plan_only, last_plan=counts.last_plan,
        stop=counts.stop, late=counts.late)


def frames(pictures: np.ndarray, stamp: int, step_period: float, frame_id: str) -> list:
    """
    Return RGB, uint8 (T, H, W, 3), as JPEG, each stamped with the time it shows; `stamp` [ns]: the
    observation's.
    """
    return [to_jpeg(picture, time_message(stamp + round((k + 1) * step_period * NS)), frame_id)
            for k, picture in enumerate(pictures)]


def predicted_future(prediction: Prediction, names: list[str], step_period: float, base_frame: str,
                     camera_frame: str) -> PredictedFuture:
    """Return a decoded prediction."""
    observation, future = prediction.observation, prediction.future
    return PredictedFuture(
        header=header(observation.stamp, camera_frame), episode_id=observation.episode,
        sequence=observation.sequence, tier=int(prediction.tier), command_tier=int(prediction.command_tier),
        age=time.monotonic() - observation.received, step_period=step_period,
        frames=frames(future.frames, observation.stamp, step_period, camera_frame),
        actions=ActionChunk(
            header=header(observation.stamp, base_frame), episode_id=observation.episode,
            sequence=observation.sequence, tier=int(prediction.tier), step_period=step_period, names=names,
            values=float32s(future.actions)),
        collision_risk=float32s(future.collision_risk),
        progress=future.progress.get(observation.goal, math.nan), goal=observation.goal,
        timings=Timings(**prediction.timings))


def strip(prediction: Prediction) -> np.ndarray:
    """Return the observation and the predicted frames side by side, uint8 (H, W', 3) RGB."""
    pictures = [prediction.observation.image, *prediction.future.frames]
    gap = np.full((pictures[0].shape[0], _GAP, 3), 255, np.uint8)
    return np.hstack([part for picture in pictures for part in (picture, gap)][:-1])


def predicted_path(prediction: Prediction, step_period: float, frame_id: str) -> MarkerArray:
    """
    Return where the plan leads, from green (safe) to red (a contact is certain), in the base frame.

    It is shown for as long as the plan has actions: what stays on a screen longer would be nobody's plan.
    """
    future = prediction.future
    poses = path(future.actions, step_period)
    marker = Marker(header=header(prediction.observation.stamp, frame_id), ns='plan', type=Marker.LINE_STRIP,
                    action=Marker.ADD, lifetime=Duration(seconds=len(future.actions) * step_period).to_msg())
    marker.pose.orientation.w = 1.0
    marker.scale.x = _LINE_WIDTH
    risks = np.clip(np.concatenate([future.collision_risk[:1], future.collision_risk]), 0.0, 1.0)
    for (x, y), risk in zip([(0.0, 0.0), *poses[:, :2]], risks):
        marker.points.append(Point(x=float(x), y=float(y)))
        marker.colors.append(ColorRGBA(r=float(risk), g=float(1.0 - risk), a=1.0))
    return MarkerArray(markers=[marker])

"""The topics that the world model node publishes: the command at once, all else from a thread of its own."""

import queue
import threading
from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import CompressedImage
from visualization_msgs.msg import MarkerArray

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.control.responder import Answer, Prediction
from worldmodel_ros.msg import ActionChunk, DeadlineStatus, PredictedFuture
from worldmodel_ros.nodes.common.images import to_jpeg
from worldmodel_ros.nodes.common.qos import COMMAND, STATUS
from worldmodel_ros.nodes.world_model import messages

_WAITING = 8  # messages at most that wait to be published


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
            self._command.publish(messages.action_chunk(answer, self._names, self._period, self._base_frame))

    def status(self, answer: Answer, age: float, camera_frame: str) -> None:
        """Publish how a tick stood; `age` as in messages.deadline_status."""
        self._later(lambda: self._status.publish(messages.deadline_status(answer, age, camera_frame)))

    def prediction(self, prediction: Prediction, camera_frame: str) -> None:
        """Publish a predicted future and its pictures."""
        def publish() -> None:
            self._future.publish(messages.predicted_future(
                prediction, self._names, self._period, self._base_frame, camera_frame))
            stamp = messages.time_message(prediction.observation.stamp)
            self._path.publish(messages.predicted_path(prediction, self._period, self._base_frame))
            if self._image.get_subscription_count():
                self._image.publish(to_jpeg(messages.strip(prediction), stamp, camera_frame))
        self._later(publish)

    def _later(self, publish: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(publish)
        except queue.Full:
            self.skipped += 1  # whoever commands must never wait for whoever shows

    def _run(self) -> None:
        while (publish := self._queue.get()) is not None:
            try:
                publish()
            except Exception as error:
                self._node.get_logger().error(f'publishing failed: {error!r}', throttle_duration_sec=5.0)

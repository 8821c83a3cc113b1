"""Shows a running system live in Rerun: a node that subscribes to all topics of the supported types and publishes nothing."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import rclpy
import rerun as rr
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions

from worldmodel_ros.evaluate.view import TYPES, Recording, layout
from worldmodel_ros.nodes.common.qos import hearing
from worldmodel_ros.nodes.recorder.types import UnknownTypeError, message_class

_DISCOVERY_PERIOD = 0.5  # s
_SENDING_PERIOD = 0.2    # s, for which values are buffered at most
_DEPTH = 5               # queued messages of a topic: what cannot be shown in time is not worth showing
_POLL_PERIOD = 0.1       # s


class Viewer(Node):
    """Subscribes to each topic of TYPES in its namespace once it has a publisher; ``recording`` shows the messages."""

    def __init__(self, stream: rr.RecordingStream, every: float, **options: Any) -> None:
        """``every``: see Recording."""
        super().__init__('worldmodel_view', **options)
        self._stream, self.recording = stream, Recording(stream, every)
        self._heard: dict[str, str] = {}
        self._unknown: set[str] = set()
        self.create_timer(_DISCOVERY_PERIOD, self._discover)
        self.create_timer(_SENDING_PERIOD, self.recording.flush)
        self._discover()

    @property
    def heard(self) -> Mapping[str, str]:
        """Type of each subscribed topic."""
        return self._heard

    def _discover(self) -> None:
        own = self.get_namespace().rstrip('/') + '/'
        for topic, types in self.get_topic_names_and_types():
            if topic in self._heard or topic in self._unknown or len(types) != 1 or types[0] not in TYPES:
                continue
            if topic.startswith(own) and (publishers := self.get_publishers_info_by_topic(topic)):
                self._hear(topic, types[0], hearing(publishers, _DEPTH))

    def _hear(self, topic: str, type_name: str, qos: QoSProfile) -> None:
        try:
            kind = message_class(type_name)
        except UnknownTypeError as error:
            self._unknown.add(topic)
            self.get_logger().warning(f'{topic} is not shown: {error}')
            return
        self._heard[topic] = type_name
        self.create_subscription(kind, topic, partial(self._on_message, topic, type_name), qos)
        self._stream.send_blueprint(layout(self._heard))

    def _on_message(self, topic: str, type_name: str, message: Any) -> None:
        now = self.get_clock().now().nanoseconds
        if self.recording.wants(topic, now):
            self.recording.add(topic, type_name, message, now)


def view(sink: Callable[[rr.RecordingStream], None], namespace: str = '', every: float = 0.0, seconds: float | None = None
         ) -> Mapping[str, int]:
    """
    Show a running system until Ctrl-C, or for ``seconds``; return the number of messages shown per topic.

    ``sink`` is called with the recording stream before anything is logged, and sets its destination.
    """
    os.nice(10)  # the robot's processes come first
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    stream = rr.RecordingStream('worldmodel')
    sink(stream)
    context = Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = Viewer(stream, every, context=context, namespace=namespace)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        end = None if seconds is None else time.monotonic() + seconds
        while not over.is_set() and (end is None or time.monotonic() < end):
            executor.spin_once(timeout_sec=_POLL_PERIOD)
        node.recording.flush()
        return node.recording.shown
    finally:
        rclpy.shutdown(context=context)
        stream.disconnect()

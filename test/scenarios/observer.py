"""Records what a robot's nodes say to each other, with the time at which each message arrived."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dds import on_its_thread, raise_receiving_threads, raise_threads, received_at
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import TwistStamped
from nav_msgs.msg import Odometry
from rclpy.client import Client
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from worldmodel_ros.msg import ActionChunk, CommandStatus, DeadlineStatus, PredictedFuture
from worldmodel_ros.nodes.common.qos import LATCHED

# Deeper than what the nodes use among themselves: no command may hide behind a later one.
_ALL = QoSProfile(depth=1000)
_ALL_BEST_EFFORT = QoSProfile(depth=1000, reliability=ReliabilityPolicy.BEST_EFFORT)
_KEPT = 20_000  # messages of a topic

TOPICS = {
    'cmd_vel': (TwistStamped, _ALL),
    'action_chunk': (ActionChunk, _ALL),
    'command_status': (CommandStatus, _ALL),
    'deadline_status': (DeadlineStatus, _ALL),
    'predicted_future': (PredictedFuture, _ALL),
    'camera/image_raw': (Image, _ALL_BEST_EFFORT),
    'sim/ground_truth': (Odometry, _ALL),
    'sim/objects': (MarkerArray, LATCHED),
    '/diagnostics': (DiagnosticArray, _ALL),
}


class Received(NamedTuple):
    """A message and the steady time of its arrival [s]."""

    at: float
    message: Any


class Observer:
    """
    A node that listens to one robot, on a thread of its own. Times are of the steady clock [s].

    ``changed`` is notified of every message. Only the reports of this robot are kept of /diagnostics.
    """

    def __init__(self, context: Context, namespace: str) -> None:
        self.node = Node('scenario_observer', context=context, namespace=namespace)
        self.changed = threading.Condition()
        self._received = {topic: deque(maxlen=_KEPT) for topic in TOPICS}
        self._prefix = namespace.strip('/') + '/' if namespace.strip('/') else ''
        for topic, (kind, qos) in TOPICS.items():
            self.node.create_subscription(kind, topic, self._recorder(topic), qos)
        raise_receiving_threads()
        self._executor = SingleThreadedExecutor(context=context)
        self._executor.add_node(self.node)
        self._over = False
        self._thread = threading.Thread(target=self._spin, name='scenario observer', daemon=True)
        self._thread.start()

    def since(self, topic: str, start: float) -> list[Received]:
        """Return what arrived on a topic after a steady time [s], oldest first."""
        with self.changed:
            received = self._received[topic]
            newest_first = []
            for item in reversed(received):
                if item.at <= start:
                    break
                newest_first.append(item)
        return newest_first[::-1]

    def newest(self, topic: str) -> Received | None:
        """Return what arrived last on a topic."""
        with self.changed:
            received = self._received[topic]
            return received[-1] if received else None

    def forget(self, client_or_subscription: Client | Subscription) -> None:
        """Destroy a client or a subscription of the node."""
        destroy = self.node.destroy_client if isinstance(client_or_subscription, Client) else self.node.destroy_subscription
        on_its_thread(self._executor, destroy, client_or_subscription)

    def close(self) -> None:
        """End the thread and destroy the node."""
        self._over = True
        self._thread.join()
        self._executor.shutdown()
        self.node.destroy_node()

    def _recorder(self, topic: str) -> Callable[[Any, dict], None]:
        def record(message: Any, info: dict) -> None:
            at = received_at(info)
            if topic == '/diagnostics' and not self._is_own(message):
                return
            with self.changed:
                self._received[topic].append(Received(at, message))
                self.changed.notify_all()

        return record

    def _is_own(self, message: DiagnosticArray) -> bool:
        return all(
            status.hardware_id.rpartition('/')[0] == self._prefix.rstrip('/') for status in message.status
        )

    def _spin(self) -> None:
        raise_threads([threading.get_native_id()])  # or what it has not come to yet would be taken for missing
        while not self._over:
            self._executor.spin_once(timeout_sec=0.05)

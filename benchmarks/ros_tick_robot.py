"""The robot of ros_tick.py: a camera and wheels at a steady rate, and a base that receives commands."""
from __future__ import annotations

import array
import gc
import math
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import rclpy
from geometry_msgs.msg import TwistStamped
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from worldmodel_ros import realtime
from worldmodel_ros.msg import DeadlineStatus, Decision
from worldmodel_ros.nodes.common.qos import CAMERA, ODOMETRY, STATUS

if TYPE_CHECKING:
    from ros_tick_film import Film

PICTURES = 16  # different ones, since a camera that repeats one image counts as frozen
FIRST_COMMAND = 30.0  # s


class Robot:
    """Publishes images from ``begin`` on, with odometry if given a film; ``taken`` has what came back since ``clear``."""

    def __init__(self, size: tuple[int, int], rate: float, domain: int, film: Film | None = None):
        """Without a ``film``, images are noise."""
        self._period, self._film_of = 1.0 / rate, film
        rng = np.random.default_rng(0)
        images = film.images if film else [rng.integers(0, 256, (*size, 3), np.uint8) for _ in range(PICTURES)]
        self._pictures = [array.array('B', image.tobytes()) for image in images]
        self._size = size
        self._context = Context()
        rclpy.init(args=[], context=self._context, domain_id=domain)
        self._node = Node('robot', context=self._context, start_parameter_services=False, enable_rosout=False)
        self._camera = self._node.create_publisher(Image, 'camera/image_raw', CAMERA)
        self._odometry = self._node.create_publisher(Odometry, 'odom', ODOMETRY)
        self._node.create_subscription(TwistStamped, 'cmd_vel', self._on_command, STATUS)
        self._node.create_subscription(DeadlineStatus, 'deadline_status', self._on_status, STATUS)
        if film:
            self._node.create_subscription(Decision, 'decision', self._on_decision, STATUS)
            self._node.create_subscription(MarkerArray, 'predicted_path', self._on_prediction, STATUS)
        self._executor = SingleThreadedExecutor(context=self._context)  # it reports when DDS had a message
        self._executor.add_node(self._node)
        self._lock = threading.Lock()
        self._over, self._driven = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._film, self._listen)]
        self.clear()

    def __enter__(self) -> Robot:
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._executor.shutdown()
        self._node.destroy_node()
        rclpy.try_shutdown(context=self._context)

    def begin(self, timeout: float = FIRST_COMMAND) -> None:
        """Start publishing and wait for a command; raises RuntimeError if none comes.

        From then on this process does not collect garbage, and its threads switch more often: a pause between an image's
        stamp and its publication would count as the system's.
        """
        gc.collect()
        gc.disable()
        sys.setswitchinterval(realtime.SWITCH_INTERVAL)
        for thread in self._threads:
            thread.start()
        if not self._driven.wait(min(timeout, FIRST_COMMAND)):
            raise RuntimeError(f'no command within {FIRST_COMMAND:.0f} s of the first picture: see --logs')

    def clear(self) -> None:
        with self._lock:
            self._images, self._commands, self._statuses = 0, [], []
            self._decisions, self._predictions = [], 0

    def taken(self) -> tuple[int, list[float], list[DeadlineStatus]]:
        """Return images published, the age of each command's image on receipt (s), and statuses, since ``clear``."""
        with self._lock:
            return self._images, list(self._commands), list(self._statuses)

    def decided(self) -> tuple[list[Decision], int]:
        """Return decisions, and the number of predictions published, since ``clear``."""
        with self._lock:
            return list(self._decisions), self._predictions

    def _film(self) -> None:
        height, width = self._size
        message = Image(height=height, width=width, encoding='rgb8', step=3 * width)
        message.header.frame_id = 'camera'
        due, count = time.monotonic(), 0
        while not self._over.is_set():
            message.data = self._pictures[count % len(self._pictures)]
            message.header.stamp = self._node.get_clock().now().to_msg()
            if self._film_of:
                self._publish_odometry(message.header.stamp, count % len(self._pictures))
            self._camera.publish(message)
            with self._lock:
                self._images += 1
            count, due = count + 1, max(due + self._period, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def _listen(self) -> None:
        while not self._over.is_set():
            self._executor.spin_once(timeout_sec=0.1)

    def _on_command(self, message: TwistStamped, info: dict[str, int]) -> None:
        stamp = message.header.stamp.sec * 10 ** 9 + message.header.stamp.nanosec
        if not stamp:  # the gate's own stop
            return
        with self._lock:
            self._commands.append((info['received_timestamp'] - stamp) / 1e9)
        self._driven.set()

    def _publish_odometry(self, stamp, number: int) -> None:
        message = Odometry(child_frame_id='base_link')
        message.header.stamp, message.header.frame_id = stamp, 'odom'
        place, turned = message.pose.pose.position, message.pose.pose.orientation
        place.x, place.y, yaw = self._film_of.poses[number]
        turned.z, turned.w = math.sin(yaw / 2), math.cos(yaw / 2)
        message.twist.twist.linear.x, message.twist.twist.angular.z = self._film_of.twists[number]
        self._odometry.publish(message)

    def _on_decision(self, message: Decision) -> None:
        with self._lock:
            self._decisions.append(message)

    def _on_prediction(self, message: MarkerArray) -> None:
        with self._lock:
            self._predictions += 1

    def _on_status(self, message: DeadlineStatus) -> None:
        with self._lock:
            self._statuses.append(message)

"""Notices what is wrong with a camera's topic, and says what to do about it."""

import os

from rclpy.node import Node
from rclpy.qos import ReliabilityPolicy
from rclpy.utilities import get_rmw_implementation_identifier
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.inputs.images import ImageError

SEGMENT = 512 * 1024  # bytes, shared memory of a Fast DDS participant by default
_UNHEARD = 3.0  # s, that discovery may take
_PROFILE = 'FASTRTPS_DEFAULT_PROFILES_FILE'


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

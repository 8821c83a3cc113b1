"""The camera of the world model node: CameraInfo, by which images are corrected, and the mount, from tf."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo

from worldmodel_ros.inputs.camera import Correction
from worldmodel_ros.inputs.mount import Frames, Mount
from worldmodel_ros.nodes.common.camera_info import camera_info_topic
from worldmodel_ros.nodes.common.qos import CAMERA

STATIC = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_DYNAMIC = QoSProfile(depth=100, reliability=ReliabilityPolicy.BEST_EFFORT)


class CameraTopics:
    """
    Keeps a camera's image ``correction``, from its CameraInfo, and its ``mount``.

    ``changed`` is called when the correction of images has changed. /tf is read only until the camera is found: on robots it
    has hundreds of messages a second, for which this node's executor has no time. A camera on a joint is taken to stay at the
    first pose.
    """

    def __init__(self, node: Node, image_topic: str, spec: Any, settings: Mapping[str, Any], changed: Callable[[], None]
                 ) -> None:
        """``image_topic``: resolved; ``spec``: the model's Preset; ``settings``: the node's parameters."""
        self._node, self._changed = node, changed
        self._trained = spec.camera
        self._told = settings['camera_height_m'], settings['camera_pitch_deg']
        self._base, self._frame = settings['base_frame'], ''
        heeds = settings['use_camera_info']
        self._ignored = '' if heeds else 'use_camera_info is false: images are cropped and scaled, whatever camera they are of'
        self.correction = Correction(
            self._trained.vertical_fov if self._trained and heeds else None, spec.image_size, settings['image_rectified'])
        self._frames, self._found = Frames(), None
        self._newest: tuple[Any, ...] = ()
        self.info_topic = camera_info_topic(node, image_topic)
        self._subscriptions = [node.create_subscription(CameraInfo, self.info_topic, self._on_info, CAMERA)]
        self._moving: Any = None
        if self._trained and None in self._told and importlib.util.find_spec('tf2_msgs'):
            from tf2_msgs.msg import TFMessage  # from the distribution, or built with this package (CMakeLists.txt)
            self._subscriptions.append(node.create_subscription(TFMessage, '/tf_static', self._on_transforms, STATIC))
            self._moving = node.create_subscription(TFMessage, '/tf', self._on_transforms, _DYNAMIC)

    def destroy(self) -> None:
        """Destroy the subscriptions."""
        for subscription in (*self._subscriptions, *filter(None, [self._moving])):
            self._node.destroy_subscription(subscription)

    @property
    def heard(self) -> bool:
        """Whether a CameraInfo was received."""
        return bool(self._newest)

    @property
    def mount(self) -> Mount | None:
        """Height and pitch of the camera, each from the parameters, else from tf; None unless both are known."""
        height, pitch = self._told
        height, pitch = (getattr(self._found, name, None) if told is None else told
                         for name, told in (('height', height), ('pitch', pitch)))
        return None if height is None or pitch is None else Mount(height, pitch)

    def differences(self) -> str:
        """Return how the camera's mount differs from that in training; '' if it does not, or is unknown."""
        mount = self.mount
        if mount is None or self._trained is None:
            return ''
        trained = self._trained.height, self._trained.pitch + self.correction.pitch
        found = mount.differences(*trained)
        return f'the camera stands {" and ".join(found)}; what that costs, by {mount.cost(*trained)}' if found else ''

    def values(self) -> dict[str, Any]:
        """Return key-value pairs of a diagnostics report."""
        mount = self.mount
        return {'camera': self._ignored or self.correction.in_words(),
                'camera_height_m': mount.height if mount else 'not known',
                'camera_pitch_deg': mount.pitch if mount else 'not known'}

    def _on_info(self, info: CameraInfo) -> None:
        # CameraInfo comes at the rate of the images and rarely changes.
        told = (info.header.frame_id, info.height, info.width, info.distortion_model, info.binning_x, info.binning_y, info.roi,
                tuple(info.d), tuple(info.k), tuple(info.p))
        if told == self._newest:
            return
        self._newest, self._frame = told, info.header.frame_id
        changed = not self._ignored and self.correction.take(info)
        self._look_up(changed)

    def _on_transforms(self, message: Any) -> None:
        for transform in message.transforms:
            self._frames.add(transform)
        self._look_up()

    def _look_up(self, changed: bool = False) -> None:
        """Look up the mount; call ``changed`` if that, or what the caller has ``changed``, alters the correction of images."""
        if self._frame:
            self._found = self._frames.mount(self._base, self._frame.lstrip('/'))
            if self._found and self._moving:
                self._node.destroy_subscription(self._moving)
                self._moving = None
        if self.mount and self._trained and not self._ignored:
            changed |= self.correction.turn(self.mount.pitch - self._trained.pitch)
        if not changed:
            return
        if self.correction.refusal:
            self._node.get_logger().error(f'camera: {self.correction.refusal}')
        else:
            self._node.get_logger().info(f'camera: {self.correction.in_words()}')
        self._changed()


class Looked(NamedTuple):
    """Result of ``look``: whether a CameraInfo was ``heard`` on ``info_topic``, and what it means, in words."""

    heard: bool
    info_topic: str
    correction: str
    refused: bool
    mount: Mount | None
    differences: str


def look(image_topic: str, preset: Any, seconds: float = 3.0) -> Looked:
    """Listen for up to ``seconds`` to the camera of an image topic, and compare it with that of a model's Preset."""
    context = Context()
    rclpy.init(context=context)
    try:
        node = Node('worldmodel_doctor', context=context)
        topics = CameraTopics(node, node.resolve_topic_name(image_topic), preset, {
            'camera_height_m': None, 'camera_pitch_deg': None, 'base_frame': 'base_link', 'use_camera_info': True,
            'image_rectified': False}, lambda: None)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (topics.heard and topics.mount):
            executor.spin_once(timeout_sec=0.1)
        return Looked(topics.heard, topics.info_topic, topics.correction.in_words(), bool(topics.correction.refusal),
                      topics.mount, topics.differences())
    finally:
        rclpy.shutdown(context=context)

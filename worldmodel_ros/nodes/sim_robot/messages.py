"""The simulated robot's state as messages: images, camera model, odometry, markers."""

import array
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from geometry_msgs.msg import Pose
from nav_msgs.msg import Odometry
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.nodes.common.messages import header
from worldmodel_ros.sim.scene import CAMERA_FOV_DEG
from worldmodel_ros.sim.world import World

CAMERA_FRAME = 'camera_optical_frame'
_WALL_THICKNESS = 0.05  # m
_WALL_SIDES = ((1, 0), (0, 1), (-1, 0), (0, -1))  # the order of Scene.walls

Planar = tuple[float, float, float]  # x [m], y [m], yaw [rad]


def image(frame: np.ndarray, stamp: int, encoding: str = 'rgb8') -> Image:
    """Return a uint8 (H, W, 3) RGB frame as a raw image, labelled with ``encoding``."""
    height, width, channels = frame.shape
    return Image(header=header(stamp, CAMERA_FRAME), height=height, width=width, encoding=encoding,
                 step=width * channels, data=array.array('B', frame.tobytes()))


def camera_info(size: tuple[int, int], stamp: int) -> CameraInfo:
    """Return the ideal pinhole camera of images of ``size`` (height, width)."""
    height, width = size
    # The field of view is vertical, pixels are square, and integer coordinates are pixel centres.
    f = height / 2 / math.tan(math.radians(CAMERA_FOV_DEG) / 2)
    cx, cy = (width - 1) / 2, (height - 1) / 2
    return CameraInfo(
        header=header(stamp, CAMERA_FRAME), height=height, width=width,
        distortion_model='plumb_bob', d=[0.0] * 5,
        k=[f, 0.0, cx, 0.0, f, cy, 0.0, 0.0, 1.0], r=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        p=[f, 0.0, cx, 0.0, 0.0, f, cy, 0.0, 0.0, 0.0, 1.0, 0.0])


def relative_pose(pose: Planar, origin: Planar) -> Planar:
    """Return ``pose`` as seen from ``origin``, the yaw within -pi..pi."""
    dx, dy = pose[0] - origin[0], pose[1] - origin[1]
    cos, sin = math.cos(origin[2]), math.sin(origin[2])
    return cos * dx + sin * dy, cos * dy - sin * dx, math.remainder(pose[2] - origin[2], math.tau)


def odometry(pose: Planar, twist: tuple[float, float], stamp: int, frame_id: str) -> Odometry:
    """Return a planar pose in ``frame_id`` and a twist (forward m/s, yaw rad/s) in base_link."""
    message = Odometry(header=header(stamp, frame_id), child_frame_id='base_link')
    message.pose.pose = _pose(*pose)
    message.twist.twist.linear.x, message.twist.twist.angular.z = twist
    return message


def markers(world: World, stamp: int) -> MarkerArray:
    """
    Return the objects, movers and walls of the room, in frame ``world``, enough to draw it from above.

    Namespace ``objects``: a cube or cylinder per object, ``text`` its colour name. Namespace ``movers``: a cylinder per mover,
    ``text`` its name. Namespace ``walls``: four cubes. Scales are full lengths in m along the marker's own axes.
    """
    result = MarkerArray()
    for number, prop in enumerate(world.scene.props):
        x, y = world.position(prop.colour)
        # A box's footprint is the square inscribed in the circle of its radius.
        size = prop.radius * (math.sqrt(2) if prop.shape == 'box' else 2)
        marker = _marker('objects', number, stamp, (size, size, prop.height), prop.rgb)
        marker.type = Marker.CUBE if prop.shape == 'box' else Marker.CYLINDER
        marker.pose = _pose(x, y, world.heading(prop.colour), prop.height / 2)
        marker.text = prop.colour
        result.markers.append(marker)
    scene = world.scene
    for number, mover in enumerate(scene.movers):
        marker = _marker('movers', number, stamp, (2 * mover.radius, 2 * mover.radius, mover.height), mover.rgb)
        marker.type, marker.text = Marker.CYLINDER, mover.name
        marker.pose = _pose(*world.position(mover.name), 0.0, mover.height / 2)
        result.markers.append(marker)
    for number, (wall, (along_x, along_y)) in enumerate(zip(scene.walls, _WALL_SIDES, strict=True)):
        length = (scene.depth if along_x else scene.width) + 2 * _WALL_THICKNESS
        marker = _marker('walls', number, stamp, (_WALL_THICKNESS, length, scene.wall_height), wall.rgb)
        marker.type = Marker.CUBE
        marker.pose = _pose(
            along_x * (scene.width + _WALL_THICKNESS) / 2, along_y * (scene.depth + _WALL_THICKNESS) / 2,
            math.atan2(along_y, along_x), scene.wall_height / 2)
        result.markers.append(marker)
    return result


def _marker(namespace: str, number: int, stamp: int, scale: tuple[float, float, float],
            rgb: tuple[float, float, float]) -> Marker:
    marker = Marker(header=header(stamp, 'world'), ns=namespace, id=number, action=Marker.ADD)
    marker.scale.x, marker.scale.y, marker.scale.z = scale
    marker.color = ColorRGBA(r=rgb[0], g=rgb[1], b=rgb[2], a=1.0)
    return marker


def _pose(x: float, y: float, yaw: float, z: float = 0.0) -> Pose:
    pose = Pose()
    pose.position.x, pose.position.y, pose.position.z = x, y, z
    pose.orientation.z, pose.orientation.w = math.sin(yaw / 2), math.cos(yaw / 2)
    return pose


def spoil(message: Image, faults: Mapping[str, Any]) -> None:
    """Inject the faults ``camera_encoding`` and ``camera_break`` into a valid image."""
    message.encoding = faults['camera_encoding']
    kind = faults['camera_break']
    if kind == 'empty':
        del message.data[:]
    elif kind == 'short':
        del message.data[len(message.data) // 2:]
    elif kind == 'wrong_size':
        message.height *= 2

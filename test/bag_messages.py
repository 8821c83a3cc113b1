"""Messages for the tests' bags, built with ``rosbags``, so that ROS is not needed."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from pixel_encodings import ALIKE, EXACT
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

NS = 1_000_000_000
TYPES = get_typestore(Stores.ROS2_JAZZY)
TYPES.register(get_types_from_msg(
    'float32 steering_angle\nfloat32 steering_angle_velocity\nfloat32 speed\nfloat32 acceleration\nfloat32 jerk\n',
    'ackermann_msgs/msg/AckermannDrive'))
TYPES.register(get_types_from_msg('std_msgs/Header header\nAckermannDrive drive\n',
                                  'ackermann_msgs/msg/AckermannDriveStamped'))
for _name in ('Term', 'Task'):
    TYPES.register(get_types_from_msg((Path(__file__).resolve().parents[1] / 'msg' / f'{_name}.msg').read_text(),
                                      f'worldmodel_ros/msg/{_name}'))
_T = TYPES.types
WHEELBASE = 0.26  # m, of the Ackermann drives


def stamp(at: int) -> Any:
    return _T['builtin_interfaces/msg/Time'](sec=at // NS, nanosec=at % NS)


def header(at: int, frame_id: str) -> Any:
    return _T['std_msgs/msg/Header'](stamp=stamp(at), frame_id=frame_id)


def string(text: str) -> Any:
    return _T['std_msgs/msg/String'](data=text)


def image_message(frame: np.ndarray, at: int, encoding: str) -> Any:
    """Return RGB, uint8 (H, W, 3), in any encoding of the tests; '16UC1' is a depth image of the same size."""
    head = header(at, 'camera')
    if encoding in ('jpeg', 'png'):
        _, data = cv2.imencode('.jpg' if encoding == 'jpeg' else '.png', frame[..., ::-1])
        return _T['sensor_msgs/msg/CompressedImage'](header=head, format=encoding, data=data.ravel())
    encode = {**EXACT, **ALIKE, 'mono8': lambda p: cv2.cvtColor(p, cv2.COLOR_RGB2GRAY),
              '16UC1': lambda p: p[..., :2]}[encoding]
    height, width = frame.shape[:2]
    rows = np.ascontiguousarray(encode(frame)).reshape(height, -1)
    return _T['sensor_msgs/msg/Image'](header=head, height=height, width=width, encoding=encoding, is_bigendian=0,
                                       step=rows.shape[1], data=rows.ravel())


def camera_info_message(told: Any, at: int = 0) -> Any:
    """Return a CameraInfo of camera_infos.camera_info as a message."""
    roi = _T['sensor_msgs/msg/RegionOfInterest'](x_offset=0, y_offset=0, height=0, width=0, do_rectify=False)
    return _T['sensor_msgs/msg/CameraInfo'](
        header=header(at, 'camera'), height=told.height, width=told.width, distortion_model=told.distortion_model,
        d=np.array(told.d, float), k=np.array(told.k), r=np.eye(3).ravel(), p=np.array(told.p), binning_x=0, binning_y=0,
        roi=roi)


def _vector(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Any:
    return _T['geometry_msgs/msg/Vector3'](x=x, y=y, z=z)


def twist(command: tuple[float, float], at: int = 0) -> Any:
    return _T['geometry_msgs/msg/Twist'](linear=_vector(x=command[0]), angular=_vector(z=command[1]))


def _twist_stamped(command: tuple[float, float], at: int) -> Any:
    return _T['geometry_msgs/msg/TwistStamped'](header=header(at, 'base_link'), twist=twist(command))


def odometry(command: tuple[float, float], at: int, place: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Any:
    x, y, yaw = place
    turned = _T['geometry_msgs/msg/Quaternion'](x=0.0, y=0.0, z=float(np.sin(yaw / 2)), w=float(np.cos(yaw / 2)))
    pose = _T['geometry_msgs/msg/Pose'](position=_T['geometry_msgs/msg/Point'](x=x, y=y, z=0.0), orientation=turned)
    covariance = np.zeros(36)
    return _T['nav_msgs/msg/Odometry'](
        header=header(at, 'odom'), child_frame_id='base_link',
        pose=_T['geometry_msgs/msg/PoseWithCovariance'](pose=pose, covariance=covariance),
        twist=_T['geometry_msgs/msg/TwistWithCovariance'](twist=twist(command), covariance=covariance))


def _ackermann(command: tuple[float, float], at: int) -> Any:
    """Return speed and a steering angle; the robot sometimes turns on the spot, where the angle means nothing."""
    angle = float(np.arctan2(WHEELBASE * command[1], command[0])) if command[0] else 0.0
    drive = _T['ackermann_msgs/msg/AckermannDrive'](
        steering_angle=angle, steering_angle_velocity=0.0, speed=command[0], acceleration=0.0, jerk=0.0)
    return _T['ackermann_msgs/msg/AckermannDriveStamped'](header=header(at, 'base_link'), drive=drive)


def _float64_multi_array(command: tuple[float, float], at: int) -> Any:
    layout = _T['std_msgs/msg/MultiArrayLayout'](dim=[], data_offset=0)
    return _T['std_msgs/msg/Float64MultiArray'](layout=layout, data=np.array(command))


def _joint_state(command: tuple[float, float], at: int) -> Any:
    return _T['sensor_msgs/msg/JointState'](
        header=header(at, ''), name=['drive', 'turn'], position=np.zeros(2), velocity=np.array(command),
        effort=np.zeros(0))


class Action(NamedTuple):
    type: str
    make: Callable[[tuple[float, float], int], Any]


ACTIONS = {
    'TwistStamped': Action('geometry_msgs/msg/TwistStamped', _twist_stamped),
    'Twist': Action('geometry_msgs/msg/Twist', twist),
    'Odometry': Action('nav_msgs/msg/Odometry', odometry),
    'AckermannDriveStamped': Action('ackermann_msgs/msg/AckermannDriveStamped', _ackermann),
    'Float64MultiArray': Action('std_msgs/msg/Float64MultiArray', _float64_multi_array),
    'JointState': Action('sensor_msgs/msg/JointState', _joint_state),
}


def task(name: str, *targets: str):
    """Return a task that asks to reach each of the targets."""
    term = _T['worldmodel_ros/msg/Term']
    return _T['worldmodel_ros/msg/Task'](name, [
        term('reach', target, 0.0, 0.0, [], np.zeros(0), np.zeros(0)) for target in targets])

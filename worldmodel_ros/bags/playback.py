"""Selects what is played from a bag: the topics, their names for the model, and the conversion of their messages."""
from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worldmodel_ros.bags.mapping import Mapping
from worldmodel_ros.bags.source import Bag, Record, Topic

IMAGE, COMPRESSED_IMAGE, ACTION, GOAL = 'camera/image_raw', 'camera/image_raw/compressed', 'cmd_vel', 'goal'
CAMERA_INFO, ODOMETRY, TASK = 'camera/camera_info', 'odom', 'task'
TWIST_STAMPED = 'geometry_msgs/msg/TwistStamped'
_COMPRESSED = 'sensor_msgs/msg/CompressedImage'


@dataclass(frozen=True)
class Part:
    """
    One topic of a bag that is played as ``name``, a relative topic name of the world model node.

    ``convert`` is None if the recorded bytes are published unchanged. Otherwise it returns the bytes of an image, or the
    action [SI units, in the order of the model's action names].
    """

    topic: Topic
    name: str
    convert: Callable[[Record], Any] | None = None


def parts(bag: Bag, mapping: Mapping) -> tuple[Part, ...]:
    """Return the topics of a bag that the model uses, the image first."""
    image = bag.topics[mapping.image_topic]
    found = [Part(image, COMPRESSED_IMAGE if image.type == _COMPRESSED else IMAGE,
                  _restamped if mapping.image_stamps == 'log' else None)]
    if mapping.info_topic:
        found.append(Part(bag.topics[mapping.info_topic], CAMERA_INFO))
    if mapping.action_topic:
        action = bag.topics[mapping.action_topic]
        raw = action.type == TWIST_STAMPED and mapping.is_twist
        found.append(Part(action, ACTION, None if raw else lambda record: mapping.action(
            bag.deserialize(record.topic, record.raw))))
    # Odometry that stands in for commands is played as commands.
    wheels = None if mapping.odometry_topic == mapping.action_topic else mapping.odometry_topic
    for topic, name in ((mapping.goal_topic, GOAL), (wheels, ODOMETRY), (mapping.task_topic, TASK)):
        if topic:
            found.append(Part(bag.topics[topic], name))
    return tuple(found)


def _restamped(record: Record) -> bytes:
    """
    Return an image stamped with the time of its receipt, for a camera with wrong stamps.

    Both image types begin with their stamp, after the four-byte CDR header, whose second byte has the little-endian flag as
    its lowest bit.
    """
    data = bytearray(record.raw)
    struct.pack_into(('<' if data[1] & 1 else '>') + 'iI', data, 4, *divmod(record.log_ns, 10 ** 9))
    return bytes(data)

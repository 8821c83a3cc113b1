"""What of a bag is played, on which topics the model takes it, and what has to be changed in a message for that."""
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
    One topic of a bag that is played as ``name``, a relative name of the world model node's.

    ``convert`` is None where the recorded bytes go out as they are. Else it makes of them the bytes of an image, or the
    action [SI units, in the order of the model's action names].
    """

    topic: Topic
    name: str
    convert: Callable[[Record], Any] | None = None


def parts(bag: Bag, mapping: Mapping) -> tuple[Part, ...]:
    """Return what the model takes of a bag, the image first."""
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
    # Wheels that stand in for commands are played as those.
    wheels = None if mapping.odometry_topic == mapping.action_topic else mapping.odometry_topic
    for topic, name in ((mapping.goal_topic, GOAL), (wheels, ODOMETRY), (mapping.task_topic, TASK)):
        if topic:
            found.append(Part(bag.topics[topic], name))
    return tuple(found)


def _restamped(record: Record) -> bytes:
    """
    Return an image stamped with the time of its receipt, for a camera that stamps wrongly.

    Both types of images begin with their stamp: behind the four bytes in front of every CDR message, of which the
    second says by its lowest bit that numbers are little-endian.
    """
    data = bytearray(record.raw)
    struct.pack_into(('<' if data[1] & 1 else '>') + 'iI', data, 4, *divmod(record.log_ns, 10 ** 9))
    return bytes(data)

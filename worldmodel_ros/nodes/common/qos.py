"""The QoS profiles of this package, by what they carry. Publishers and subscriptions of a topic share one."""

from collections.abc import Sequence

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.topic_endpoint_info import TopicEndpointInfo

# Only the newest image matters: a deeper queue would serve stale ones. No deadline is requested, because a
# request stricter than the publisher's offer (infinite, in every camera driver) means that nothing arrives at
# all.
CAMERA = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)

# A newer command replaces an older one that has not been read.
COMMAND = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.RELIABLE)

# Best effort goes with every publisher. Several may share the topic, an arm's and a gripper's: none may hide another.
JOINT_STATES = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=8, reliability=ReliabilityPolicy.BEST_EFFORT)

# Wheels are read far more often than images come; a lost reading is made up for by the next.
ODOMETRY = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=16, reliability=ReliabilityPolicy.BEST_EFFORT)

STATUS = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=10, reliability=ReliabilityPolicy.RELIABLE)

# For what is set once and must reach a node that starts later.
LATCHED = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL)

# As what is set once, but deep: an episode may end and the next one begin between two looks.
JUDGEMENTS = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def hearing(publishers: Sequence[TopicEndpointInfo], depth: int) -> QoSProfile:
    """Return the most demanding profile that hears every one of the publishers, if there are any."""
    offered = [publisher.qos_profile for publisher in publishers]
    reliable = all(qos.reliability == ReliabilityPolicy.RELIABLE for qos in offered)
    latched = all(qos.durability == DurabilityPolicy.TRANSIENT_LOCAL for qos in offered)
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST, depth=depth,
        reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE)

"""QoS profiles by kind of topic, shared by publishers and subscriptions."""

from collections.abc import Sequence

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.topic_endpoint_info import TopicEndpointInfo

# Only the newest image matters: a deeper queue would serve stale ones. No deadline is requested: one stricter than the
# publisher's offer (infinite, in every camera driver) would mean that nothing arrives at all.
CAMERA = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)

# A newer command replaces an older one that has not been read.
COMMAND = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.RELIABLE)

# Best effort matches every publisher. Several may share the topic (arm, gripper), so depth 1 could lose messages of one.
JOINT_STATES = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=8, reliability=ReliabilityPolicy.BEST_EFFORT)

# Odometry comes far more often than images; the next reading makes up for a lost one.
ODOMETRY = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=16, reliability=ReliabilityPolicy.BEST_EFFORT)

STATUS = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=10, reliability=ReliabilityPolicy.RELIABLE)

# For values that are set once and must reach nodes that start later.
LATCHED = QoSProfile(
    history=HistoryPolicy.KEEP_LAST, depth=1, reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL)

# Latched, but deep: one episode may end and the next begin before a subscriber takes the messages.
JUDGEMENTS = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def hearing(publishers: Sequence[TopicEndpointInfo], depth: int) -> QoSProfile:
    """Return the strictest subscription profile that is compatible with all ``publishers``."""
    offered = [publisher.qos_profile for publisher in publishers]
    reliable = all(qos.reliability == ReliabilityPolicy.RELIABLE for qos in offered)
    latched = all(qos.durability == DurabilityPolicy.TRANSIENT_LOCAL for qos in offered)
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST, depth=depth,
        reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE)

"""The goals that others publish for the world model node."""

import time
from collections import deque
from collections.abc import Callable

from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_msgs.msg import String

from worldmodel_ros.nodes.common.qos import LATCHED

# What publishers offer that ask for nothing else: those of rclpy, RViz and Foxglove. Deep enough that after a stall of
# this process all goals come in their order.
_ORDINARY = QoSProfile(depth=10)
_APART = 0.1  # s, at most, between the two times that one message is heard


class GoalTopic:
    """
    Hears `goal` from whoever publishes it, and calls `take` with each goal, in the order of their arrival.

    A volatile publisher matches no transient-local subscription, and a volatile subscription is not given what a
    latched publisher said before; so there is one of each, and what both of them hear counts once.
    """

    def __init__(self, node: Node, take: Callable[[str], None]) -> None:
        self._node, self._take = node, take
        self._once: tuple[deque[tuple[str, float]], ...] = (deque(maxlen=10), deque(maxlen=10))  # heard by one alone
        # The defaults would warn of each ordinary publisher that nothing will be received from it.
        silent = SubscriptionEventCallbacks(use_default_callbacks=False)
        self._subscriptions = (
            node.create_subscription(String, 'goal', lambda message: self._hear(0, message.data), _ORDINARY),
            node.create_subscription(String, 'goal', lambda message: self._hear(1, message.data), LATCHED,
                                     event_callbacks=silent))

    def destroy(self) -> None:
        """Destroy the subscriptions."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)

    def _hear(self, which: int, goal: str) -> None:
        # rclpy's events executor fails to hand over a message's time stamp with it, so that a message is known by its
        # words.
        now, own, other = time.monotonic(), self._once[which], self._once[1 - which]
        while other and now - other[0][1] > _APART:
            other.popleft()
        heard = [before for before, _ in other]
        if goal not in heard:
            own.append((goal, now))
            self._take(goal)
            return
        # What either heard alone before it was for that one alone.
        own.clear()
        for _ in range(heard.index(goal) + 1):
            other.popleft()

"""Tells when the subscribers of a bag are ready for its first message."""
from __future__ import annotations

import time
from collections.abc import Sequence

from lifecycle_msgs.srv import GetState
from rclpy.node import Node
from rclpy.publisher import Publisher

_ANSWER = 1.0  # s; a response may get lost while two nodes discover each other
_POLL = 0.01   # s


class Listeners:
    """The subscribers of the played topics. Do not query it from the thread that spins the node."""

    def __init__(self, node: Node, outputs: Sequence[Publisher], wait_for: str) -> None:
        """
        :param outputs: the first one, the images, must have a subscriber.
        :param wait_for: name of a lifecycle node that must be active; '': none.
        """
        self._node, self._outputs, self._wait_for = node, outputs, wait_for
        self._state = node.create_client(GetState, f'{wait_for}/get_state') if wait_for else None

    def missing(self) -> str:
        """Return what is still missing, in words; '' if everything is ready."""
        if self._state and not self._is_active():
            return f'{self._wait_for} to be active'
        images = self._outputs[0]
        if not images.get_subscription_count():
            return f'a subscriber to {images.topic_name}'
        # A subscriber that is in the graph but not matched yet would miss the first messages.
        unmatched = [output.topic_name for output in self._outputs if output.get_subscription_count() < self._expected(output)]
        return f'the subscribers to {", ".join(unmatched)} to be matched' if unmatched else ''

    def _expected(self, output: Publisher) -> int:
        """Return the number of subscriptions that can be matched: one of another type never is."""
        package, name = output.msg_type.__module__.partition('.')[0], output.msg_type.__name__
        return sum(subscription.topic_type == f'{package}/msg/{name}'
                   for subscription in self._node.get_subscriptions_info_by_topic(output.topic_name))

    def _is_active(self) -> bool:
        if not self._state.service_is_ready():
            return False
        future = self._state.call_async(GetState.Request())
        end = time.monotonic() + _ANSWER
        while not future.done():
            if time.monotonic() >= end:
                self._state.remove_pending_request(future)
                return False
            time.sleep(_POLL)
        return future.result().current_state.label == 'active'

"""The actions that the robot really executes, as the world model node hears them, and whether it does."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from geometry_msgs.msg import Twist, TwistStamped
from rclpy.node import Node

from worldmodel_ros.control.responder import Answer
from worldmodel_ros.inputs.executed import ExecutedActions, is_usable
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.qos import COMMAND
from worldmodel_ros.nodes.common.what_if_request import BASE

_PATIENCE = 1.0  # s, of commands that move the robot; what becomes of the first is heard within milliseconds
_LOG_INTERVAL, _REMINDER = 2.0, 10.0  # s, between two log lines on the same
_PACKAGE = 'geometry_msgs/msg/'


def require_base(spec: Any) -> None:
    """Raise ValueError for a model whose actions a twist does not hold: what is executed could not be told to it."""
    if tuple(spec.action_names) != BASE:
        raise ValueError(
            f'model {spec.name}: its actions are {", ".join(spec.action_names)}, but what the robot executes is heard '
            f'as a twist, of which this node takes {", ".join(BASE)}: choose a model with these actions, in this order')


class ExecutedTopic:
    """
    Keeps in `actions` what comes on the topic of executed actions.

    Notices when commands go out and nothing is heard of any, which nothing else would show: for a wrong topic, or
    a wrong type of message, there is no error in ROS.
    """

    def __init__(self, node: Node, spec: Any, settings: Mapping[str, Any], refusals: Refusals) -> None:
        """`settings`: the node's parameters."""
        self._node, self._refusals = node, refusals
        self._timeout = settings['executed_timeout_s']
        self.actions = ExecutedActions(len(spec.action_names), spec.step_period, self._timeout)
        self._stamped = settings['enable_stamped_cmd_vel']
        topic = settings['executed_action_topic']
        self._topic = node.resolve_topic_name(topic)
        kind, callback = ((TwistStamped, lambda message: self._hear(message.twist)) if self._stamped else
                          (Twist, self._hear))
        self._subscription = node.create_subscription(kind, topic, callback, COMMAND)
        # Steady times [s]. Two threads write them: what one of them overwrites, the next command sets right.
        self._since: float | None = None  # of the first command after whatever was heard last
        self._newest = -math.inf          # of the newest command
        self._last_word = False           # after what was heard last, silence is no fault

    def destroy(self) -> None:
        """Destroy the subscription."""
        self._node.destroy_subscription(self._subscription)

    def commanded(self, answer: Answer, now: float) -> None:
        """Take note of an answer that goes out `now` [steady, s]. From any thread."""
        if answer.actions is None or not np.any(answer.actions[0]):
            return
        if self._since is None or now - self._newest > _PATIENCE:
            self._since = now
        self._newest = now

    def degraded_reason(self, now: float) -> str:
        """Return, and log, what is wrong and what to do where nothing is heard of what is commanded; else ''."""
        since, newest = self._since, self._newest
        if since is None or newest - since < _PATIENCE or now - newest > _PATIENCE:
            return ''
        own = _PACKAGE + ('TwistStamped' if self._stamped else 'Twist')
        others = {p.topic_type for p in self._node.get_publishers_info_by_topic(self._topic)} - {own}
        if self._last_word and not others:
            return ''
        text = (f'commands go out, but none was heard on {self._topic} ({own}) for {now - since:.0f} s, so that the '
                'model takes the robot to stand still, and a frozen camera would not be noticed: '
                f'{self._remedy(others)}')
        self._node.get_logger().warning(text, throttle_duration_sec=_REMINDER)
        return text

    def _remedy(self, others: set[str]) -> str:
        twin = _PACKAGE + ('Twist' if self._stamped else 'TwistStamped')
        if twin in others:
            return f'{twin} is published there: set enable_stamped_cmd_vel to {str(not self._stamped).lower()}'
        if others:
            return (f'{", ".join(sorted(others))} is published there: set executed_action_topic to a topic of twists '
                    'that the base is given')
        if self._node.count_publishers(self._topic):
            return ('its publisher is silent, or offers best effort only: see whether the gate passes commands '
                    '(command_status), and set executed_action_topic to what the base listens to')
        return 'nobody publishes it: start the gate, or set executed_action_topic to what the base listens to'

    def _hear(self, twist: Twist) -> None:
        action = (twist.linear.x, twist.angular.z)
        # A gate that has stopped the robot falls silent after a while, and without a time-out only changes are told.
        self._since, self._last_word = None, not any(action) or not self._timeout
        if not is_usable(action):
            self._refusals.count('executed action: not finite')
            return
        now = self._node.get_clock().now().nanoseconds
        if self.actions.ran_out(now):
            self._node.get_logger().warning(
                f'no executed command came for more than {self._timeout:g} s although the last one moved the robot, '
                'which was taken to have braked; for a topic that tells changes only, set executed_timeout_s to 0',
                throttle_duration_sec=_LOG_INTERVAL)
        self.actions.add(now, action)

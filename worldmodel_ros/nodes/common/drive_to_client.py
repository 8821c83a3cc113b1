"""Command-line client of the drive_to action."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import rclpy
from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from sensor_msgs.msg import Image

from worldmodel_ros.action import DriveTo

REACHED, NOT_REACHED, REFUSED = 0, 1, 3  # exit codes
_DISCOVERY = 10.0  # s
_SHOWN = 0.5       # s, between two lines of feedback
_CANCEL = 2.0      # s, for the answer to a cancellation


@dataclass(frozen=True)
class Wanted:
    """A goal: the name of an object, a ``place`` (x, y) [m] or (x, y, yaw) [m, rad] in ``frame``, or an ``image``, uint8
    (H, W, 3) RGB; aborted after ``timeout`` s, 0: never."""

    goal: str = ''
    place: Sequence[float] | None = None
    frame: str = 'odom'
    image: np.ndarray | None = None
    timeout: float = 0.0

    def message(self) -> DriveTo.Goal:
        """Return the goal message of the action."""
        told = DriveTo.Goal(goal=self.goal, timeout=self.timeout)
        if self.place is not None:
            told.pose.header.frame_id = self.frame
            told.pose.pose.position.x, told.pose.pose.position.y, *yaw = map(float, self.place)
            turn = told.pose.pose.orientation
            turn.z, turn.w = (math.sin(yaw[0] / 2), math.cos(yaw[0] / 2)) if yaw else (0.0, 0.0)
        if self.image is not None:
            height, width, _ = self.image.shape
            told.image = Image(height=height, width=width, encoding='rgb8', step=3 * width, data=self.image.tobytes())
        return told


def drive_to(wanted: Wanted, namespace: str = '') -> int:
    """Send a goal, print feedback and result, and return the exit code. Ctrl-C cancels the goal."""
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = Node('worldmodel_drive_to', namespace=namespace)
        client = ActionClient(node, DriveTo, 'drive_to')
        if not client.wait_for_server(_DISCOVERY):
            print(f'no action {node.resolve_topic_name("drive_to")}: start a world_model_node in this ROS domain',
                  file=sys.stderr)
            return NOT_REACHED
        return _drive(node, client, wanted.message())
    finally:
        rclpy.try_shutdown()


def in_words(told: DriveTo.Feedback) -> str:
    """Return feedback as a line of text; what is not known yet is left out."""
    return ', '.join([
        'not found yet' if math.isnan(told.distance) else f'{told.distance:5.2f} m left',
        *([] if math.isnan(told.similarity) else [f'{told.similarity:.2f} alike']), told.chosen,
        *([] if math.isnan(told.predicted) else [f'there in {told.predicted:.1f} s']), f'risk {told.risk:.0%}'])


def _drive(node: Node, client: ActionClient, goal: DriveTo.Goal) -> int:
    shown = 0.0

    def show(message: DriveTo.Impl.FeedbackMessage) -> None:
        nonlocal shown
        told, now = message.feedback, time.monotonic()
        if now - shown >= _SHOWN:
            shown = now
            print(in_words(told), flush=True)

    handle = None
    try:
        handle = _wait(node, client.send_goal_async(goal, feedback_callback=show))
        if not handle.accepted:
            print('refused: the log of world_model_node says why', file=sys.stderr)
            return REFUSED
        answer = _wait(node, handle.get_result_async())
    except KeyboardInterrupt:
        if handle is not None and handle.accepted:
            print('cancelling', file=sys.stderr)
            _wait(node, handle.cancel_goal_async(), _CANCEL)
        return NOT_REACHED
    print(answer.result.reason)
    return REACHED if answer.status == GoalStatus.STATUS_SUCCEEDED else NOT_REACHED


def _wait(node: Node, future: Future, timeout: float | None = None):
    rclpy.spin_until_future_complete(node, future, timeout_sec=timeout)
    return future.result()

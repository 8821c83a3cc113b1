"""A client of the action drive_to for a terminal."""

import sys
import time
from collections.abc import Sequence

import rclpy
from action_msgs.msg import GoalStatus
from geometry_msgs.msg import PoseStamped
from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from worldmodel_ros.action import DriveTo

REACHED, NOT_REACHED, REFUSED = 0, 1, 3  # exit codes
_DISCOVERY = 10.0  # s
_SHOWN = 0.5       # s, between two lines of feedback
_CANCEL = 2.0      # s, for the answer to a cancellation


def drive_to(goal: str, place: Sequence[float] | None, frame: str, timeout: float, namespace: str = '') -> int:
    """Send a goal, by the name of an object or a ``place`` (x, y) [m] in ``frame``; return the exit code. Ctrl-C cancels it."""
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = Node('worldmodel_drive_to', namespace=namespace)
        client = ActionClient(node, DriveTo, 'drive_to')
        if not client.wait_for_server(_DISCOVERY):
            print(f'no action {node.resolve_topic_name("drive_to")}: start a world_model_node in this ROS domain',
                  file=sys.stderr)
            return NOT_REACHED
        return _drive(node, client, _goal(goal, place, frame, timeout))
    finally:
        rclpy.try_shutdown()


def _goal(goal: str, place: Sequence[float] | None, frame: str, timeout: float) -> DriveTo.Goal:
    pose = PoseStamped()
    if place is not None:
        pose.header.frame_id = frame
        pose.pose.position.x, pose.pose.position.y = map(float, place)
    return DriveTo.Goal(goal=goal, pose=pose, timeout=timeout)


def _drive(node: Node, client: ActionClient, goal: DriveTo.Goal) -> int:
    shown = 0.0

    def show(message: DriveTo.Impl.FeedbackMessage) -> None:
        nonlocal shown
        told, now = message.feedback, time.monotonic()
        if now - shown >= _SHOWN:
            shown = now
            print(f'{told.distance:5.2f} m left, {told.chosen}, there in {told.predicted:.1f} s, risk {told.risk:.0%}',
                  flush=True)

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

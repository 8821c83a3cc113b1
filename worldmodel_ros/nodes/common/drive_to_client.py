"""Command-line client of the drive_to action."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

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
_ANSWER = 30.0     # s, for the answer to a goal, whose image a network evaluates first
_MARGIN = 5.0      # s, for the result, in addition to the goal's timeout
_CANCEL = 2.0      # s, for the answer to a goal that is to be cancelled, and again for that to its cancellation
_AWAY = 5.0        # s, for which there may be no server
_AGAIN = 3.0       # s, between two requests for the result
_SPIN = 0.1        # s, at most, until a signal is noticed


class _Lost(Exception):
    """The server has left, or does not answer in time."""


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
            _say(in_words(told), sys.stdout)

    sent = client.send_goal_async(goal, feedback_callback=show)
    try:
        handle = _wait(node, client, lambda: sent, _ANSWER)
        if not handle.accepted:
            print('refused: the log of world_model_node says why', file=sys.stderr)
            return REFUSED
        # Asked for again: a node that was killed and started again does not know the goal, and says so at once.
        answer = _wait(node, client, handle.get_result_async, goal.timeout + _MARGIN if goal.timeout else math.inf, _AGAIN)
    except (KeyboardInterrupt, _Lost) as ending:
        _say(f'not reached: {ending}' if isinstance(ending, _Lost) else 'cancelling', sys.stderr)
        _cancel(node, client, sent)
        return NOT_REACHED
    if answer.status == GoalStatus.STATUS_UNKNOWN:
        print('not reached: world_model_node was started again and does not know the goal any more', file=sys.stderr)
        return NOT_REACHED
    print(answer.result.reason)
    return REACHED if answer.status == GoalStatus.STATUS_SUCCEEDED else NOT_REACHED


def _cancel(node: Node, client: ActionClient, sent: Future) -> None:
    """Cancel a goal, also one that is not accepted yet."""
    try:
        handle = _wait(node, client, lambda: sent, _CANCEL)
        if handle.accepted:
            _wait(node, client, handle.cancel_goal_async, _CANCEL)
    except _Lost as error:
        _say(f'not cancelled: {error}; the robot may still drive', sys.stderr)


def _wait(node: Node, client: ActionClient, ask: Callable[[], Future], limit: float, again: float = math.inf):
    """Return the answer to ``ask``, which is called again every ``again`` s. Raises _Lost, after ``limit`` s at the latest."""
    future = ask()
    asked = ready = time.monotonic()
    end = asked + limit
    while not future.done():
        now = time.monotonic()
        if client.server_is_ready():
            ready = now
        if now - ready > _AWAY:
            raise _Lost('world_model_node has left this ROS domain')
        if now > end:
            raise _Lost(f'no answer from world_model_node within {limit:g} s')
        if now - asked > again:
            future, asked = ask(), now
        rclpy.spin_until_future_complete(node, future, timeout_sec=_SPIN)
    return future.result()


def _say(text: str, file: TextIO) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed: the goal must be cancelled all the same
        print(text, file=file, flush=True)

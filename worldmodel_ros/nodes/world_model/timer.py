"""A timer that goes off once, at a time that is set anew again and again."""

from collections.abc import Callable

from rclpy.clock import Clock, ClockType
from rclpy.node import Node

_NS = 1_000_000_000


class OneShot:
    """
    Calls back from the node's executor, on the steady clock: whatever ROS time does, what is due is due.

    It costs nothing while it waits, unlike a periodic timer that looks whether it is time.
    """

    def __init__(self, node: Node, callback: Callable[[], None]) -> None:
        self._node, self._callback = node, callback
        self._timer = node.create_timer(3600.0, self._fire, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()

    def arm(self, seconds: float) -> None:
        """Go off in so many seconds, and not when it was to before. From the executor's thread."""
        self._timer.timer_period_ns = max(1, round(seconds * _NS))
        self._timer.reset()

    def destroy(self) -> None:
        """Never go off again."""
        self._timer.cancel()
        self._node.destroy_timer(self._timer)

    def _fire(self) -> None:
        self._timer.cancel()
        self._callback()

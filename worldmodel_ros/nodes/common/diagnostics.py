"""Diagnostics of a node: periodic reports on /diagnostics and a count of refused messages."""

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from worldmodel_ros.nodes.common.qos import STATUS

OK, WARN = DiagnosticStatus.OK, DiagnosticStatus.WARN
ERROR, STALE = DiagnosticStatus.ERROR, DiagnosticStatus.STALE


class Report(NamedTuple):
    """The state of one part of a node. ``level``: OK, WARN, ERROR or STALE; ``message``: one line for the operator."""

    level: bytes
    message: str
    values: Mapping[str, Any] = MappingProxyType({})


class Diagnostics:
    """
    Publishes the reports of a node on /diagnostics, every ``period`` s.

    ``tasks`` maps the name of a part to a callback that returns its Report. Reports are stamped with the node's clock, but
    paced by the steady clock: diagnostics must not fall silent when /clock stands still.
    """

    def __init__(self, node: Node, tasks: Mapping[str, Callable[[], Report]], period: float) -> None:
        self._node = node
        self._tasks = dict(tasks)
        self._publisher = node.create_publisher(DiagnosticArray, '/diagnostics', STATUS)
        self._timer = node.create_timer(period, self.publish, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def publish(self) -> None:
        """Publish now, without waiting for the timer."""
        message = DiagnosticArray()
        message.header.stamp = self._node.get_clock().now().to_msg()
        name = self._node.get_fully_qualified_name().lstrip('/')
        for task, callback in self._tasks.items():
            level, text, values = callback()
            message.status.append(DiagnosticStatus(
                level=level, name=f'{name}: {task}', message=text, hardware_id=name,
                values=[KeyValue(key=key, value=_text(value)) for key, value in values.items()]))
        self._publisher.publish(message)


class Refusals:
    """
    Counts refused messages by reason. Thread-safe.

    A reason names the kind of fault ('camera/image_raw: wrong encoding'), not the particular message; details belong in the
    log. Beyond ``kinds`` distinct reasons the rest is counted as 'other', so that no stream of broken messages can fill the
    memory.
    """

    def __init__(self, kinds: int = 32) -> None:
        self._kinds = kinds
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def count(self, reason: str) -> int:
        """Count one refusal and return the count of its reason."""
        with self._lock:
            if reason not in self._counts and len(self._counts) >= self._kinds:
                reason = 'other'
            self._counts[reason] = self._counts.get(reason, 0) + 1
            return self._counts[reason]

    @property
    def total(self) -> int:
        """All refusals since the start."""
        with self._lock:
            return sum(self._counts.values())

    def values(self) -> dict[str, int]:
        """Return ``{'refused: REASON': count}``, as values for a Report."""
        with self._lock:
            return {f'refused: {reason}': count for reason, count in self._counts.items()}


def _text(value: Any) -> str:
    return f'{value:.6g}' if isinstance(value, float) else str(value)

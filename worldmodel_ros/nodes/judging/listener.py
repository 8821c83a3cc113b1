"""Collects the judgements of a simulated robot, and how its commands were decided."""
from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import String

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.msg import DeadlineStatus, Decision
from worldmodel_ros.nodes.common.qos import JUDGEMENTS, STATUS


@dataclass
class Heard:
    """``ended``: judgements of finished episodes, see ``sim_robot.tasks``. ``tiers``: number of observations per tier of the
    answer; ``chosen``: number of decisions per chosen candidate. ``latencies``: camera to command at the robot [s].
    ``vetoed``: number of candidates vetoed, out of ``compared``."""

    ended: list[dict] = field(default_factory=list)
    tiers: Counter = field(default_factory=Counter)
    chosen: Counter = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    vetoed: int = 0
    compared: int = 0


class Listener(Node):
    """Collects in ``heard`` what has come since ``begin``."""

    def __init__(self, namespace: str) -> None:
        super().__init__('judging', namespace=namespace)
        self.heard = Heard()
        self._changed = threading.Condition()
        self.create_subscription(String, 'sim/judgement', self._on_judgement, JUDGEMENTS)
        self.create_subscription(DeadlineStatus, 'deadline_status', self._on_tick, STATUS)
        self.create_subscription(Decision, 'decision', self._on_decision, STATUS)
        self.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, STATUS)

    def begin(self) -> None:
        """Discard what was collected."""
        with self._changed:
            self.heard = Heard()

    def wait(self, count: int, seconds: float) -> bool:
        """Wait until ``count`` episodes have ended; return False if one takes more than ``seconds`` after the one before."""
        with self._changed:
            while (ended := len(self.heard.ended)) < count:
                if not self._changed.wait_for(lambda: len(self.heard.ended) > ended, seconds):
                    return False
        return True

    def _on_judgement(self, message: String) -> None:
        judgement = json.loads(message.data)
        if judgement['succeeded'] is not None:
            with self._changed:
                self.heard.ended.append(judgement)
                self._changed.notify_all()

    def _on_tick(self, message: DeadlineStatus) -> None:
        self.heard.tiers[Tier(message.tier).name.lower()] += 1

    def _on_decision(self, message: Decision) -> None:
        self.heard.chosen[message.chosen] += 1
        self.heard.compared += len(message.candidates)
        self.heard.vetoed += sum(candidate.vetoed for candidate in message.candidates)

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            for value in status.values:
                if value.key == 'latencies_ms':
                    self.heard.latencies += [float(text) / 1e3 for text in value.value.split()]


@contextmanager
def listening(namespace: str) -> Iterator[Listener]:
    """Run a listener on its own thread for the duration of the block; signals stay with the caller."""
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        node, executor, over = Listener(namespace), SingleThreadedExecutor(), threading.Event()
        executor.add_node(node)

        def spin() -> None:
            while not over.is_set():
                executor.spin_once(timeout_sec=0.1)
        thread = threading.Thread(target=spin, name='listener', daemon=True)
        thread.start()
        try:
            yield node
        finally:
            over.set()
            thread.join()
            executor.shutdown()
            node.destroy_node()
    finally:
        rclpy.try_shutdown()

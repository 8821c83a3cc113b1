"""The node that commands the steps of a calibration."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import rclpy
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import Joy
from std_msgs.msg import Bool

from worldmodel_ros.calibrate import pattern
from worldmodel_ros.calibrate.recording import Signals
from worldmodel_ros.inputs.odometry import Reading
from worldmodel_ros.nodes.common.qos import COMMAND, ODOMETRY

HELD = 0.3        # s, for which a deadman message is valid: a joystick that loses its radio link falls silent
_PATIENCE = 30.0  # s, for the deadman, the base and its odometry
_STOPS = 5        # stop commands, at the end and when the deadman is released
_NS = 1e-9


@dataclass(frozen=True)
class Run:
    """
    ``deadman``: topic of sensor_msgs/Joy whose ``button`` is held, or of std_msgs/Bool if ``button`` is None. ``speed`` [m/s]
    and ``turn`` [rad/s]: maxima; ``stamped``: commands are TwistStamped; ``rounds`` of the pattern.
    """

    deadman: str
    button: int | None
    cmd_vel: str
    odometry: str
    stamped: bool = True
    speed: float = pattern.SPEED
    turn: float = pattern.TURN
    namespace: str = ''
    rounds: int = 2


class Calibrator(Node):
    """Commands the steps one by one; keeps ``commands`` sent and odometry ``readings``."""

    def __init__(self, run: Run, context: Context) -> None:
        super().__init__('worldmodel_calibrate', context=context, namespace=run.namespace)
        self._run = run
        self.commands: list[tuple[float, float, float]] = []          # ROS time [s], m/s, rad/s
        self.readings: list[tuple[float, float, float, float]] = []   # stamp [s], x, y, yaw
        self._held_at = -math.inf
        self._publisher = self.create_publisher(TwistStamped if run.stamped else Twist, run.cmd_vel, COMMAND)
        if run.button is None:
            self.create_subscription(Bool, run.deadman, lambda message: self._hold(message.data), COMMAND)
        else:
            self.create_subscription(Joy, run.deadman, lambda message: self._hold(
                run.button < len(message.buttons) and message.buttons[run.button] == 1), COMMAND)
        self.create_subscription(Odometry, run.odometry, self._hear, ODOMETRY)

    @property
    def is_held(self) -> bool:
        """Whether the deadman was held within the last ``HELD`` seconds."""
        return time.monotonic() < self.held_until

    @property
    def held_until(self) -> float:
        """Until when the deadman counts as held (steady clock) [s], unless it is held or released before."""
        return self._held_at + HELD

    def waits_for(self) -> str:
        """Return what is missing before the robot may move; '' if nothing is."""
        others = self.count_publishers(self._publisher.topic_name) - 1
        if others > 0:
            return f'no other publisher on {self._publisher.topic_name}, where there are {others}: end the gate'
        if not self._publisher.get_subscription_count():
            return f'a base that listens to {self._publisher.topic_name}'
        if not self.readings:
            return f'odometry on {self.resolve_topic_name(self._run.odometry)}'
        return '' if self.is_held else f'the deadman on {self.resolve_topic_name(self._run.deadman)} to be held'

    def send(self, speed: float, turn: float) -> None:
        """Command the base."""
        now = self.get_clock().now()
        twist = Twist()
        twist.linear.x, twist.angular.z = speed, turn
        message = twist
        if self._run.stamped:
            message = TwistStamped(twist=twist)
            message.header.stamp, message.header.frame_id = now.to_msg(), 'base_link'
        self._publisher.publish(message)
        self.commands.append((now.nanoseconds * _NS, speed, turn))

    def _hold(self, held: bool) -> None:
        self._held_at = time.monotonic() if held else -math.inf

    def _hear(self, message: Odometry) -> None:
        reading = Reading.of(message)
        self.readings.append((reading.stamp * _NS, *reading.pose))


def drive(run: Run, say: Callable[[str], None] = lambda text: None, context: Context | None = None) -> Signals:
    """
    Drive the pattern once everything is ready; return what was commanded and measured.

    The robot is stopped when the deadman is released, on any error or KeyboardInterrupt, and at the end. Raises RuntimeError,
    with the reason, if the pattern was not completed.
    """
    own = context is None
    context = context or Context()
    if own:
        rclpy.init(context=context)
    node = Calibrator(run, context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    try:
        _wait(node, executor, say)
        say(f'driving for {pattern.seconds(run.rounds):.0f} s: let the deadman go to stop')
        due = time.monotonic()
        for speed, turn in pattern.commands(run.rounds, run.speed, run.turn):
            node.send(speed, turn)
            due += pattern.PERIOD
            while True:  # at least once: check the deadman even when this process is late
                executor.spin_once(timeout_sec=max(0.0, min(due, node.held_until) - time.monotonic()))
                if not node.is_held:
                    raise RuntimeError('the deadman was let go: the robot was told to stand, and nothing was fitted')
                if time.monotonic() >= due:
                    break
    finally:
        for _ in range(_STOPS if node.commands else 0):  # without a command sent, another node may control the base
            node.send(0.0, 0.0)
            executor.spin_once(timeout_sec=pattern.PERIOD)
        executor.shutdown()
        node.destroy_node()
        if own:
            rclpy.shutdown(context=context)
    return _signals(node)


def _wait(node: Calibrator, executor: SingleThreadedExecutor, say: Callable[[str], None]) -> None:
    end, told = time.monotonic() + _PATIENCE, ''
    while missing := node.waits_for():
        if time.monotonic() > end:
            raise RuntimeError(f'waited {_PATIENCE:g} s for {missing}')
        if missing != told:
            say(f'waiting for {missing}')
            told = missing
        executor.spin_once(timeout_sec=0.05)


def _signals(node: Calibrator) -> Signals:
    commands, readings = np.array(node.commands), np.array(node.readings)
    start = commands[0, 0]
    rising = np.flatnonzero(np.diff(readings[:, 0], prepend=-np.inf) > 0.0)
    return Signals(commands[:, 0] - start, commands[:, 1:], readings[rising, 0] - start, readings[rising, 1:])

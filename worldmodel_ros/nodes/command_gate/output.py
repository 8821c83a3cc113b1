"""Publishes gated commands as the message that the robot's controller takes."""

from collections.abc import Sequence
from typing import Protocol

from geometry_msgs.msg import Twist, TwistStamped
from rclpy.node import Node
from rclpy.publisher import Publisher
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from worldmodel_ros.nodes.common.messages import NS, duration_message, time_message
from worldmodel_ros.nodes.common.qos import COMMAND
from worldmodel_ros.safety.gate import Command

TWIST_OUTPUTS = ('twist_stamped', 'twist')


class CommandOutput(Protocol):
    """One kind of command message on one topic."""

    publisher: Publisher

    def publish(self, command: Command) -> None:
        """Send the command."""


class TwistStampedOutput:
    """TwistStamped on cmd_vel, stamped with the observation (the robot can tell its age); 0 for a stop."""

    def __init__(self, node: Node, frame_id: str) -> None:
        self.publisher = node.create_publisher(TwistStamped, 'cmd_vel', COMMAND)
        self._message = TwistStamped()
        self._message.header.frame_id = frame_id

    def publish(self, command: Command) -> None:
        self._message.header.stamp = time_message(command.stamp)
        _set_twist(self._message.twist, command)
        self.publisher.publish(self._message)


class TwistOutput:
    """Twist on cmd_vel, for bases without stamps. The base cannot tell how old a command is."""

    def __init__(self, node: Node) -> None:
        self.publisher = node.create_publisher(Twist, 'cmd_vel', COMMAND)
        self._message = Twist()

    def publish(self, command: Command) -> None:
        _set_twist(self._message, command)
        self.publisher.publish(self._message)


class JointTrajectoryOutput:
    """
    JointTrajectory on joint_trajectory, the whole chunk with explicit times.

    The stamp is 0, which a joint_trajectory_controller reads as 'start now'. With the stamp of the
    observation it would drop the points already past and hurry to catch up with the rest. The first point is
    due one step from now, as the first action lasts one step.
    """

    def __init__(self, node: Node, joint_names: Sequence[str]) -> None:
        self.publisher = node.create_publisher(JointTrajectory, 'joint_trajectory', COMMAND)
        self._joint_names = list(joint_names)

    def publish(self, command: Command) -> None:
        message = JointTrajectory(joint_names=self._joint_names)
        step = round(command.step_period * NS)
        for k, row in enumerate(command.rows, start=1):
            message.points.append(JointTrajectoryPoint(positions=row, time_from_start=duration_message(k * step)))
        self.publisher.publish(message)


class Float64MultiArrayOutput:
    """Float64MultiArray on commands, for a forward_command_controller: the row for now, and no more."""

    def __init__(self, node: Node) -> None:
        self.publisher = node.create_publisher(Float64MultiArray, 'commands', COMMAND)
        node.get_logger().warning(
            'output float64_multi_array has neither stamp nor time-out: if this process or its host dies, '
            'the controller goes on with its last command for ever. Prefer twist_stamped or joint_trajectory '
            'where the controller takes them.')

    def publish(self, command: Command) -> None:
        self.publisher.publish(Float64MultiArray(data=command.rows[0]))


def make_output(node: Node, output: str, *, frame_id: str, joint_names: Sequence[str]) -> CommandOutput:
    """Return the publisher for one of `parameters.command_gate.OUTPUTS`."""
    if output == 'twist_stamped':
        return TwistStampedOutput(node, frame_id)
    if output == 'twist':
        return TwistOutput(node)
    if output == 'joint_trajectory':
        return JointTrajectoryOutput(node, joint_names)
    return Float64MultiArrayOutput(node)


def _set_twist(twist: Twist, command: Command) -> None:
    twist.linear.x, twist.angular.z = command.rows[0]

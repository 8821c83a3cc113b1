"""
The last check between a model and a robot: passes commands that are fresh, valid, in order and within limits.

Runs as a separate process, without the model's libraries, so that neither a stall nor a crash of the model's process can
keep it from stopping the robot. The decisions are made in ``worldmodel_ros.safety``.

Messages are bounded before they are deserialised, and no field is trusted. DDS does not bound names and values, and
deserialising tens of megabytes would block the watchdog, which shares the thread, for longer than a stop may take. So the
subscriptions are raw, and the length is checked first.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from geometry_msgs.msg import Twist, TwistStamped
from rclpy.clock import Clock, ClockType
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from worldmodel_ros import realtime
from worldmodel_ros.msg import ActionChunk, CommandStatus
from worldmodel_ros.nodes.command_gate.parameters import axis_names, inconsistency, make_motion, make_policy, retune
from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import NS, duration_message, nanoseconds, time_message
from worldmodel_ros.nodes.common.parameters import Parameters
from worldmodel_ros.nodes.common.qos import COMMAND, JOINT_STATES, STATUS
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.nodes.common.unblocked_output import unblock_output
from worldmodel_ros.parameters.command_gate import PARAMETERS
from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD
from worldmodel_ros.safety.gate import MAX_ROWS, Chunk, Command, Fault, Gate, Refusal, State
from worldmodel_ros.safety.motion import PositionMotion, Silences

_STATUS_PERIOD = 0.1  # s
_LOG_INTERVAL = 1.0  # s, between two log lines on refused chunks
_STOP_SLACK = 0.01  # s after command_timeout_s, beyond which the diagnostics report a stop as late
_FAREWELL = Duration(seconds=0.1)  # for the last stop to leave the process, and then for the last status
_OVERHEAD = 4096  # bytes, for the other fields and a frame_id
_PER_NAME = 8     # bytes, for length and alignment
MAX_JOINT_STATE = 65536  # bytes: some hundreds of joints, with velocities and efforts
_TIERS = {name: getattr(ActionChunk, name) for name in vars(ActionChunk) if name.startswith('TIER_')}


class CommandGate(Node):
    """
    Subscribes to action_chunk, and to joint_states if it commands positions; publishes the command, command_status and
    /diagnostics; serves ~/reset.
    """

    def __init__(self) -> None:
        super().__init__('command_gate')
        self.refusals = diagnostics.Refusals()
        parameters = Parameters(self, PARAMETERS, self._on_parameter, consistent=inconsistency)
        self._settings = parameters
        self._gate = Gate(axis_names(parameters), make_motion(parameters), make_policy(parameters))
        self._output = make_output(
            self, parameters['output'], frame_id=parameters['frame_id'], joint_names=axis_names(parameters))
        self._status = self.create_publisher(CommandStatus, 'command_status', STATUS)
        self._announced = (self._gate.state, self._gate.reason, self._gate.first_reason)
        self._oldest = 0.0
        self._watched_at = time.monotonic()
        self._silences = Silences(self._longest_silence)
        self._watchdog_gap = 0.0
        self._max_chunk_bytes = max_chunk_bytes(axis_names(parameters))
        self.create_subscription(ActionChunk, 'action_chunk', self._on_chunk, COMMAND, raw=True)
        if isinstance(self._gate.motion, PositionMotion):
            self.create_subscription(JointState, 'joint_states', self._on_joint_state, JOINT_STATES, raw=True)
        self.create_service(Trigger, '~/reset', self._on_reset)
        # Not the node's clock: the watchdog must fire even if ROS time stands still or is set back.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(parameters['watchdog_period_s'], self._on_tick, clock=steady)
        self.create_timer(_STATUS_PERIOD, self._publish_status, clock=steady)
        diagnostics.Diagnostics(self, {'commands': self._report}, parameters[DIAGNOSTICS_PERIOD.name])
        realtime.keep_freed_memory()
        realtime.apply(self.get_logger(), parameters['realtime_priority'], all_threads=True)

    def on_shutdown(self) -> None:
        """Stop the robot and wait until the messages of it have left."""
        self._send(self._gate.halt('the gate is shutting down', time.monotonic()))
        self._announce()
        for publisher in (self._output.publisher, self._status):
            publisher.wait_for_all_acked(_FAREWELL)

    def _on_chunk(self, data: bytes) -> None:
        before, command = self._gate.last_refusal, None
        chunk = read_chunk(data, self._max_chunk_bytes)
        if isinstance(chunk, Refusal):
            # DDS has copied the message, however long. A series of them must not delay a stop.
            now = time.monotonic()
            self._send(self._gate.on_tick(now, ahead=now - self._watched_at))
            self._watched_at = time.monotonic()
            self._gate.refuse(chunk)
        else:
            ros_now = self.get_clock().now().nanoseconds
            command = self._gate.on_chunk(chunk, ros_now, time.monotonic())
        if command:
            self._send(command)
            if command.stamp:
                self._oldest = max(self._oldest, (ros_now - command.stamp) * 1e-9)
        elif self._gate.last_refusal is not before:
            self.get_logger().warning(
                f'refused: {self._gate.last_refusal.text}', **at_most_every(_LOG_INTERVAL))
        self._announce()

    def _on_joint_state(self, data: bytes) -> None:
        message = read_joint_state(data)
        refusal = (message.text if isinstance(message, Refusal) else
                   self._gate.motion.joints.hear(message.name, message.position, time.monotonic()))
        if refusal:
            self.refusals.count('joint_states')
            self.get_logger().warning(f'refused: {refusal}', **at_most_every(_LOG_INTERVAL))

    def _on_tick(self) -> None:
        now = time.monotonic()
        self._watchdog_gap = max(self._watchdog_gap, now - self._watched_at)
        self._send(self._gate.on_tick(now))
        self._announce()
        self._watched_at = time.monotonic()

    def _send(self, command: Command | None) -> None:
        if command:
            begun = time.monotonic()
            self._output.publish(command)
            # A silence lasts from before a command is sent until the next one has left.
            self._silences.end(time.monotonic())
            if command.stamp:
                self._silences.begin(begun)

    def _longest_silence(self) -> float:
        policy = self._gate.policy
        return policy.command_timeout + (policy.hold if policy.on_timeout == 'hold' else 0.0) + _STOP_SLACK

    def _announce(self) -> None:
        """Publish the status if it has changed. Call it after sending the command, which must not wait for it."""
        now = (self._gate.state, self._gate.reason, self._gate.first_reason)
        if now == self._announced:
            return
        (before, *_), self._announced = self._announced, now
        self._publish_status()
        if self._gate.state is not before:
            # Two separate calls, because rclpy does not let one call site change its severity.
            if self._gate.state is State.PASSING:
                self.get_logger().info('commands pass')
            else:
                self.get_logger().warning(f'{self._gate.state.name}: {self._gate.reason}')

    def _publish_status(self) -> None:
        gate, counts = self._gate, self._gate.counts
        silence = gate.silence(time.monotonic())
        status = CommandStatus(
            state=int(gate.state), reason=gate.reason, first_reason=gate.first_reason,
            latched=bool(gate.first_reason), age=float('nan') if silence is None else silence,
            passed=counts.passed, limited=counts.limited, stops=counts.stops, refused_late=counts.late,
            refused_invalid=counts.invalid, refused_order=counts.order, refused_shape=counts.shape)
        status.header.stamp = self.get_clock().now().to_msg()
        if gate.last_passed:
            status.episode_id, status.sequence = gate.last_passed.episode_id, gate.last_passed.sequence
        self._status.publish(status)

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        latched = self._gate.first_reason
        self._gate.reset()
        self._announce()
        response.success = True
        response.message = f'cleared: {latched}' if latched else 'nothing was latched'
        return response

    def _on_parameter(self, name: str, value: object) -> None:
        self._gate.policy = make_policy(self._settings)
        retune(self._gate.motion, self._settings)
        self.get_logger().info(f'{name} is now {value}')

    def _report(self) -> diagnostics.Report:
        gate, counts = self._gate, self._gate.counts
        values = {
            'state': gate.state.name, 'first reason': gate.first_reason, 'passed': counts.passed,
            'limited': counts.limited, 'stops': counts.stops, 'refused: late': counts.late,
            'refused: invalid': counts.invalid, 'refused: order': counts.order,
            'refused: shape': counts.shape,
            'last refused': gate.last_refusal.text if gate.last_refusal else '',
            'observation_age_max_ms': self._oldest * 1e3, 'watchdog_gap_max_ms': self._watchdog_gap * 1e3,
            'silences': self._silences.tell(), **self.refusals.values()}
        self._oldest = self._watchdog_gap = 0.0
        if gate.state is State.PASSING:
            return diagnostics.Report(diagnostics.OK, 'commands pass', values)
        never = not gate.first_reason and gate.state is State.STOPPED
        return diagnostics.Report(diagnostics.OK if never else diagnostics.ERROR, gate.reason, values)


def max_chunk_bytes(names: Sequence[str]) -> int:
    """Return the length [bytes] of the longest ActionChunk that can be valid for the axes ``names``."""
    return _OVERHEAD + sum(len(name.encode()) + _PER_NAME for name in names) + 4 * MAX_ROWS * len(names)


def read_chunk(data: bytes, max_bytes: int) -> Chunk | Refusal:
    """Return the chunk of a serialised ActionChunk, or why it is refused. A stop is valid whatever its other fields hold."""
    message = _deserialise(data, ActionChunk, max_bytes)
    if isinstance(message, Refusal):
        return message
    stop = message.tier == ActionChunk.TIER_STOP
    stamp = message.header.stamp
    if not stop and not 0 <= stamp.nanosec < NS:
        return Refusal(Fault.INVALID, f'header.stamp.nanosec is {stamp.nanosec}, it must be below {NS}')
    if message.tier not in _TIERS.values():
        known = ', '.join(f'{value} ({name})' for name, value in _TIERS.items())
        return Refusal(
            Fault.INVALID, f'tier is {message.tier}, known are {known}: build the publisher and the gate with the same '
            'ActionChunk.msg')
    return Chunk(nanoseconds(stamp), message.episode_id, message.sequence, message.step_period, message.names,
                 message.values, stop)


def read_joint_state(data: bytes) -> JointState | Refusal:
    """Return the message of a serialised JointState, or why it is refused."""
    return _deserialise(data, JointState, MAX_JOINT_STATE)


def _deserialise(data: bytes, kind: type, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        return Refusal(
            Fault.SHAPE, f'{kind.__name__} of {len(data)} bytes: {max_bytes} are the most that is read, as the watchdog '
            'must not wait; send the beginning of the plan only, and no more joints than there are')
    try:
        return deserialize_message(data, kind)
    except Exception as error:  # rclpy's C++ code raises different types in different layers
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return Refusal(
            Fault.SHAPE, f'{len(data)} bytes are no {kind.__name__} ({text}): build the publisher with the same message '
            'definition')


class CommandOutput(Protocol):
    """One kind of command message on one topic."""

    publisher: Publisher

    def publish(self, command: Command) -> None:
        """Send the command."""


class TwistStampedOutput:
    """TwistStamped on cmd_vel, with the stamp of the observation, so that the robot can tell its age; 0 for a stop."""

    def __init__(self, node: Node, frame_id: str) -> None:
        self.publisher = node.create_publisher(TwistStamped, 'cmd_vel', COMMAND)
        self._message = TwistStamped()
        self._message.header.frame_id = frame_id

    def publish(self, command: Command) -> None:
        self._message.header.stamp = time_message(command.stamp)
        _set_twist(self._message.twist, command)
        self.publisher.publish(self._message)


class TwistOutput:
    """Twist on cmd_vel, for bases that take no stamps and so cannot tell how old a command is."""

    def __init__(self, node: Node) -> None:
        self.publisher = node.create_publisher(Twist, 'cmd_vel', COMMAND)
        self._message = Twist()

    def publish(self, command: Command) -> None:
        _set_twist(self._message, command)
        self.publisher.publish(self._message)


class JointTrajectoryOutput:
    """
    JointTrajectory on joint_trajectory, the whole chunk with explicit times.

    The stamp is 0, which a joint_trajectory_controller reads as 'start now'. With the stamp of the observation it would drop
    the points already past and rush to catch up with the rest. The first point is due one step from now, as the first action
    lasts one step.
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
    """Float64MultiArray on commands, for a forward_command_controller: the current row only."""

    def __init__(self, node: Node) -> None:
        self.publisher = node.create_publisher(Float64MultiArray, 'commands', COMMAND)
        node.get_logger().warning(
            'output float64_multi_array has neither stamp nor time-out: if this process or its host dies, '
            'the controller goes on with its last command for ever. Prefer twist_stamped or joint_trajectory '
            'where the controller takes them.')

    def publish(self, command: Command) -> None:
        self.publisher.publish(Float64MultiArray(data=command.rows[0]))


def make_output(node: Node, output: str, *, frame_id: str, joint_names: Sequence[str]) -> CommandOutput:
    """Return the publisher for one of ``parameters.command_gate.OUTPUTS``."""
    if output == 'twist_stamped':
        return TwistStampedOutput(node, frame_id)
    if output == 'twist':
        return TwistOutput(node)
    if output == 'joint_trajectory':
        return JointTrajectoryOutput(node, joint_names)
    return Float64MultiArrayOutput(node)


def _set_twist(twist: Twist, command: Command) -> None:
    twist.linear.x, twist.angular.z = command.rows[0]


def main() -> int:
    """Run the gate until SIGINT or SIGTERM."""
    unblock_output()
    # No log file, so that it never waits for a disk: launch and the recorder save standard output and /rosout.
    return run(CommandGate, args=[*sys.argv, '--ros-args', '--disable-external-lib-logs'])

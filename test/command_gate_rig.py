"""Runs the command gate as a process, plays its model and listens as its robot."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import rclpy
from builtin_interfaces.msg import Time
from dds import on_its_thread, raise_receiving_threads, received_at, without_shared_memory
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import TwistStamped
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import SetParameters
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger

from worldmodel_ros.msg import ActionChunk, CommandStatus
from worldmodel_ros.nodes.common.qos import COMMAND

ROOT = Path(__file__).resolve().parent.parent
NAMES = ['linear.x', 'angular.z']
DEADLINE = 20.0  # s, for anything to happen on a busy machine
DIAGNOSTICS_PERIOD = 0.2  # s, which tests wait for; 1.0 by default


class Rig:
    """
    ``commands``, ``statuses`` and ``diagnostics`` are [(time of arrival, message)]. ``measured``: name to position of the
    joints, published at 50 Hz while there are any.
    """

    def __init__(self, command_type=TwistStamped, command_topic='cmd_vel') -> None:
        self.context = Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node('gate_rig', context=self.context)
        self.commands, self.statuses, self.diagnostics = [], [], []
        self.sequence = 0
        self.episode_id = 1
        self.sent_at = 0.0
        self.measured = {}
        self.joint_states = self.node.create_publisher(JointState, 'joint_states', 10)
        self.node.create_timer(0.02, self._measure)
        self.chunks = self.node.create_publisher(ActionChunk, 'action_chunk', COMMAND)
        self.clock = self.node.create_publisher(Clock, '/clock', 1)
        # Deeper than the robot's queue of 1, so that later commands do not replace earlier ones.
        keep = QoSProfile(depth=1000)
        for type_, topic, messages in (
                (command_type, command_topic, self.commands),
                (CommandStatus, 'command_status', self.statuses),
                (DiagnosticArray, '/diagnostics', self.diagnostics)):
            self.node.create_subscription(type_, topic, self._recorder(messages), keep)
        raise_receiving_threads()
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.thread = threading.Thread(target=self._spin)
        self.running = True
        self.thread.start()

    @staticmethod
    def _recorder(messages):
        def record(message, info) -> None:
            messages.append((received_at(info), message))
        return record

    def _measure(self) -> None:
        measured = dict(self.measured)
        if measured:
            self.joint_states.publish(JointState(name=list(measured), position=list(measured.values())))

    def _spin(self) -> None:
        while self.running:
            self.executor.spin_once(timeout_sec=0.05)

    def close(self) -> None:
        self.running = False
        self.thread.join()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)

    def send(self, v=0.1, w=0.0, *, age=0.005, **fields) -> ActionChunk:
        """Send a chunk of four equal rows that answers an observation ``age`` seconds old."""
        self.sequence += 1
        chunk = ActionChunk(episode_id=self.episode_id, sequence=self.sequence,
                            tier=ActionChunk.TIER_TWO_STEP, step_period=0.1, names=NAMES, values=[v, w] * 4)
        chunk.header.frame_id = 'base_link'
        chunk.header.stamp = as_time(time.time() - age)
        for name, value in fields.items():
            setattr(chunk, name, value)
        self.sent_at = time.monotonic()
        self.chunks.publish(chunk)
        return chunk

    def drive(self, commands=8, v=0.1, **fields) -> None:
        """Send commands at 10 Hz until the gate passes them, and then ``commands`` more."""
        wait_for(
            lambda: self.send(v, **fields) and happens(lambda: self.passing, 0.1),
            'the gate to pass commands')
        for _ in range(commands):
            self.send(v, **fields)
            time.sleep(0.1)

    def wait_for_refusal(self, text: str) -> None:
        """Wait until the diagnostics report a refusal with ``text``."""
        wait_for(lambda: any(pair.key == 'last refused' and text in pair.value for _, array in self.diagnostics[-3:]
                             for status in array.status for pair in status.values), f'the refusal: {text}')

    @property
    def status(self) -> CommandStatus:
        return self.statuses[-1][1]

    @property
    def passing(self) -> bool:
        return bool(self.statuses) and self.status.state == CommandStatus.PASSING

    def call(self, type_, name, request):
        client = self.node.create_client(type_, name)
        assert client.wait_for_service(DEADLINE)
        future = client.call_async(request)
        wait_for(future.done, f'an answer of {name}')
        on_its_thread(self.executor, self.node.destroy_client, client)
        return future.result()

    def reset(self) -> Trigger.Response:
        return self.call(Trigger, 'command_gate/reset', Trigger.Request())

    def set_parameter(self, name, value):
        message: ParameterMessage = Parameter(name, value=value).to_parameter_msg()
        request = SetParameters.Request(parameters=[message])
        return self.call(SetParameters, 'command_gate/set_parameters', request).results[0]


def as_time(seconds: float) -> Time:
    nanoseconds = int(seconds * 1e9)
    return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def wait_for(condition, what: str):
    """Wait for a condition; fail with ``what`` was awaited."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f'waited {DEADLINE} s in vain for {what}')


def happens(condition, seconds: float) -> bool:
    """Return whether a condition becomes true within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


@contextlib.contextmanager
def gate_process(rig: Rig, *arguments: str, connected: bool = True):
    """Run the gate with ROS arguments, by default its shipped parameters, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / 'scripts/command_gate'), '--ros-args', '--params-file',
         str(ROOT / 'config/command_gate.yaml'), '-p', f'diagnostic_updater.period:={DIAGNOSTICS_PERIOD}', *arguments],
        env={**without_shared_memory(), 'PYTHONUNBUFFERED': '1', 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        if connected:
            wait_for(
                lambda: process.poll() is None and rig.chunks.get_subscription_count() and rig.statuses,
                'the gate')
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    assert 'a callback failed' not in output, output

"""The demo's observer: records topics, sets goals and sends what-if requests."""
from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import Quaternion, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.executors import Executor, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image
from std_msgs.msg import String
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.demo.recording import (
    Choice, Command, Future, Option, Pose, PredictedThing, Recording, Room, Sighting, Thing, Tick)
from worldmodel_ros.msg import DeadlineStatus, Decision, PredictedFuture, Task
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import nanoseconds
from worldmodel_ros.nodes.common.qos import JUDGEMENTS, LATCHED, STATUS
from worldmodel_ros.nodes.common.tasks import AIMS
from worldmodel_ros.nodes.common.what_if_client import MODEL_NODE, ROBOT_NODE, WhatIfClient, record_image

LATE_KEY = 'late'               # in the robot's diagnostics: late commands since the start
LATENCIES_KEY = 'latencies_ms'  # in the robot's diagnostics: camera to command, one per command since the last report


class DemoObserver(Node):
    """
    Appends to a Recording, from the first command that answers an observation until ``finish``.

    Queues are deeper than the system's own: an observer must see every message, not just the newest.
    """

    def __init__(self, recording: Recording, namespace: str) -> None:
        super().__init__('demo_observer', namespace=namespace)
        self.recording = recording
        self.waited = math.nan      # from the first goal to the first command [s]
        self._asked = math.nan
        self._driving = threading.Event()
        self._recording = False
        self._diagnosed = threading.Condition()
        self._reports = {self._full(MODEL_NODE): recording.model, self._full(ROBOT_NODE): recording.robot}
        self._goal = self.create_publisher(String, 'goal', LATCHED)
        self._what_if = WhatIfClient(self, recording.what_ifs.append, MODEL_NODE, ROBOT_NODE)
        self.create_subscription(TwistStamped, 'cmd_vel', self._on_command, STATUS)
        self.create_subscription(Image, 'camera/image_raw', self._on_image, qos_profile_sensor_data)
        self.create_subscription(PredictedFuture, 'predicted_future', self._on_future, STATUS)
        self.create_subscription(Decision, 'decision', self._on_decision, STATUS)
        self.create_subscription(DeadlineStatus, 'deadline_status', self._on_deadline, STATUS)
        self.create_subscription(Odometry, 'sim/ground_truth', self._on_pose, STATUS)
        self.create_subscription(MarkerArray, 'sim/objects', self._on_objects, LATCHED)
        self.create_subscription(Task, 'task', self._on_task, LATCHED)
        self.create_subscription(String, 'sim/judgement', self._on_judgement, JUDGEMENTS)
        self.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, STATUS)

    def begin(self) -> None:
        """Begin the recording with the next command that answers an observation."""
        with self._diagnosed:
            self.recording.robot_latencies.clear()  # of commands before
        self._asked = time.monotonic()

    def set_goal(self, goal: str) -> None:
        """Send the robot to a goal."""
        self._goal.publish(String(data=goal))

    def wait_for_command(self, timeout: float) -> bool:
        """Wait for the first command that answers an observation; return False if none came."""
        return self._driving.wait(timeout)

    def ask_what_if(self, names: tuple[str, ...], goal: str, horizon: float) -> None:
        """Ask the model, then the simulator, without blocking; the answer is added to the recording."""
        self._what_if.ask(names, goal, horizon)

    def now(self) -> int:
        """Return ROS time [ns]."""
        return self.get_clock().now().nanoseconds

    def finish(self, timeout: float) -> int | None:
        """
        End the recording, clear the goal, and wait for the robot's next report.

        Returns how many late commands the robot has counted since its start; None if no report came.
        """
        self._recording = False
        self.set_goal('')
        with self._diagnosed:
            self.recording.robot.pop(LATE_KEY, None)
            self._diagnosed.wait_for(lambda: LATE_KEY in self.recording.robot, timeout)
            late = self.recording.robot.get(LATE_KEY)
        return None if late is None else int(late)

    def _full(self, name: str) -> str:
        return f'{self.get_namespace().strip("/")}/{name}'.lstrip('/')

    def _on_command(self, message: TwistStamped, info: dict[str, int]) -> None:
        # Stamped on reception by a DDS thread that needs no GIL, since this process may be delayed itself, also between its two
        # clocks: read in this order, a command then seems later, never sooner than it was.
        since = time.time_ns() - info['received_timestamp']
        received = self.now() - since
        stamp = nanoseconds(message.header.stamp)
        if stamp and not self._driving.is_set() and not math.isnan(self._asked):
            self.waited = time.monotonic() - self._asked
            self._recording = True
            self._driving.set()
        if self._recording:
            twist = message.twist
            self.recording.commands.append(Command(stamp, received, twist.linear.x, twist.angular.z))

    def _on_image(self, message: Image) -> None:
        if self._recording:
            record_image(self.recording, message)

    def _on_future(self, message: PredictedFuture) -> None:
        if self._recording and message.frames:
            frames = tuple(frame.data.tobytes() for frame in message.frames)
            stamp = nanoseconds(message.header.stamp)
            self.recording.futures.append(Future(stamp, message.step_period, frames, message.tier, message.age))

    def _on_decision(self, message: Decision) -> None:
        if self._recording:
            self.recording.choices.append(Choice(
                nanoseconds(message.header.stamp), message.chosen,
                tuple(Option(each.name, each.score, tuple(each.terms), each.contact, np.column_stack([each.x, each.y]))
                      for each in message.candidates),
                message.passes, tuple(message.terms), np.array(message.times),
                tuple(PredictedThing(each.name, each.colour, each.radius, np.column_stack([each.x, each.y]))
                      for each in message.things),
                np.reshape(message.walls, (-1, 3)), message.forecast_time, message.decision_time))

    def _on_deadline(self, message: DeadlineStatus) -> None:
        if self._recording:
            stamp, late = nanoseconds(message.header.stamp), message.verdict == DeadlineStatus.LATE
            silent = message.verdict == DeadlineStatus.STALE_INPUT and not message.latency
            self.recording.ticks.append(Tick(stamp, message.tier, late, message.latency, message.reason,
                                             message.observation_age - message.latency, silent))

    def _on_pose(self, message: Odometry) -> None:
        if self._recording:
            position, twist = message.pose.pose.position, message.twist.twist
            yaw = _yaw(message.pose.pose.orientation)
            stamp = nanoseconds(message.header.stamp)
            self.recording.poses.append(
                Pose(stamp, position.x, position.y, yaw, twist.linear.x, twist.angular.z))

    def _on_objects(self, message: MarkerArray) -> None:
        things = {f'{marker.ns}/{marker.id}': _thing(marker) for marker in message.markers}
        self.recording.things = things
        # Only the first message since the room began: markers of the next room may arrive before its judgement does.
        if self.recording.rooms and not self.recording.rooms[-1].things:
            self.recording.rooms[-1].things = things
        movers = {thing.name: thing for key, thing in things.items() if key.startswith('movers/')}
        if movers and self._recording:
            self.recording.sightings.append(Sighting(nanoseconds(message.markers[0].header.stamp), movers))

    def _on_task(self, message: Task) -> None:
        self.recording.target = next((term.target for term in message.terms if term.kind in AIMS), '')

    def _on_judgement(self, message: String) -> None:
        told, rooms = json.loads(message.data), self.recording.rooms
        if not rooms or rooms[-1].seed != told['seed'] or told['succeeded'] is None:
            rooms.append(Room(told['task'], told['seed'], self.now()))
        for name in ('target', 'succeeded', 'reason', 'seconds', 'contacts', 'arrivals'):
            setattr(rooms[-1], name, told[name])

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            report = self._reports.get(status.hardware_id)
            if report is None:
                continue
            values = {value.key: value.value for value in status.values}
            latencies = values.pop(LATENCIES_KEY, '')
            with self._diagnosed:
                self.recording.robot_latencies += [float(ms) / 1e3 for ms in latencies.split()]
                report.update(values)
                self._diagnosed.notify_all()


@contextmanager
def observing(recording: Recording, namespace: str, remappings: Mapping[str, str]) -> Iterator[DemoObserver]:
    """Run an observer on its own thread for the duration of the block; signals stay with the caller. ``remappings``: from the
    topics of the robot to their other names."""
    # Given, since rclpy would otherwise take the program's own NAME:=VALUE, of --set, for remappings.
    rules = [word for rule in remappings.items() for word in ('-r', ':='.join(rule))]
    rclpy.init(args=['--ros-args', *rules], signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = DemoObserver(recording, namespace)
        # The events executor cannot deliver the reception time: a callback with message info fails in it.
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        over = threading.Event()
        spinning = threading.Thread(target=_spin, args=(node, executor, over), name='observer', daemon=True)
        spinning.start()
        try:
            yield node
        finally:
            over.set()
            spinning.join()
            executor.shutdown()
            node.destroy_node()
    finally:
        rclpy.try_shutdown()


def _spin(node: Node, executor: Executor, over: threading.Event) -> None:
    while not over.is_set():
        try:
            executor.spin_once(timeout_sec=0.1)
        except Exception as error:  # one message that cannot be read must not end the recording
            node.get_logger().error(f'a message was not recorded: {error!r}', **at_most_every(5.0))


def _thing(marker: Marker) -> Thing:
    position, colour = marker.pose.position, marker.color
    return Thing(marker.text, position.x, position.y, _yaw(marker.pose.orientation), marker.scale.x, marker.scale.y,
                 (colour.r, colour.g, colour.b), marker.type == Marker.CYLINDER)


def _yaw(orientation: Quaternion) -> float:
    return 2.0 * math.atan2(orientation.z, orientation.w)

"""
Publishes the world model's inputs from a rosbag2, also where ``ros2 bag play`` is not available.

Messages are published as the recorded bytes. Each one is preceded by its time of receipt on /clock, so that with
use_sim_time image ages and executed actions come out as they did on the robot.
"""
from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geometry_msgs.msg import TwistStamped
from nav_msgs.msg import Odometry
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.playback import (
    ACTION, CAMERA_INFO, COMPRESSED_IMAGE, GOAL, IMAGE, ODOMETRY, TASK, Part, parts)
from worldmodel_ros.bags.problems import BagError, MessageError
from worldmodel_ros.bags.source import Bag, Record, open_bag
from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model.checkpoint_description import ModelError, read_description
from worldmodel_ros.msg import Task
from worldmodel_ros.nodes.bag_player.listeners import Listeners
from worldmodel_ros.nodes.bag_player.time import PlaybackTime
from worldmodel_ros.nodes.common.messages import time_message
from worldmodel_ros.nodes.common.parameters import ParameterError, Parameters
from worldmodel_ros.nodes.common.qos import STATUS
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.parameters.bag_player import PARAMETERS

_TYPES = {IMAGE: Image, COMPRESSED_IMAGE: CompressedImage, CAMERA_INFO: CameraInfo, ACTION: TwistStamped, GOAL: String,
          ODOMETRY: Odometry, TASK: Task}
_STEP_TIMEOUT = 5.0    # s, for ~/play_next to see its message published
_ACK_TIMEOUT = 2.0     # s, for the last messages to be received
_LAST_ANSWER = 0.5     # s, for responses to the last message
_ENDING = 30.0         # s, from the end of the bag to that of the process
_POLL = 0.1            # s
_BEHIND = 0.02         # s, lateness above which a warning is logged


def _end_this_process() -> None:
    """Interrupt this process; if it is still running after ``_ENDING`` s, dump the stack of each thread and exit."""
    faulthandler.dump_traceback_later(_ENDING, exit=True)
    signal.raise_signal(signal.SIGINT)


class BagPlayer(Node):
    """
    The bag player node. At the end of the bag it calls ``on_end`` from its playing thread; by default that ends the process.
    ``failed`` tells whether it ended early.
    """

    def __init__(self, on_end: Callable[[], None] = _end_this_process, **options: Any) -> None:
        super().__init__('bag_player', **options)
        self._on_end, self.failed = on_end, False
        self._settings = Parameters(self, PARAMETERS, self._on_parameter)
        self._bag, self._parts = self._open()
        self._outputs = {part.topic.name: self._output(part) for part in self._parts}
        self._clock_output = self.create_publisher(Clock, '/clock', STATUS)
        self._time = PlaybackTime(self._settings['rate'], self._settings['start_paused'], skipping=lambda seconds: self._warn(
            f'the bag has no message for {seconds:.0f} s: they are skipped, and the time is set forward'))
        self._listeners = Listeners(self, (*self._outputs.values(), self._clock_output), self._settings['wait_for'])
        for name, callback in (('pause', self._pause), ('resume', self._resume), ('toggle_paused', self._toggle),
                               ('is_paused', self._is_paused), ('play_next', self._play_next)):
            self.create_service(Trigger, f'~/{name}', callback)
        self._thread = threading.Thread(target=self._run, name='playing', daemon=True)
        self._thread.start()

    def on_shutdown(self) -> None:
        """End playing and close the bag."""
        self._time.stop()
        self._thread.join()
        self._bag.close()

    def _open(self) -> tuple[Bag, tuple[Part, ...]]:
        settings = self._settings
        if not settings['bag']:
            raise ParameterError('bag: name the rosbag2 folder that is to be played')
        try:
            preset = read_description(model_folder(settings['model'])).preset
            bag = open_bag(Path(settings['bag']).expanduser())
            mapping = find_mapping(bag, preset, Path(settings['config']).expanduser() if settings['config'] else None)
        except (BagError, ModelError) as error:
            raise ParameterError(str(error)) from error
        for note in (*mapping.notes, *(problem.text for problem in bag.problems)):
            self._warn(note)
        self._action_names = preset.action_names
        return bag, parts(bag, mapping)

    def _output(self, part: Part) -> Publisher:
        # Reliable, and latched where a late joiner needs it, is compatible with every subscriber.
        recorded = any(qos.durability.name == 'TRANSIENT_LOCAL' for qos in part.topic.qos)
        durability = DurabilityPolicy.TRANSIENT_LOCAL if recorded or part.name in (GOAL, TASK) else DurabilityPolicy.VOLATILE
        return self.create_publisher(_TYPES[part.name], part.name, QoSProfile(
            history=HistoryPolicy.KEEP_LAST, depth=10, reliability=ReliabilityPolicy.RELIABLE, durability=durability))

    def _run(self) -> None:
        try:
            if self._wait_for_listeners():
                self._play()
        except Exception as error:  # such as a broken bag file; in a thread it would go unreported
            self.failed = True
            self.get_logger().fatal(f'playing ended early: {error!r}')
        self._time.finish()
        if not self._time.stopped:
            self._on_end()

    def _wait_for_listeners(self) -> bool:
        """Return whether to play; False if the node is shutting down."""
        end = time.monotonic() + self._settings['wait_s']
        while not self._time.stopped and (missing := self._listeners.missing()):
            if time.monotonic() >= end:
                self._warn(f'waited {self._settings["wait_s"]:g} s for {missing}, which did not come: playing all the same')
                break
            self._publish_clock(self._bag.start_ns or 0)  # every node must be at this time when the first image arrives
            time.sleep(_POLL)
        return not self._time.stopped

    def _play(self) -> None:
        played, began = 0, time.monotonic()
        while True:
            played += self._pass()
            if self._time.stopped:
                return
            if not self._settings['loop']:
                break
        for output in self._outputs.values():
            output.wait_for_all_acked(Duration(seconds=_ACK_TIMEOUT))
        time.sleep(_LAST_ANSWER)
        self.get_logger().info(f'played {played} messages of {self._bag.path} in {time.monotonic() - began:.1f} s')

    def _pass(self) -> int:
        """Play the bag once; return the number of messages."""
        by_topic = {part.topic.name: part for part in self._parts}
        period, played, first, behind = 1.0 / self._settings['clock_hz'], 0, True, 0.0
        for record in self._bag.messages(by_topic):
            if first:
                self._time.begin(record.log_ns)
                first = False
            if not self._time.wait_for(record.log_ns, period, self._publish_clock):
                return played
            behind = max(behind, self._time.behind(record.log_ns))
            self._publish_clock(record.log_ns)
            played += self._publish(by_topic[record.topic.name], record)
            self._time.passed()
        if behind > _BEHIND:
            self._warn(f'messages went out up to {behind * 1e3:.0f} ms late: the machine is too slow for this rate')
        return played

    def _publish(self, part: Part, record: Record) -> bool:
        try:
            message = part.convert(record) if part.convert else record.raw
        except MessageError as error:
            self._warn(f'not played: {error}')
            return False
        if isinstance(message, tuple):
            message = self._twist(message, record.log_ns)
        self._outputs[record.topic.name].publish(message)
        return True

    def _twist(self, action: tuple[float, ...], stamp: int) -> TwistStamped:
        message = TwistStamped()
        message.header.stamp = time_message(stamp)
        for name, value in zip(self._action_names, action):
            vector, axis = name.split('.')  # 'linear.x'
            setattr(getattr(message.twist, vector), axis, value)
        return message

    def _publish_clock(self, stamp: int) -> None:
        self._clock_output.publish(Clock(clock=time_message(stamp)))

    def _warn(self, text: str) -> None:
        self.get_logger().warning(text)

    def _on_parameter(self, name: str, value: Any) -> None:
        if name == 'rate':
            self._time.set_rate(value)

    def _pause(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._time.pause(True)
        return self._is_paused(request, response)

    def _resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._time.pause(False)
        response.success, response.message = True, 'playing'
        return response

    def _toggle(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return (self._resume if self._time.paused else self._pause)(request, response)

    def _is_paused(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self._time.paused
        response.message = 'paused' if self._time.paused else 'playing'
        return response

    def _play_next(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self._time.step(_STEP_TIMEOUT)
        response.message = '' if response.success else 'nothing was played: pause first, or the bag has ended'
        return response


def main() -> int:
    """Run the node until the end of the bag or a signal."""
    players: list[BagPlayer] = []

    def make() -> BagPlayer:
        players.append(BagPlayer())
        return players[0]

    return run(make) or int(any(player.failed for player in players))

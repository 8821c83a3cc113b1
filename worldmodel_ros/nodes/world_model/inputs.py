"""The world model node's inputs: images, executed actions, odometry, goals and tasks."""

import itertools
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from geometry_msgs.msg import PoseStamped, Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.utilities import get_rmw_implementation_identifier
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.control.responder import Answer, Observation
from worldmodel_ros.control.task import Task, TaskError
from worldmodel_ros.inputs.images import ImageError
from worldmodel_ros.inputs.odometry import Reading, WheelReadings, yaw_of
from worldmodel_ros.inputs.ticks import GAP, ExecutedActions, Frames, FrameSettings, Pace, is_usable
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import NS, nanoseconds
from worldmodel_ros.nodes.common.qos import COMMAND, LATCHED, ODOMETRY
from worldmodel_ros.nodes.common.what_if_request import BASE
from worldmodel_ros.nodes.world_model.parameters import frame_settings

SEGMENT = 512 * 1024  # bytes, default shared memory of a Fast DDS participant
_UNHEARD = 3.0  # s, allowed for discovery
_PROFILE = 'FASTRTPS_DEFAULT_PROFILES_FILE'

# Counted from a random number, so that no two processes share an episode, whatever the host's clock does. 48 bits are exact in
# JavaScript.
_EPISODES = itertools.count(secrets.randbits(48))
_PATIENCE = 1.0  # s, of commands that move the robot; the first is normally heard within milliseconds
_LOG_INTERVAL, _REMINDER = 2.0, 10.0  # s, between two log lines on the same subject
_PACKAGE = 'geometry_msgs/msg/'
# The default QoS, which rclpy, RViz and Foxglove offer. Deep enough to receive all goals in order after a stall of this
# process.
_ORDINARY = QoSProfile(depth=10)
ODOM = 'odom'  # REP 105: the frame of an odometry that names none
_RECENT = 1.0  # s, from the stamp of the newest odometry to ROS time
_APART = 0.1  # s, at most, between the two receptions of one message


class Taken(NamedTuple):
    """``sound``: the image is usable, whether or not it is a tick. ``observation``: None unless it is a tick."""

    sound: bool
    observation: Observation | None = None


class IntakeSettings(NamedTuple):
    """
    Times in s. ``deadline``: from the stamp of an image to its answer. ``future_tolerance``: how far a stamp may be ahead of
    ROS time. ``frames``: which images are ticks.
    """

    deadline: float
    future_tolerance: float
    frames: FrameSettings

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> 'IntakeSettings':
        """Return the settings in the node's parameters."""
        return cls(parameters['deadline_s'], parameters['future_tolerance_s'], frame_settings(parameters))


class Intake:
    """
    Turns the images of one activation into observations, with the current ``goal`` and ``task``; ``frames`` selects the ticks.

    ``settings``, ``goal`` and ``task`` may be changed at any time; ``ros_now`` returns ROS time [ns]; ``gap`` is as of
    ``FramePacer``.
    """

    def __init__(self, spec: Any, settings: IntakeSettings, executed: ExecutedActions,
                 ros_now: Callable[[], int], refusals: Refusals, advice: 'LargeImageAdvice',
                 logger: RcutilsLogger, gap: float = GAP) -> None:
        self.goal = ''
        self.task = Task()
        self.camera_frame = ''
        self.stamp = 0         # ns, of the newest observation
        self.episode = 0
        self.delay = 0.0       # s, age of the newest image on receipt
        self._sequence = 0
        self.settings, self._executed, self._ros_now = settings, executed, ros_now
        self._refusals, self._advice, self._logger = refusals, advice, logger
        self.frames = Frames(spec.step_period, spec.image_size, gap)
        self._starts_over = False
        self._begin_episode()

    def next_sequence(self) -> int:
        """Return the next sequence number within the episode."""
        self._sequence += 1
        return self._sequence

    def begin_episode(self) -> None:
        """Make the next image the first of a new episode, and trust the camera again. Thread-safe."""
        self._starts_over = True

    def take(self, message: Image | CompressedImage) -> Taken:
        """Check a just received image; return an observation if it is a tick."""
        received, settings = time.monotonic(), self.settings
        if self._starts_over:
            self._starts_over = False
            self.frames.forget()
        stamp = nanoseconds(message.header.stamp)
        now = self._ros_now()
        self.delay = age = (now - stamp) / NS
        if age < -settings.future_tolerance:
            return self._refuse('stamp in the future', f'the image is stamped {-age:.3f} s ahead of ROS '
                                'time: synchronise the clocks, and give all nodes the same use_sim_time')
        try:
            pace, picture = self.frames.take(
                message, stamp, self._executed.moving(now), received, settings.frames)
        except ImageError as error:
            self._advice.refused(message, error)
            return self._refuse(error.kind, str(error))
        if pace.refused:
            return self._refuse(pace.value, f'the stamp is {stamp / NS:.3f} s: the camera driver must stamp '
                                'each image with the time it was taken, never the same twice')
        if pace is Pace.BETWEEN:
            return Taken(True)
        self._advice.received(message)
        if pace is Pace.FROZEN:
            self._refusals.count(f'image: {pace.value}')
            return Taken(True)
        if pace is Pace.NEW_EPISODE:
            self._begin_episode()
        self.stamp, self.camera_frame = stamp, message.header.frame_id
        deadline = settings.deadline
        stale = f'the image was {age * 1e3:.0f} ms old on receipt, {deadline * 1e3:.0f} ms are allowed'
        return Taken(True, Observation(
            picture, stamp, received, received + deadline - max(0.0, age), self.episode, self.next_sequence(),
            self.goal, stale if age > deadline else '', self.task, max(0.0, age), self.frames.spacing, self.frames.moved))

    def _begin_episode(self) -> None:
        self.episode = next(_EPISODES)
        self._sequence = 0

    def _refuse(self, kind: str, text: str) -> Taken:
        self._refusals.count(f'image: {kind}')
        self._logger.warning(f'image refused: {text}', **at_most_every(_LOG_INTERVAL))
        return Taken(False)


class LargeImageAdvice:
    """
    Warns, once, that images are lost because they do not fit in the shared memory of Fast DDS.

    With best effort such images arrive rarely, or broken, or never, and nothing else tells why.
    """

    def __init__(self, node: Node, topic: str) -> None:
        """``topic``: fully resolved."""
        self._node, self._topic = node, topic
        self._bytes = 0
        self._given = 'fastrtps' not in get_rmw_implementation_identifier()

    def refused(self, message: Image | CompressedImage, error: ImageError) -> None:
        """Record an image that could not be used."""
        size = self._note(message)
        if size > SEGMENT and error.kind in ('empty', 'wrong size'):
            self._warn(f'an image of {size} bytes arrived broken')

    def received(self, message: Image | CompressedImage) -> None:
        """Record an image that could be used."""
        self._note(message)

    def silent(self, seconds: float) -> None:
        """Record that no image came for ``seconds``."""
        if self._given:
            return
        if self._bytes > SEGMENT:
            self._warn(f'images of {self._bytes} bytes come with gaps')
        elif seconds >= _UNHEARD and not self._bytes and self._has_best_effort_publisher():
            self._warn(f'it has a publisher, but no image has come for {seconds:.0f} s')

    def _note(self, message: Image | CompressedImage) -> int:
        claimed = message.step * message.height if isinstance(message, Image) else 0
        self._bytes = max(len(message.data), claimed)
        return self._bytes

    def _has_best_effort_publisher(self) -> bool:
        return any(publisher.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
                   for publisher in self._node.get_publishers_info_by_topic(self._topic))

    def _warn(self, what: str) -> None:
        if self._given:
            return
        self._given = True
        profile = os.environ.get(_PROFILE)
        remedy = (f'it is set to {profile} here: set it for the camera driver too' if profile else
                  f'start the camera driver and this node with {_PROFILE}='
                  'SHARE/config/fastdds_large_images.xml, where SHARE is what '
                  '`ros2 pkg prefix --share worldmodel_ros` prints')
        self._node.get_logger().warning(
            f'{self._topic}: {what}. Best-effort images that do not fit in the shared memory of Fast DDS '
            f'({SEGMENT} bytes by default) are lost. Remedy: {remedy}; or use image_transport:=compressed')


def require_base(spec: Any) -> None:
    """Raise ValueError for a model whose actions are not those of a twist, on which executed actions are received."""
    if tuple(spec.action_names) != BASE:
        raise ValueError(
            f'model {spec.name}: its actions are {", ".join(spec.action_names)}, but what the robot executes is heard '
            f'as a twist, of which this node takes {", ".join(BASE)}: choose a model with these actions, in this order')


class ExecutedTopic:
    """
    Keeps the ``actions`` received on the topic of executed actions.

    Detects that commands go out and none is received there, which nothing else would show: ROS reports no error for a wrong
    topic or message type.
    """

    def __init__(self, node: Node, spec: Any, settings: Mapping[str, Any], refusals: Refusals) -> None:
        """``settings``: the node's parameters."""
        self._node, self._refusals = node, refusals
        self._timeout = settings['executed_timeout_s']
        self.actions = ExecutedActions(len(spec.action_names), spec.step_period, self._timeout)
        self._stamped = settings['enable_stamped_cmd_vel']
        topic = settings['executed_action_topic']
        self._topic = node.resolve_topic_name(topic)
        kind, callback = ((TwistStamped, lambda message: self._hear(message.twist)) if self._stamped else
                          (Twist, self._hear))
        self._subscription = node.create_subscription(kind, topic, callback, COMMAND)
        # Steady times [s]. Two threads write them; a lost update is corrected by the next command.
        self._since: float | None = None  # of the first command since the last message
        self._newest = -math.inf          # of the newest command
        self._last_word = False           # after the last message, silence is no fault

    def destroy(self) -> None:
        """Destroy the subscription."""
        self._node.destroy_subscription(self._subscription)

    def commanded(self, answer: Answer, now: float) -> None:
        """Record an answer sent at ``now`` [steady, s]. Thread-safe."""
        if answer.actions is None or not np.any(answer.actions[0]):
            return
        if self._since is None or now - self._newest > _PATIENCE:
            self._since = now
        self._newest = now

    def degraded_reason(self, now: float) -> str:
        """Return, and log, the fault and the remedy if commands go out but none is received as executed; else ''."""
        since, newest = self._since, self._newest
        if since is None or newest - since < _PATIENCE or now - newest > _PATIENCE:
            return ''
        own = _PACKAGE + ('TwistStamped' if self._stamped else 'Twist')
        others = {p.topic_type for p in self._node.get_publishers_info_by_topic(self._topic)} - {own}
        if self._last_word and not others:
            return ''
        text = (f'commands go out, but none was heard on {self._topic} ({own}) for {now - since:.0f} s, so that the '
                'model takes the robot to stand still, and a frozen camera would not be noticed: '
                f'{self._remedy(others)}')
        self._node.get_logger().warning(text, **at_most_every(_REMINDER))
        return text

    def _remedy(self, others: set[str]) -> str:
        other = _PACKAGE + ('Twist' if self._stamped else 'TwistStamped')
        if other in others:
            return f'{other} is published there: set enable_stamped_cmd_vel to {str(not self._stamped).lower()}'
        if others:
            return (f'{", ".join(sorted(others))} is published there: set executed_action_topic to a topic of twists '
                    'that the base is given')
        if self._node.count_publishers(self._topic):
            return ('its publisher is silent, or offers best effort only: see whether the gate passes commands '
                    '(command_status), and set executed_action_topic to what the base listens to')
        return 'it has no publisher: start the gate, or set executed_action_topic to what the base listens to'

    def _hear(self, twist: Twist) -> None:
        action = (twist.linear.x, twist.angular.z)
        # A gate that has stopped the robot falls silent after a while; without a timeout the topic has only changes.
        self._since, self._last_word = None, not any(action) or not self._timeout
        if not is_usable(action):
            self._refusals.count('executed action: not finite')
            return
        now = self._node.get_clock().now().nanoseconds
        if self.actions.ran_out(now):
            self._node.get_logger().warning(
                f'no executed command came for more than {self._timeout:g} s although the last one moved the robot, '
                'which was taken to have braked; for a topic that tells changes only, set executed_timeout_s to 0',
                **at_most_every(_LOG_INTERVAL))
        self.actions.add(now, action)


class OdometryTopic:
    """
    Keeps the ``readings`` of nav_msgs/Odometry on ``odom``, best effort. ``frame``: that of their poses, '' before the first.
    """

    def __init__(self, node: Node, spec: Any, refusals: Refusals) -> None:
        self._node, self._refusals = node, refusals
        self.frame = ''
        self.readings = WheelReadings(spec.step_period)
        self._subscription = node.create_subscription(Odometry, 'odom', self._hear, ODOMETRY)

    def destroy(self) -> None:
        """Destroy the subscription."""
        self._node.destroy_subscription(self._subscription)

    def _hear(self, message: Odometry) -> None:
        if self.readings.add(Reading.of(message)):
            self.frame = message.header.frame_id.lstrip('/') or ODOM
        else:
            self._refusals.count('odometry: not finite')

    def degraded_reason(self) -> str:
        """Return why the readings do not tell where the robot is now, and the remedy; '' if they do."""
        newest = self.readings.newest
        if newest is None:
            return 'none is heard on odom: start it, or name its topic (odom:=)'
        late = (self._node.get_clock().now().nanoseconds - newest) / NS
        if abs(late) <= _RECENT:
            return ''
        return (f'the newest on odom is stamped {abs(late):.3g} s {"before" if late > 0.0 else "ahead of"} ROS time: have its '
                'driver run, stamp each message with the time of measurement, and synchronise the clocks')

    def in_words(self, measured: bool) -> str:
        """Return whether the pose of the newest image was ``measured``, else what stands in, and why."""
        if measured:
            return 'measured'
        reason = self.degraded_reason() or 'the newest image was taken too long after a message on odom'
        return f'executed commands stand in: {reason}'

    def place(self, pose: PoseStamped, base_frame: str) -> tuple[float, ...]:
        """Return ``pose`` as x, y, yaw in the odometry frame, without yaw if its quaternion is all 0. Raises TaskError for an
        unknown frame or without odometry."""
        frame, at, q = pose.header.frame_id.lstrip('/'), pose.pose.position, pose.pose.orientation
        turned = (yaw_of(q),) if any((q.x, q.y, q.z, q.w)) else ()
        if reason := self.degraded_reason():
            raise TaskError(f'a place needs odometry, and {reason}')
        if frame == self.frame:
            return at.x, at.y, *turned
        if frame != base_frame.lstrip('/'):
            raise TaskError(f'a pose in the frame {frame!r} is not understood: give it in {self.frame} (in RViz, the fixed '
                            f'frame) or in {base_frame}')
        stamp = nanoseconds(pose.header.stamp) or self._node.get_clock().now().nanoseconds
        robot = self.readings.at(stamp)
        if robot is None:
            raise TaskError(f'no odometry tells where the robot was at {stamp / NS:.3f} s: a stamp of 0 is now')
        x, y, yaw = robot[0]
        cos, sin = math.cos(yaw), math.sin(yaw)
        return float(x + cos * at.x - sin * at.y), float(y + sin * at.x + cos * at.y), *(float(yaw + each) for each in turned)


class LatchedTopic:
    """
    Receives what latched and ordinary publishers say on a topic, and calls ``take`` with each message, in order of arrival.

    A volatile publisher matches no transient-local subscription, and a volatile subscription does not get a latched
    publisher's earlier message; so there is one of each, and a message received by both counts once.
    """

    def __init__(self, node: Node, kind: type, topic: str, take: Callable[[Any], None]) -> None:
        self._node, self._take = node, take
        self._once: tuple[deque[tuple[Any, float]], ...] = (deque(maxlen=10), deque(maxlen=10))  # received by one only
        # The default callbacks would warn that each volatile publisher is incompatible.
        silent = SubscriptionEventCallbacks(use_default_callbacks=False)
        self._subscriptions = (
            node.create_subscription(kind, topic, lambda message: self._hear(0, message), _ORDINARY),
            node.create_subscription(kind, topic, lambda message: self._hear(1, message), LATCHED, event_callbacks=silent))

    def destroy(self) -> None:
        """Destroy the subscriptions."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)

    def _hear(self, which: int, message: Any) -> None:
        # rclpy's events executor does not deliver message info, so a message is identified by its content.
        now, own, other = time.monotonic(), self._once[which], self._once[1 - which]
        while other and now - other[0][1] > _APART:
            other.popleft()
        heard = [before for before, _ in other]
        if message not in heard:
            own.append((message, now))
            self._take(message)
            return
        # Earlier messages that only one has received will not reach the other.
        own.clear()
        for _ in range(heard.index(message) + 1):
            other.popleft()

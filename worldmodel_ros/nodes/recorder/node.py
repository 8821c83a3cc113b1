"""
Records the world model's inputs and outputs to a rosbag2 of MCAP files.

Runs as a separate process that no other waits for: messages are taken as bytes, put into a bounded queue, and written by a
thread. If the disk cannot keep up, messages are dropped, oldest first, and counted.
"""
from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.subscription import Subscription
from rclpy.topic_endpoint_info import TopicEndpointInfo

from worldmodel_ros.nodes.common.camera_info import INFO_TOPIC, camera_info_topic
from worldmodel_ros.nodes.common.diagnostics import ERROR, OK, WARN, Diagnostics, Report
from worldmodel_ros.nodes.common.parameters import ParameterError, Parameters
from worldmodel_ros.nodes.common.qos import hearing
from worldmodel_ros.nodes.common.spin import run
from worldmodel_ros.nodes.recorder.backlog import Backlog, Received
from worldmodel_ros.nodes.recorder.bag import BagWriter, TopicDescription
from worldmodel_ros.nodes.recorder.types import UnknownTypeError, definition, message_class
from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD
from worldmodel_ros.parameters.recorder import PARAMETERS

MB = 10 ** 6
_IMAGES = 'camera/image_raw', 'camera/image_raw/compressed'  # of the world model node
_DISCOVERY_PERIOD = 0.2  # s; messages published before their topic is discovered are not recorded
_PATIENCE = 10.0  # s, after which a topic without a publisher is reported
_DEPTH = 100  # messages of a topic that DDS keeps until taken: 10 s of most topics, for when this process waits for a core
_TOLD = 0.2  # s, between two updates of the reported counts while writing
_RECEIVED = 0.1  # s, for DDS threads to receive pending data: they may be waiting for a core, too


class _Recorded(NamedTuple):
    """A recorded topic."""

    subscription: Subscription
    qos: QoSProfile
    type: str


class Numbers:
    """
    Counts lost messages of a topic: those that its publisher has numbered and DDS has not delivered.

    DDS numbers the messages of each publisher but does not tell whose number it is. So a gap counts only if the topic had one
    and the same publisher at the checks before and after it.
    """

    def __init__(self) -> None:
        self.missed = 0
        self._missing = 0  # since the last check
        self._last: int | None = None
        self._publisher: tuple[int, ...] | None = None

    def take(self, number: int | None) -> None:
        """Process the sequence number of a message; None if DDS gives none."""
        if number is None:
            return
        if self._last is None or number > self._last:
            self._missing += 0 if self._last is None else number - self._last - 1
            self._last = number
        else:  # out of order: it was counted as missing before
            self._missing -= 1

    def look(self, publishers: Sequence[tuple[int, ...]]) -> None:
        """Process the current publishers of the topic, as global identifiers."""
        publisher = publishers[0] if len(publishers) == 1 else None
        if publisher is not None and publisher == self._publisher:
            self.missed += max(0, self._missing)
        else:
            self._last = None
        self._missing, self._publisher = 0, publisher


class Recorder(Node):
    """The recorder node. It records from construction to ``on_shutdown``."""

    def __init__(self, **options: Any) -> None:
        super().__init__('recorder', **options)
        settings = Parameters(self, PARAMETERS)
        self.folder = Path(settings['bag'] or time.strftime('rosbag2_%Y_%m_%d-%H_%M_%S')).expanduser().absolute()
        try:
            self._bag = BagWriter(self.folder, settings['max_file_mb'] * MB)
        except OSError as error:
            raise ParameterError(f'bag: {error}') from error
        self._backlog = Backlog(settings['queue_mb'] * MB)
        self._topics = self._resolved(settings['topics'])
        self._optional = set(self._resolved(settings['optional_topics']).values())
        self._recorded: dict[str, _Recorded] = {}
        self._refused: dict[str, str] = {}  # topic -> why it, or part of its messages, cannot be recorded
        self._numbers: defaultdict[str, Numbers] = defaultdict(Numbers)
        self._types: dict[str, set[str]] = {}  # of the publishers of a topic, at the last check
        self._began = time.monotonic()
        self._complained = False
        self._failure = ''
        self._lock = threading.Lock()  # of the bag; held during disk writes, so the executor must never block on it
        self._written = Counter(), 0  # messages by topic, and bytes, at the last update
        self._told = -math.inf
        self._writer = threading.Thread(target=self._write, name='writing', daemon=True)
        self._writer.start()
        self.create_timer(_DISCOVERY_PERIOD, self._discover, clock=Clock(clock_type=ClockType.STEADY_TIME))
        Diagnostics(self, {'recorder': self.report}, settings[DIAGNOSTICS_PERIOD.name])
        self.get_logger().info(f'recording to {self.folder}')

    def on_shutdown(self) -> None:
        """Write pending messages, complete the bag, and log its contents."""
        for pause in (_RECEIVED, 0.0):
            for topic, (subscription, *_) in self._recorded.items():
                self._take_the_rest(topic, subscription)
            time.sleep(pause)
        for topic in self._recorded:
            self._look(topic, self.get_publishers_info_by_topic(topic))
        self._backlog.close()
        self._writer.join()
        with self._lock:
            try:
                self._bag.close()
            except OSError as error:
                self.get_logger().error(
                    f'the bag could not be completed: {error}; `mcap recover` repairs its last file')
                return
            counts, size = self._bag.counts, self._bag.bytes_written
        self.get_logger().info('; '.join([
            f'recorded {counts.total()} messages of {len(counts)} topics ({size / MB:.1f} MB) in {self.folder}',
            *_faults(self._backlog.dropped, self._missed())]))

    def _resolved(self, names: Sequence[str]) -> dict[str, str]:
        """
        Return the topics of a list, as listed -> as remapped.

        INFO_TOPIC stands for the CameraInfo that the model's node listens to, which of both forms of the image it may use.
        """
        topics = {name: self.resolve_topic_name(name) for name in names if name != INFO_TOPIC}
        if INFO_TOPIC in names:
            topics |= {topic: topic for topic in (camera_info_topic(self, image) for image in _IMAGES)}
        return topics

    def _discover(self) -> None:
        if not self._knows_time:
            self._began = time.monotonic()
            self.get_logger().info('waiting for /clock: nothing is recorded before it tells the time', once=True)
            return
        for topic in self._topics.values():
            publishers = self.get_publishers_info_by_topic(topic)
            self._look(topic, publishers)
            have = self._recorded.get(topic)
            if have is not None:
                self._follow(topic, have, publishers)
            elif publishers:
                types = {publisher.topic_type for publisher in publishers}
                # Publishers are discovered one after the other: begin only once their types have not changed since the
                # last check.
                if self._types.get(topic) != types:
                    self._refused.pop(topic, None)  # the wrong publisher may have ended
                elif topic not in self._refused:
                    self._begin(topic, publishers, hearing(publishers, _DEPTH))
                self._types[topic] = types
        missing = self._missing()
        if missing and not self._complained:
            self._complained = True
            self.get_logger().warning(
                f'no publisher of {", ".join(missing)}. Where the robot has other names for them, give the recorder '
                'image, compressed_image, camera_info, cmd_vel and odom as the model, or list its topics in the parameter '
                'topics')

    @property
    def _knows_time(self) -> bool:
        """With simulated time, whether /clock was heard: messages from before would be recorded as those of 1970."""
        return self.get_clock().now().nanoseconds > 0

    def _look(self, topic: str, publishers: list[TopicEndpointInfo]) -> None:
        self._numbers[topic].look([tuple(publisher.endpoint_gid) for publisher in publishers])

    def _missed(self) -> Counter[str]:
        """Return the number of messages that DDS has not delivered, by topic."""
        return Counter({topic: numbers.missed for topic, numbers in self._numbers.items() if numbers.missed})

    def _follow(self, topic: str, have: _Recorded, publishers: list[TopicEndpointInfo]) -> None:
        """Record publishers that have joined an already recorded topic, if they publish the same type."""
        other_types = sorted({publisher.topic_type for publisher in publishers} - {have.type})
        if other_types and topic not in self._refused:
            self._refused[topic] = f'only {have.type}, not what is published as {", ".join(other_types)}'
            self.get_logger().warning(f'{topic} is recorded as {self._refused[topic]}: end the wrong publisher')
        elif not other_types:
            self._refused.pop(topic, None)
        wanted = hearing([publisher for publisher in publishers if publisher.topic_type == have.type], _DEPTH)
        if _weaker(wanted, have.qos):
            # A publisher that offers less has joined: it is incompatible with the current subscription.
            self.destroy_subscription(have.subscription)
            self._subscribe(topic, have.type, wanted)

    def _missing(self) -> list[str]:
        """Return the topics that should have a publisher but have had none so far."""
        if time.monotonic() - self._began < _PATIENCE:
            return []
        there = {name for name, topic in self._topics.items() if topic in self._recorded or topic in self._refused}
        return [topic for name, topic in self._topics.items()
                if name not in there and _other_form(name) not in there and topic not in self._optional]

    def _begin(self, topic: str, publishers: list[TopicEndpointInfo], qos: QoSProfile) -> None:
        types = sorted({publisher.topic_type for publisher in publishers})
        try:
            if len(types) > 1:
                raise UnknownTypeError(
                    f'it is published with several types, {", ".join(types)}: end the wrong publisher')
            description = TopicDescription(
                topic, types[0], definition(types[0]), str(publishers[0].topic_type_hash),
                tuple(_profile(publisher.qos_profile) for publisher in publishers))
            message_class(types[0])
        except UnknownTypeError as error:
            self._refused[topic] = str(error)
            self.get_logger().warning(f'{topic} is not recorded: {error}')
            return
        self._bag.add_topic(description)
        self._subscribe(topic, types[0], qos)

    def _subscribe(self, topic: str, type_name: str, qos: QoSProfile) -> None:
        subscription = self.create_subscription(
            message_class(type_name), topic, partial(self._on_message, topic), qos, raw=True)
        self._recorded[topic] = _Recorded(subscription, qos, type_name)

    def _on_message(self, topic: str, data: bytes, info: dict[str, int]) -> None:
        # The time of DDS's reception, as this process may have been delayed since. With simulated time, only the current time
        # is known.
        clock = self.get_clock()
        self._numbers[topic].take(info['publication_sequence_number'])
        received = clock.now().nanoseconds if clock.ros_time_is_active else info['received_timestamp']
        self._backlog.put(Received(topic, received, data))

    def _take_the_rest(self, topic: str, subscription: Subscription) -> None:
        """Take messages that DDS has received and no callback was called for yet: up to a second's worth on a busy machine."""
        with subscription.handle:
            for _ in range(_DEPTH):  # bounded, because publishers go on
                taken = subscription.handle.take_message(subscription.msg_type, True)
                if taken is None:
                    return
                self._on_message(topic, *taken)

    def _write(self) -> None:
        while (message := self._backlog.get()) is not None:
            if self._failure:
                continue  # discard, so that the queue does not stay full
            try:
                with self._lock:
                    self._bag.write(*message)
                    if time.monotonic() - self._told > _TOLD:
                        self._look_at_bag()
            except (OSError, ValueError) as error:
                self._failure = f'writing to {self.folder} failed: {error}'
                self.get_logger().error(f'{self._failure}. Nothing more is recorded: make room, and start it again')

    def _look_at_bag(self) -> None:
        self._written, self._told = (self._bag.counts, self._bag.bytes_written), time.monotonic()

    def report(self) -> Report:
        """Return what is recorded and what is not, for the diagnostics. Does not wait for the disk."""
        if self._lock.acquire(blocking=False):
            try:
                self._look_at_bag()
            finally:
                self._lock.release()
        counts, size = self._written
        dropped, missed = self._backlog.dropped, self._missed()
        values = {'bag': self.folder, 'messages': counts.total(), 'written_mb': size / MB,
                  'queue_mb': self._backlog.bytes / MB, 'dropped': dropped.total(),
                  **{f'dropped: {topic}': count for topic, count in dropped.items()}, 'missed': missed.total(),
                  **{f'missed: {topic}': count for topic, count in missed.items()},
                  **{f'not recorded: {topic}': why for topic, why in self._refused.items()}}
        if self._failure:
            return Report(ERROR, self._failure, values)
        faults = _faults(dropped, missed)
        if not self._knows_time:
            faults.append('waiting for /clock')
        if missing := self._missing():
            faults.append(f'no publisher of {", ".join(missing)}')
        if self._refused:
            faults.append(f'not recorded: {", ".join(self._refused)}')
        if faults:
            return Report(WARN, '; '.join(faults), values)
        return Report(OK, f'recording {len(self._recorded)} topics', values)


def _faults(dropped: Counter[str], missed: Counter[str]) -> list[str]:
    """Return warnings about messages that are not in the bag."""
    return ([f'{dropped.total()} messages dropped: the disk is too slow'] if dropped else []) + (
        [f'{missed.total()} messages missed: this process had to wait for a core, or the network lost them'] if missed else [])


def _other_form(name: str) -> str:
    """Return the raw image topic of a compressed one, and vice versa."""
    return name.removesuffix('/compressed') if name.endswith('/compressed') else f'{name}/compressed'


def _weaker(wanted: QoSProfile, have: QoSProfile) -> bool:
    return ((have.reliability == ReliabilityPolicy.RELIABLE and wanted.reliability != have.reliability)
            or (have.durability == DurabilityPolicy.TRANSIENT_LOCAL and wanted.durability != have.durability))


def _profile(qos: QoSProfile) -> dict[str, Any]:
    """Return an offered QoS profile in the format of rosbag2's metadata."""
    def duration(value: Any) -> dict[str, int]:
        seconds, nanoseconds = divmod(value.nanoseconds, 10 ** 9)
        return {'sec': seconds, 'nsec': nanoseconds}

    return {'history': qos.history.short_key, 'depth': qos.depth, 'reliability': qos.reliability.short_key,
            'durability': qos.durability.short_key, 'deadline': duration(qos.deadline),
            'lifespan': duration(qos.lifespan), 'liveliness': qos.liveliness.short_key,
            'liveliness_lease_duration': duration(qos.liveliness_lease_duration),
            'avoid_ros_namespace_conventions': qos.avoid_ros_namespace_conventions}


def main() -> int:
    """Run the node until SIGINT or SIGTERM."""
    os.nice(10)  # the robot's processes come first
    # The events executor does not deliver message info, which has the time of reception.
    return run(Recorder, executor='single')

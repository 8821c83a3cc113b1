"""The recorder: a bag that others open, with the definitions of our messages, whatever ends it."""
import errno
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import numpy as np
import pytest
import rclpy
import yaml
from ament_index_python import get_package_prefix
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Twist, TwistStamped
from mcap.reader import make_reader
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.serialization import serialize_message
from rosbags.rosbag2 import Reader
from rosbags.typesys import get_types_from_msg
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import Header, String
from world_model_rig import wait_for

from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.msg import ActionChunk, DeadlineStatus, PredictedFuture
from worldmodel_ros.nodes.common.diagnostics import OK, WARN
from worldmodel_ros.nodes.common.qos import CAMERA, COMMAND, LATCHED, STATUS
from worldmodel_ros.nodes.recorder import node as recorder
from worldmodel_ros.nodes.recorder.backlog import Backlog, Received
from worldmodel_ros.nodes.recorder.bag import BagWriter, TopicDescription
from worldmodel_ros.nodes.recorder.types import UnknownTypeError, definition, message_class

NS = 1_000_000_000
RECORDED = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage', 'geometry_msgs/msg/TwistStamped',
            'std_msgs/msg/String', 'visualization_msgs/msg/MarkerArray', 'diagnostic_msgs/msg/DiagnosticArray',
            *(f'worldmodel_ros/msg/{name}'
              for name in ('ActionChunk', 'PredictedFuture', 'DeadlineStatus', 'CommandStatus')))
STRING = TopicDescription('/text', 'std_msgs/msg/String', definition('std_msgs/msg/String'), 'RIHS01_0')


def text(content):
    return serialize_message(String(data=content))


def fill(writer, files):
    """Write messages until there are so many files."""
    while len(writer._files) < files:
        writer.write('/text', 0, text('x' * 50_000))


@pytest.mark.parametrize('name', RECORDED)
def test_the_definition_of_a_type_names_the_fields_that_its_class_has(name):
    types = get_types_from_msg(definition(name), name)
    _, fields = types[name]
    assert [field for field, _ in fields] == list(message_class(name).get_fields_and_field_types())
    # Everything that it depends on is there too, and nothing twice.
    parts = [line for line in definition(name).splitlines() if line.startswith('MSG: ')]
    assert len(parts) == len(set(parts)) == len(types) - 1


def test_comments_with_units_come_along():
    text = definition('worldmodel_ros/msg/DeadlineStatus')
    assert '# time allowed from image received to command published [s]' in text


@pytest.mark.parametrize('name, complaint', [
    ('nobody_msgs/msg/Nothing', 'install the package nobody_msgs'), ('String', 'looks like sensor_msgs/msg/Image')])
def test_a_type_that_is_not_installed_is_refused_with_the_remedy(name, complaint):
    for look_up in (definition, message_class):
        with pytest.raises(UnknownTypeError, match=complaint):
            look_up(name)


def test_what_has_no_room_is_dropped_oldest_first_and_counted():
    backlog = Backlog(max_bytes=10)
    for number in range(5):
        backlog.put(Received(f'/{number % 2}', number, b'four'))
    backlog.put(Received('/large', 9, bytes(100)))  # alone it may be larger than all
    assert backlog.dropped == {'/0': 3, '/1': 2} and backlog.bytes == 100
    backlog.close()
    assert backlog.get().topic == '/large' and backlog.get() is None


def test_the_backlog_waits_for_what_comes():
    backlog = Backlog(max_bytes=100)
    threading.Timer(0.05, lambda: backlog.put(Received('/a', 1, b'x'))).start()
    assert backlog.get() == ('/a', 1, b'x')


def test_a_bag_is_split_by_size_and_reads_as_one(tmp_path):
    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)
    messages = [(k * NS, text(f'{k} ' + 'x' * 50_000)) for k in range(40)]
    for at, data in messages:
        writer.write('/text', at, data)
    assert writer.counts == {'/text': 40}
    writer.close()
    writer.close()
    files = sorted(path.name for path in (tmp_path / 'bag').glob('*.mcap'))
    assert len(files) > 2 and files[0] == 'bag_0.mcap'
    assert all(path.stat().st_size < 1_000_000 for path in (tmp_path / 'bag').glob('*.mcap'))
    with Reader(tmp_path / 'bag') as reader:
        assert [(at, bytes(data)) for _, at, data in reader.messages()] == messages
        assert (reader.start_time, reader.message_count) == (0, 40)
    information = yaml.safe_load((tmp_path / 'bag' / 'metadata.yaml').read_text())['rosbag2_bagfile_information']
    assert information['relative_file_paths'] == [file['path'] for file in information['files']] == [
        f'bag_{k}.mcap' for k in range(len(files))]
    assert sum(file['message_count'] for file in information['files']) == information['message_count'] == 40
    assert information['duration']['nanoseconds'] == 39 * NS


def test_a_closed_file_may_be_moved_away_while_the_recording_goes_on(tmp_path):
    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)

    fill(writer, 2)
    before = writer.bytes_written
    moved = (tmp_path / 'bag' / 'bag_0.mcap').rename(tmp_path / 'bag_0.mcap')
    assert writer.bytes_written == before > moved.stat().st_size > 500_000
    fill(writer, 3)
    writer.close()
    assert writer.bytes_written == sum(path.stat().st_size for path in [moved, *(tmp_path / 'bag').glob('*.mcap')])


def test_each_file_tells_of_itself_what_rosbag2_reads_of_it(tmp_path):
    writer = BagWriter(tmp_path / 'bag')
    writer.add_topic(STRING)
    writer.write('/text', 5, text('a'))
    writer.close()
    with (tmp_path / 'bag' / 'bag_0.mcap').open('rb') as stream:
        reader = make_reader(stream, validate_crcs=True)
        assert reader.get_header().profile == 'ros2'
        own, = reader.iter_metadata()
        summary = reader.get_summary()
    assert own.name == 'rosbag2'
    assert yaml.safe_load(own.metadata['serialized_metadata'])['message_count'] == 1
    schema, = summary.schemas.values()
    assert (schema.name, schema.encoding) == ('std_msgs/msg/String', 'ros2msg')
    channel, = summary.channels.values()
    assert (channel.topic, channel.message_encoding) == ('/text', 'cdr')
    assert channel.metadata == {'offered_qos_profiles': '[]\n', 'topic_type_hash': 'RIHS01_0'}


def test_a_bag_is_never_overwritten(tmp_path):
    (tmp_path / 'file').touch()
    for folder in (tmp_path, tmp_path / 'file'):
        with pytest.raises(FileExistsError, match='name a new folder'):
            BagWriter(folder)


def test_a_bag_without_a_message_opens_too(tmp_path):
    BagWriter(tmp_path / 'bag').close()
    with Reader(tmp_path / 'bag') as reader:
        assert reader.message_count == 0


@pytest.mark.parametrize('files', [1, 2])
def test_a_file_that_the_disk_did_not_take_is_not_called_complete(tmp_path, monkeypatch, files):
    failures = [OSError(errno.EIO, 'Input/output error')]

    def fail_once(descriptor):
        if failures:
            raise failures.pop()

    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)
    monkeypatch.setattr('os.fsync', fail_once)
    fill(writer, files)
    with pytest.raises(OSError, match='Input/output error'):
        writer.close()
    writer.close()
    assert not (tmp_path / 'bag' / 'metadata.yaml').exists()
    # What the disk did take is complete.
    assert [bool(make_reader(path.open('rb')).get_summary()) for path in (tmp_path / 'bag').glob('*.mcap')] == [True] * files


def test_a_file_that_the_disk_did_not_take_ends_the_recording_at_the_next_split(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, 'Input/output error')

    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)
    monkeypatch.setattr('os.fsync', fail)
    fill(writer, 2)
    with pytest.raises(OSError, match='Input/output error'):
        fill(writer, 3)


def test_what_came_before_a_file_that_could_not_be_begun_is_complete(tmp_path, monkeypatch):
    def fail(self):
        raise OSError(errno.ENOSPC, 'No space left on device')

    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)
    monkeypatch.setattr(BagWriter, '_begin', fail)
    with pytest.raises(OSError, match='No space left'):
        fill(writer, 2)
    writer.close()
    with Reader(tmp_path / 'bag') as reader:
        assert reader.message_count == writer.counts['/text'] > 5


def test_messages_do_not_wait_until_the_file_before_is_on_the_disk(tmp_path, monkeypatch):
    slow, waited = threading.Event(), []
    monkeypatch.setattr('os.fsync', lambda descriptor: waited.append(slow.wait(20.0)))
    writer = BagWriter(tmp_path / 'bag', max_file_bytes=500_000)
    writer.add_topic(STRING)
    fill(writer, 2)
    written, size = writer.counts, writer.bytes_written
    assert not waited and size > 500_000
    threading.Timer(0.2, slow.set).start()
    fill(writer, 3)  # but those of a third file do, or a slow disk would have ever more files to take
    assert waited
    writer.close()
    assert waited == [True] * 3 and writer.counts['/text'] > written['/text']
    with Reader(tmp_path / 'bag') as reader:
        assert reader.message_count == writer.counts['/text']


class Robot:
    """Publishes what a robot and its model do, with a number in each message."""

    def __init__(self, namespace):
        self.context = rclpy.Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node('robot', context=self.context, namespace=namespace)
        self.publishers = {topic: self.node.create_publisher(kind, topic, qos) for topic, kind, qos in (
            ('camera/image_raw', Image, CAMERA), ('cmd_vel', TwistStamped, COMMAND), ('goal', String, LATCHED),
            ('action_chunk', ActionChunk, COMMAND), ('predicted_future', PredictedFuture, STATUS),
            ('deadline_status', DeadlineStatus, STATUS))}
        self.publishers['goal'].publish(String(data='red'))
        self.sent = 0

    def publish(self):
        self.sent += 1
        stamp = self.node.get_clock().now().to_msg()
        header = Header(stamp=stamp, frame_id=str(self.sent))
        pixels = np.full((48, 64, 3), self.sent % 256, np.uint8)
        chunk = ActionChunk(header=header, sequence=self.sent, names=['linear.x'], values=array('f', [0.5]))
        for topic, message in (
                ('camera/image_raw', Image(header=header, height=48, width=64, step=192, encoding='rgb8',
                                           data=array('B', pixels.tobytes()))),
                ('cmd_vel', TwistStamped(header=header)), ('action_chunk', chunk),
                ('predicted_future', PredictedFuture(header=header, sequence=self.sent, actions=chunk, goal='red')),
                ('deadline_status', DeadlineStatus(header=header, sequence=self.sent))):
            self.publishers[topic].publish(message)

    def rename(self, topic, name, kind, qos):
        """Publish a topic under another name."""
        self.node.destroy_publisher(self.publishers[topic])
        self.publishers[topic] = self.node.create_publisher(kind, name, qos)

    def heard(self):
        return all(publisher.get_subscription_count() for publisher in self.publishers.values())

    def close(self):
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


@pytest.fixture
def robot():
    subject = Robot('robot7')
    yield subject
    subject.close()


@pytest.fixture
def record(tmp_path):
    """Return what starts a recorder in a process; it is ended at the end if it still runs."""
    started = []

    def record(*arguments, **options):
        executable = Path(get_package_prefix('worldmodel_ros')) / 'lib' / 'worldmodel_ros' / 'recorder'
        with (tmp_path / 'log').open('wb') as log:
            started.append(subprocess.Popen(
                [sys.executable, executable, '--ros-args', '-r', '__ns:=/robot7', '-p', f'bag:={tmp_path / "bag"}',
                 *arguments], stdout=log, stderr=log, **options))
        return started[-1]

    yield record
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def stranger():
    """A node of another participant in the robot's namespace, gone at the end, whatever becomes of the test."""
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node('stranger', context=context, namespace='robot7')
    yield node
    node.destroy_node()
    rclpy.shutdown(context=context)


def publish_for(robot, seconds, period=0.02):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        robot.publish()
        time.sleep(period)


def end(process, number=signal.SIGINT):
    process.send_signal(number)
    return process.wait(20.0)


@pytest.mark.ros
@pytest.mark.untimed
def test_what_a_robot_does_is_in_the_bag_when_the_recorder_is_interrupted(robot, record, tmp_path):
    process = record()
    wait_for(robot.heard, 'the recorder')
    began = time.time_ns()
    publish_for(robot, 1.0, period=0.05)
    time.sleep(0.3)
    assert end(process) == 0
    with open_bag(tmp_path / 'bag') as bag:
        assert bag.problems == []
        read = {}
        for topic, raw, log_ns in bag.messages():
            read.setdefault(topic.name, []).append((bag.deserialize(topic, raw), log_ns))
        qos = {name: topic.qos[0] for name, topic in bag.topics.items()}
    assert {name for name in read if name.startswith('/robot7/')} == {f'/robot7/{name}' for name in robot.publishers}
    for name in ('predicted_future', 'deadline_status'):
        assert [m.sequence for m, _ in read[f'/robot7/{name}']] == list(range(1, robot.sent + 1))
    future = read['/robot7/predicted_future'][0][0]
    assert (future.goal, future.actions.names, future.actions.values.tolist()) == ('red', ['linear.x'], [0.5])
    images = read['/robot7/camera/image_raw']  # best effort
    assert len(images) > 0.8 * robot.sent
    for message, log_ns in images:
        assert set(message.data) == {int(message.header.frame_id) % 256}
        stamp = message.header.stamp.sec * NS + message.header.stamp.nanosec
        assert began <= stamp <= log_ns < stamp + NS
    # Published before there was a recorder.
    assert [m.data for m, _ in read['/robot7/goal']] == ['red']
    assert qos['/robot7/goal'].durability.name == 'TRANSIENT_LOCAL'
    assert qos['/robot7/camera/image_raw'].reliability.name == 'BEST_EFFORT'
    information = yaml.safe_load((tmp_path / 'bag' / 'metadata.yaml').read_text())['rosbag2_bagfile_information']
    hashes = {t['topic_metadata']['name']: t['topic_metadata']['type_description_hash']
              for t in information['topics_with_message_count']}
    assert all(value.startswith('RIHS01_') and len(value) == 71 for value in hashes.values())


@pytest.mark.ros
@pytest.mark.untimed
def test_a_killed_recorder_leaves_a_bag_that_can_be_read(robot, record, tmp_path):
    process = record('-p', 'max_file_mb:=1')
    wait_for(robot.heard, 'the recorder')
    wait_for(lambda: robot.publish() or time.sleep(0.005) or (tmp_path / 'bag' / 'bag_2.mcap').exists(), 'a third file')
    publish_for(robot, 1.0)
    process.kill()
    process.wait()

    def read(path):
        with open_bag(path) as bag:
            sequences = [bag.deserialize(t, raw).sequence for t, raw, _ in bag.messages(['/robot7/predicted_future'])]
            return sequences, {problem.kind for problem in bag.problems}

    closed = [sequence for k in range(2) for sequence in read(tmp_path / 'bag' / f'bag_{k}.mcap')[0]]
    found, problems = read(tmp_path / 'bag')
    # The last file lacks its index, and a chunk that was not written yet; the rest of it is there, and it is said.
    assert found[:len(closed)] == closed and len(found) > len(closed) > 10
    assert found == sorted(set(found))
    assert {'no metadata', 'truncated'} <= problems


@pytest.mark.ros
@pytest.mark.untimed
def test_a_full_disk_ends_the_recording_but_neither_the_process_nor_the_bag(robot, record, tmp_path):
    limit = 2_000_000
    process = record(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    wait_for(robot.heard, 'the recorder')
    log = tmp_path / 'log'
    wait_for(lambda: robot.publish() or time.sleep(0.005) or 'Nothing more is recorded' in log.read_text(), 'the error')
    publish_for(robot, 0.2)
    assert end(process) == 0
    assert 'File too large' in log.read_text()
    with open_bag(tmp_path / 'bag') as bag:
        assert len(list(bag.messages(['/robot7/predicted_future']))) > 20


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('arguments, complaint', [
    (['-p', 'bag:=/proc/bag'], 'cannot start: bag: '), (['-p', 'queue_mb:=0'], 'queue_mb'),
    (['-r', 'camera/image_raw:=/front image'], "cannot start: failed to initialize rcl: Couldn't parse remap rule"),
    (['--params-file', 'wrong.yaml'], "cannot start: failed to initialize rcl: Couldn't parse params file")])
def test_a_recorder_that_cannot_record_says_why_and_ends(record, tmp_path, arguments, complaint):
    assert record(*arguments).wait(20.0) == 2
    assert complaint in (said := (tmp_path / 'log').read_text()) and 'Traceback' not in said


@pytest.mark.ros
@pytest.mark.untimed
def test_a_topic_of_two_types_is_named_and_left_out_and_a_weaker_publisher_is_heard(robot, record, tmp_path, stranger):
    wrong = stranger.create_publisher(String, 'deadline_status', STATUS)
    wait_for(lambda: robot.node.count_publishers('deadline_status') == 2, 'the stranger')
    log, right = tmp_path / 'log', robot.publishers['deadline_status']

    def refused():
        return 'deadline_status is not recorded: it is published with several types' in log.read_text()
    process = record()
    while wait_for(lambda: refused() or (wrong if wrong.get_subscription_count() else None) or
                       (right if right.get_subscription_count() else None), 'the recorder') is not True:
        # DDS told of one publisher before the other, as on a busy machine: that one is recorded.
        assert end(process) == 0
        shutil.rmtree(tmp_path / 'bag')
        wait_for(lambda: not (wrong.get_subscription_count() or right.get_subscription_count()), 'its end', 60.0)
        process = record()
    wait_for(lambda: robot.publishers['predicted_future'].get_subscription_count(), 'the recorder')
    best_effort = robot.node.create_publisher(PredictedFuture, 'predicted_future', CAMERA)
    wait_for(best_effort.get_subscription_count, 'the recorder, at a publisher that offers less')
    for number in range(5):
        best_effort.publish(PredictedFuture(sequence=1000 + number))
        time.sleep(0.02)
    time.sleep(0.3)
    assert end(process, signal.SIGTERM) == 0
    with open_bag(tmp_path / 'bag') as bag:
        numbers = [bag.deserialize(t, raw).sequence for t, raw, _ in bag.messages(['/robot7/predicted_future'])]
        assert '/robot7/deadline_status' not in bag.topics
    assert 1004 in numbers


def spin_until(executor, condition):
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        executor.spin_once(timeout_sec=0.05)


def ends_with_one_twist_stamped(subject, folder):
    """End a recorder; its bag has one command, of the right type."""
    subject.on_shutdown()
    subject.destroy_node()
    with open_bag(folder) as bag:
        assert bag.topics['/robot7/cmd_vel'].type == 'geometry_msgs/msg/TwistStamped'
        assert len(list(bag.messages(['/robot7/cmd_vel']))) == 1


@pytest.mark.ros
@pytest.mark.untimed
def test_what_nobody_publishes_is_warned_of_and_a_stranger_does_not_take_a_topic_over(robot, tmp_path, monkeypatch, stranger):
    monkeypatch.setattr(recorder, '_PATIENCE', 0.5)
    robot.node.destroy_publisher(robot.publishers.pop('camera/image_raw'))
    robot.node.create_publisher(Image, 'front/image_raw', CAMERA)
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('bag', value=str(tmp_path / 'bag')),
        Parameter('topics', value=['camera/image_raw', 'camera/image_raw/compressed', 'cmd_vel', 'deadline_status',
                                   'goal', 'command_status'])])
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)

    spin_until(executor, lambda: subject.report().level == WARN)
    # Neither of the two forms of the camera; command_status may stay away.
    assert subject.report().message == 'no publisher of /robot7/camera/image_raw, /robot7/camera/image_raw/compressed'
    compressed = robot.node.create_publisher(CompressedImage, 'camera/image_raw/compressed', CAMERA)
    spin_until(executor, compressed.get_subscription_count)
    assert subject.report().level == OK
    wrong = stranger.create_publisher(Twist, 'cmd_vel', CAMERA)
    spin_until(executor, lambda: subject.report().level == WARN)
    assert 'not recorded' in subject.report().message
    values = subject.report().values
    robot.publishers['cmd_vel'].publish(TwistStamped())
    spin_until(executor, lambda: subject.report().values['messages'] > values['messages'])
    assert 'geometry_msgs/msg/Twist' in values['not recorded: /robot7/cmd_vel']
    stranger.destroy_publisher(wrong)
    spin_until(executor, lambda: subject.report().level == OK)
    ends_with_one_twist_stamped(subject, tmp_path / 'bag')


@pytest.mark.ros
@pytest.mark.untimed
def test_a_topic_of_two_types_is_recorded_once_the_wrong_publisher_has_ended(robot, tmp_path, stranger):
    wrong, right = stranger.create_publisher(Twist, 'cmd_vel', CAMERA), robot.publishers['cmd_vel']
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('bag', value=str(tmp_path / 'bag')), Parameter('topics', value=['cmd_vel', 'goal'])])
    wait_for(lambda: subject.count_publishers('cmd_vel') == 2, 'both publishers')
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)
    spin_until(executor, lambda: subject.report().message == 'not recorded: /robot7/cmd_vel')
    stranger.destroy_publisher(wrong)
    spin_until(executor, right.get_subscription_count)
    right.publish(TwistStamped())
    spin_until(executor, lambda: subject.report().values['messages'] == 2)  # with the latched goal
    assert subject.report().level == OK
    ends_with_one_twist_stamped(subject, tmp_path / 'bag')


@pytest.mark.ros
@pytest.mark.untimed
def test_with_simulated_time_nothing_is_recorded_before_the_clock_is_heard(robot, tmp_path):
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('use_sim_time', value=True), Parameter('bag', value=str(tmp_path / 'bag')),
        Parameter('topics', value=['goal'])])
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)
    spin_until(executor, lambda: subject.count_publishers('goal'))
    assert subject.report().message == 'waiting for /clock'
    end = time.monotonic() + 1.0  # long enough for the latched goal to come
    while time.monotonic() < end:
        executor.spin_once(timeout_sec=0.05)
    clock = robot.node.create_publisher(Clock, '/clock', STATUS)
    spin_until(executor, lambda: clock.publish(Clock(clock=Time(sec=50))) or subject.report().values['messages'])
    assert subject.report().level == OK
    subject.on_shutdown()
    subject.destroy_node()
    with open_bag(tmp_path / 'bag') as bag:
        assert [log for *_, log in bag.messages()] == [50 * NS] and bag.start_ns == 50 * NS


@pytest.mark.ros
@pytest.mark.untimed
def test_what_has_come_and_was_not_taken_when_it_is_told_to_end_is_in_the_bag_too(robot, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, '_RECEIVED', 1.0)
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('bag', value=str(tmp_path / 'bag')), Parameter('topics', value=['cmd_vel'])])
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)
    commands, end = robot.publishers['cmd_vel'], time.monotonic() + 10.0
    while not commands.get_subscription_count():
        assert time.monotonic() < end
        executor.spin_once(timeout_sec=0.05)
    before = time.time_ns()
    for _ in range(5):
        commands.publish(TwistStamped())
    time.sleep(0.5)  # as long as a busy machine keeps it waiting
    # What the system has and DDS's threads have not received yet.
    late = threading.Timer(0.03, lambda: commands.publish(TwistStamped()))
    late.start()
    subject.on_shutdown()
    late.join()
    subject.destroy_node()
    with open_bag(tmp_path / 'bag') as bag:
        *received, last = [received for _, _, received in bag.messages(['/robot7/cmd_vel'])]
    assert len(received) == 5 and last >= before + 0.5 * NS and before < min(received) and max(received) < before + 0.4 * NS


def test_what_is_missing_between_two_numbers_of_one_publisher_is_counted():
    numbers, alice, bob = recorder.Numbers(), (1, 2), (3, 4)
    numbers.look([alice])
    for number in (7, 8, 12, 10, None, 13):  # 9 and 11 do not come, 10 is late
        numbers.take(number)
    assert numbers.missed == 0  # it may have been another publisher's
    numbers.look([alice])
    assert numbers.missed == 2
    numbers.take(15)
    numbers.look([alice, bob])
    numbers.take(100)
    numbers.look([bob])
    numbers.take(300)
    numbers.take(302)
    numbers.look([bob])
    assert numbers.missed == 3  # only what one that is known has certainly sent


@pytest.mark.ros
@pytest.mark.untimed
def test_a_disk_that_hangs_keeps_neither_messages_in_dds_nor_the_diagnostics_waiting(robot, tmp_path, monkeypatch):
    hangs, entered, waited = threading.Event(), threading.Event(), []

    def write(*arguments):
        entered.set()
        waited.append(hangs.wait(20.0))
    monkeypatch.setattr(BagWriter, 'write', write)
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('bag', value=str(tmp_path / 'bag')), Parameter('queue_mb', value=1),
        Parameter('topics', value=['/before', 'deadline_status'])])
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)
    try:
        subject._backlog.put(Received('/before', 1, bytes(10)))
        assert entered.wait(10.0)
        spin_until(executor, robot.publishers['deadline_status'].get_subscription_count)
        for _ in range(3):
            subject._backlog.put(Received('/before', 2, bytes(600_000)))
        robot.publishers['deadline_status'].publish(DeadlineStatus())
        spin_until(executor, lambda: subject._backlog.bytes > 600_000)  # the newest image, and what was published
        report = subject.report()
        assert not waited and report.level == WARN and report.values['dropped'] == 2
    finally:
        hangs.set()
        subject.on_shutdown()
        subject.destroy_node()


@pytest.mark.ros
@pytest.mark.untimed
def test_ten_seconds_that_the_recorder_has_to_wait_are_in_the_bag_and_what_is_not_is_counted(robot, tmp_path):
    subject = recorder.Recorder(context=robot.context, namespace='robot7', parameter_overrides=[
        Parameter('bag', value=str(tmp_path / 'bag')), Parameter('topics', value=['cmd_vel', 'deadline_status'])])
    executor = SingleThreadedExecutor(context=robot.context)
    executor.add_node(subject)

    def publish_meanwhile(count):  # and nothing is taken
        for _ in range(count):
            robot.publishers['deadline_status'].publish(DeadlineStatus())
            time.sleep(0.005)
        time.sleep(0.2)

    def in_the_bag():
        return subject.report().values['messages']

    spin_until(executor, robot.publishers['deadline_status'].get_subscription_count)
    publish_meanwhile(100)
    spin_until(executor, lambda: in_the_bag() == 100)
    publish_meanwhile(130)
    spin_until(executor, lambda: subject.report().level == WARN)
    spin_until(executor, lambda: in_the_bag() == 200)
    values = subject.report().values
    assert values['missed: /robot7/deadline_status'] == values['missed'] == 30 and values['dropped'] == 0
    assert subject.report().message.startswith('30 messages missed: ')
    subject.on_shutdown()
    subject.destroy_node()


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('info, options', [('front/camera_info', []), ('lens', ['--camera-info', 'lens'])],
                         ids=['next to the images', 'named'])
def test_the_command_records_one_robot_with_its_own_names_until_it_is_interrupted(robot, tmp_path, info, options):
    infos = robot.publishers['camera/camera_info'] = robot.node.create_publisher(CameraInfo, info, CAMERA)
    robot.rename('camera/image_raw', 'front/image_raw', Image, CAMERA)
    robot.rename('cmd_vel', '/base/cmd_vel', TwistStamped, COMMAND)
    with (tmp_path / 'log').open('wb') as log:
        process = subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', 'record', '--namespace', 'robot7',
                                    '--out', str(tmp_path / 'bag'), '--image', 'front/image_raw', '--cmd-vel',
                                    '/base/cmd_vel', *options], stdout=log, stderr=log)
    try:
        wait_for(robot.heard, 'the recorder')
        infos.publish(CameraInfo(width=64))
        publish_for(robot, 0.3)
        time.sleep(0.3)
        assert end(process) == 0
    finally:
        process.kill()
        process.wait()
    assert f'in {tmp_path / "bag"}' in (tmp_path / 'log').read_text()
    with open_bag(tmp_path / 'bag') as bag:
        assert bag.topics['/robot7/predicted_future'].count == robot.sent
        assert bag.topics[f'/robot7/{info}'].count == 1  # the one that the model's node listens to
        assert bag.topics['/base/cmd_vel'].count == robot.sent and bag.topics['/robot7/front/image_raw'].count

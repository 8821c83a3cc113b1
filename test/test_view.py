"""A bag, or what runs, becomes a Rerun recording, which is opened and read back. Needs the extra [view]."""
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from bag_messages import TYPES, header, image_message
from bags import simulated_drive, write_bag
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import get_types_from_msg

from worldmodel_ros import cli
from worldmodel_ros.bags.source import open_bag

rerun = pytest.importorskip('rerun', reason='needs the extra [view]: rerun-sdk, 170 MB')
from worldmodel_ros.evaluate.view import write_recording  # noqa: E402 - after the skip

ROOT = Path(__file__).resolve().parents[1]
START = 1_700_000_000_000_000_000
for _name in ('Timings', 'ActionChunk', 'Candidate', 'ForecastThing', 'Decision', 'PredictedFuture', 'DeadlineStatus',
              'CommandStatus'):
    TYPES.register(get_types_from_msg((ROOT / 'msg' / f'{_name}.msg').read_text(), f'worldmodel_ros/msg/{_name}'))


def zero(type_name):
    """A message of a type with nothing in it."""
    fields = {}
    for name, node in TYPES.fielddefs[type_name][1]:
        kind, detail = node[0].name, node[1]
        if kind == 'BASE':
            fields[name] = '' if detail[0] == 'string' else False if detail[0] == 'bool' else 0
        elif kind == 'NAME':
            fields[name] = zero(detail)
        else:
            inner = detail[0]
            plain = inner[0].name == 'BASE' and inner[1][0] != 'string'
            fields[name] = np.zeros(0, getattr(np, inner[1][0])) if plain else []
    return TYPES.types[type_name](**fields)


def message(kind, /, **given):
    """Return a message of this package with some of its fields."""
    empty = zero(f'worldmodel_ros/msg/{kind}')
    for field, value in given.items():
        object.__setattr__(empty, field, value)
    return empty


def ticks(count):
    """Return messages of so many ticks: topic, type, time, message."""
    frame = TYPES.types['sensor_msgs/msg/CompressedImage'](
        header(START, ''), 'png', np.frombuffer(b'\x89PNG\r\n\x1a\n', np.uint8))
    extra = []
    for tick in range(count):
        at = START + tick * 100_000_000
        told = header(at, 'base_link')
        path = np.linspace(0.0, 1.0, 4, dtype=np.float32)
        candidates = [message('Candidate', name='policy', score=0.5 + tick, x=path, y=0 * path),
                      message('Candidate', name='left 0.4 s', score=-1.0, x=path, y=path, vetoed=True)]
        chunk = message('ActionChunk', header=told, names=['linear.x', 'angular.z'], step_period=0.1, tier=1,
                        values=np.array([0.3, 0.1] * 4, np.float32))
        extra += [('/decision', 'worldmodel_ros/msg/Decision', at,
                   message('Decision', header=told, task='street', chosen='policy', candidates=candidates)),
                  ('/predicted_future', 'worldmodel_ros/msg/PredictedFuture', at,
                   message('PredictedFuture', header=told, frames=[frame] * 4,
                           collision_risk=np.array([0.1, 0.4], np.float32))),
                  ('/action_chunk', 'worldmodel_ros/msg/ActionChunk', at, chunk),
                  ('/deadline_status', 'worldmodel_ros/msg/DeadlineStatus', at,
                   message('DeadlineStatus', header=told, tier=tick % 2 + 1, latency=0.02, budget=0.05)),
                  ('/command_status', 'worldmodel_ros/msg/CommandStatus', at,
                   message('CommandStatus', header=told, limited=tick, reason='a reason'))]
    return tuple(extra)


@pytest.fixture(scope='module')
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp('view')
    bag = write_bag(folder / 'bag', simulated_drive(1.0), extra=ticks(5))
    target = folder / 'bag.rrd'
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'view', str(bag), '--out', str(target)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 'Warning' not in done.stderr and 'WARN' not in done.stderr, done.stderr
    return target


def chunks_of(recording):
    """What was recorded, by entity: a list of chunks, of those that have a time."""
    from rerun.chunk import RrdReader
    found = {}
    for chunk in RrdReader(str(recording)).stream().to_chunks():
        if not chunk.is_static:
            found.setdefault(chunk.entity_path, []).append(chunk)
    return found


@pytest.fixture(scope='module')
def chunks(recording):
    return chunks_of(recording)


def column(chunks, entity, ending):
    """Return the values of one component of an entity, in the order of the recording."""
    values = []
    for chunk in chunks[entity]:
        batch = chunk.to_record_batch()
        for name in batch.schema.names:
            if name.endswith(ending):
                values += batch.column(name).to_pylist()
    return values


def test_camera_predictions_candidates_plan_tiers_and_limits_are_there(chunks):
    for entity in ('/camera/image_raw/compressed', '/predicted_future/frames/1', '/predicted_future/frames/4',
                   '/decision/candidates', '/action_chunk/path', '/deadline_status/tier', '/command_status/limited',
                   '/cmd_vel/linear.x'):
        assert entity in chunks, sorted(chunks)
        assert all('ROS time' in chunk.timeline_names for chunk in chunks[entity])


def test_numbers_and_names_are_those_of_the_messages(chunks):
    assert [value for value, in column(chunks, '/decision/scores/policy', 'scalars')] == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [value for value, in column(chunks, '/deadline_status/tier', 'scalars')] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert [value for value, in column(chunks, '/command_status/limited', 'scalars')] == [0.0, 1.0, 2.0, 3.0, 4.0]
    labels = column(chunks, '/decision/candidates', ':labels')
    assert len(labels) == 5 and labels[0] == ['policy 0.50', 'left 0.4 s -1.00']


def test_a_message_is_at_the_stamp_of_its_observation(chunks):
    times = []
    for chunk in chunks['/deadline_status/latency']:
        times += [int(value.value) for value in chunk.to_record_batch().column('ROS time')]
    assert times == [START + tick * 100_000_000 for tick in range(5)]


def test_a_bag_that_is_none_is_refused_in_words(tmp_path, capsys):
    assert cli.main(['view', str(tmp_path / 'nowhere')]) == 1
    assert 'worldmodel view:' in capsys.readouterr().err


def test_no_more_messages_of_a_topic_are_shown_than_asked_for(tmp_path):
    bag = write_bag(tmp_path / 'bag', simulated_drive(1.0), extra=ticks(10))
    with open_bag(bag) as opened:
        shown = write_recording(opened, tmp_path / 'view.rrd', every=0.25)
    assert shown['/decision'] == 4  # at 0, 0.3, 0.6 and 0.9 s
    assert [value for value, in column(chunks_of(tmp_path / 'view.rrd'), '/command_status/limited', 'scalars')] == [0, 3, 6, 9]


_CONVERT = """
import json, resource, sys, time
from pathlib import Path
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.evaluate.view import write_recording
peak = lambda: int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]) / 1024
began = time.perf_counter()
with open_bag(Path(sys.argv[1])) as bag:
    shown = write_recording(bag, Path(sys.argv[1]).with_suffix('.rrd'))
print(json.dumps([sum(shown.values()), peak(), time.perf_counter() - began]))
"""


def test_a_large_bag_is_shown_in_memory_that_does_not_grow_with_it_and_in_useful_time(tmp_path):
    told = {}
    for seconds in (30, 300):
        bag = tmp_path / f'{seconds}'
        with Writer(bag, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
            connections = {}
            image = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
            for topic, kind, _, one in ticks(1):
                connections[topic] = writer.add_connection(topic, kind, typestore=TYPES), TYPES.serialize_cdr(one, kind)
            raw = TYPES.serialize_cdr(image_message(image, START, 'rgb8'), 'sensor_msgs/msg/Image')
            connections['/image'] = writer.add_connection('/image', 'sensor_msgs/msg/Image', typestore=TYPES), raw
            for tick in range(10 * seconds):
                for connection, data in connections.values():
                    writer.write(connection, START + tick * 100_000_000, bytes(data))
        done = subprocess.run([sys.executable, '-c', _CONVERT, str(bag)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        told[seconds] = json.loads(done.stdout.splitlines()[-1])
    (few, little, _), (many, much, wall) = told.values()
    assert many == 10 * few == 3000 * 6
    assert much < little + 60.0, told  # MiB; ten times the messages
    assert wall < 60.0, told           # s, of five minutes: about three where nothing else runs


@pytest.mark.ros
@pytest.mark.waiting
def test_what_runs_is_shown_as_it_comes(tmp_path):
    import rclpy
    from rclpy.context import Context
    from rclpy.node import Node

    from worldmodel_ros.msg import DeadlineStatus, Decision
    from worldmodel_ros.nodes.common.qos import STATUS
    target, context = tmp_path / 'live.rrd', Context()
    rclpy.init(context=context)
    robot = Node('robot', context=context, namespace='left')
    status, decision = (robot.create_publisher(kind, topic, STATUS) for kind, topic in (
        (DeadlineStatus, 'deadline_status'), (Decision, 'decision')))
    other = robot.create_publisher(DeadlineStatus, '/right/deadline_status', STATUS)
    over = threading.Event()

    def run():
        number = 0
        while not over.wait(0.05):
            number += 1
            for publisher in (status, other):
                publisher.publish(DeadlineStatus(tier=1, latency=number / 1000))
            decision.publish(Decision(task='street', chosen='policy'))
    running = threading.Thread(target=run)
    running.start()
    try:
        shown = subprocess.run(
            [sys.executable, '-m', 'worldmodel_ros.cli', 'view', '--live', '--namespace', 'left', '--seconds', '6', '--out',
             str(target)], capture_output=True, text=True, timeout=60)
    finally:
        over.set()
        running.join()
        rclpy.shutdown(context=context)
    assert shown.returncode == 0, shown.stderr
    chunks = chunks_of(target)
    latencies = [value for value, in column(chunks, '/left/deadline_status/latency', 'scalars')]
    assert len(latencies) > 20 and np.diff(latencies) == pytest.approx(0.001, abs=1e-4)
    assert column(chunks, '/left/decision/chosen', 'text')[0] == ['street: policy']
    assert not any(entity.startswith('/right') for entity in chunks)


@pytest.mark.parametrize(('words', 'complaint'), [
    ([], 'give a bag, or --live'), (['a', '--live'], 'give a bag, or --live'), (['a', '--seconds', '3'], '--seconds goes with'),
    (['--live', '--out', 'a.rrd', '--connect', 'rerun+http://desk:9876/proxy'], '--out or --connect')])
def test_what_does_not_go_together_is_refused(words, complaint, capsys):
    assert cli.main(['view', *words]) == 2
    assert complaint in capsys.readouterr().err
